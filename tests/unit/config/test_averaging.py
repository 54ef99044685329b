"""What `diloco` says of how pseudo-gradients travel, and what it leaves open."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.averaging.round_average import averaging_codec
from shoal.codec.gathered import GatheredCodec
from shoal.codec.plain import PLAIN
from shoal.config import Config, load_config
from shoal.errors import ConfigError


def loaded(more: dict[str, Any] | None = None, **diloco: Any) -> Config:
    return load_config(None, {"diloco": diloco, **(more or {})}, {})


@pytest.mark.parametrize(
    ("compression", "feedback", "averages_senders"),
    [
        ("none", 0.0, False),
        ("bf16", 0.0, False),
        ("int8", 0.0, False),
        ("2bit", 1.0, False),
        ("auto", 1.0, False),
        ("sparse", 0.95, True),
    ],
)
def test_what_is_left_open_suits_the_codec(compression: str, feedback: float, averages_senders: bool) -> None:
    diloco = loaded(averaging_compression=compression).diloco
    assert (diloco.feedback, diloco.averages_senders) == (feedback, averages_senders)


def test_what_is_said_counts() -> None:
    said = {"averaging_feedback": 0.5, "averaging_over": "all", "averaging_density": 0.25}
    diloco = loaded(averaging_compression="sparse", **said).diloco
    assert (diloco.feedback, diloco.averages_senders) == (0.5, False)
    codec = averaging_codec(diloco)
    assert isinstance(codec, GatheredCodec)
    assert codec.feedback == 0.5
    # A quarter of the values, of two bits each, and where they are.
    assert codec.max_size_bytes(1 << 20) < (1 << 20) * 4 / 8
    assert averaging_codec(loaded().diloco) is PLAIN


@pytest.mark.parametrize("said", [{"averaging_feedback": 0.9}, {"averaging_over": "senders"}])
def test_feedback_and_senders_mean_nothing_to_sums_on_their_way(said: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="averaging_feedback and averaging_over mean nothing"):
        loaded(averaging_compression="bf16", **said)


@pytest.mark.parametrize("density", [0.0, 1.5])
def test_a_density_is_a_share(density: float) -> None:
    with pytest.raises(ConfigError, match="averaging_density"):
        loaded(averaging_compression="sparse", averaging_density=density)


def test_learned_step_sizes_are_not_rounded_among_other_values() -> None:
    with pytest.raises(ConfigError, match=r"int4: learned step sizes \(quant\)"):
        loaded({"quant": {}}, averaging_compression="int4")
    loaded({"quant": {}}, averaging_compression="bf16")


def test_steps_that_overlap_are_some_of_a_round() -> None:
    said: dict[str, Any] = {"averaging_compression": "int4", "inner_steps": 10}
    diloco = loaded(**said, overlap_steps=9, overlap_merge="carry").diloco
    assert (diloco.overlap_steps, diloco.overlap_merge) == (9, "carry")
    assert (loaded().diloco.overlap_steps, loaded().diloco.overlap_merge) == (0, "mean")
    with pytest.raises(ConfigError, match="overlap_steps = 10 are no part of the inner_steps = 10"):
        loaded(**said, overlap_steps=10)


@pytest.mark.parametrize("compression", ["none", "bf16", "fp16"])
def test_sums_that_are_formed_on_their_way_hide_behind_no_steps(compression: str) -> None:
    with pytest.raises(ConfigError, match="overlap_steps = 3 would hide nothing"):
        loaded(averaging_compression=compression, overlap_steps=3)


def test_where_nothing_overlaps_there_is_nothing_to_merge() -> None:
    with pytest.raises(ConfigError, match="overlap_merge = carry means nothing"):
        loaded(averaging_compression="int8", overlap_merge="carry")


def test_a_run_that_is_to_be_the_same_again_follows_no_measured_links() -> None:
    with pytest.raises(ConfigError, match="auto follows links as they are measured"):
        loaded({"run": {"deterministic": True}}, averaging_compression="auto")
    assert loaded(averaging_compression="auto", overlap_steps=3).diloco.is_gathered
