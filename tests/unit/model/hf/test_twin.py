"""A model that would not be the same when it is cut is refused before a run, with its name and the version."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.unit.model.hf.families import EXACT, OPT, values_of

from shoal.model.hf.family import HfFamily
from shoal.model.hf.library import model_config
from shoal.model.hf.routers import unknown_routers
from shoal.model.hf.skeleton import Skeleton
from shoal.model.hf.small import small_values
from shoal.model.hf.twin import CHUNK_TOKENS, TOKENS, difference
from shoal.model.hf.verdicts import Verdicts, twin_key


def _difference(values: dict[str, Any]) -> str:
    return difference(values, lambda values: HfFamily(values, TOKENS, loss_chunk=CHUNK_TOKENS))


def _without_loss(kind: str) -> dict[str, float]:
    """What is said of a model where the installed version does not say where its routers are."""
    model = Skeleton(model_config(values_of(kind), {})).model
    return {"router_aux_loss_coef": 0.0} if unknown_routers(model) else {}


MIXES = ("bloom", "gpt_oss", "qwen3_next", "lfm2", "falcon_h1")
"""Whose layers do not take positions for borders of texts."""


@pytest.mark.usual("llama", "qwen3_next")
@pytest.mark.parametrize("kind", EXACT)
def test_a_model_in_which_texts_of_a_sample_mix_is_refused_where_conversations_are_packed(kind: str) -> None:
    values = values_of(kind, **_without_loss(kind))
    found = difference(values, lambda values: HfFamily(values, TOKENS, loss_chunk=CHUNK_TOKENS, packs=True))
    # This is looked at last: of what is exact nothing else is said.
    if kind in MIXES:
        assert "texts that share a sample do not stay apart" in found
    else:
        assert found == ""


@pytest.mark.usual("llama", "gpt2", "gemma3_text")
@pytest.mark.parametrize("kind", EXACT)
def test_the_twin_of_a_model_of_usual_sizes_is_small_and_what_is_exact_is_found_to_be(kind: str) -> None:
    values = {"model_type": kind, "tie_word_embeddings": False, **_without_loss(kind)}
    twin = HfFamily(small_values(values, model_config(values, {})), TOKENS)
    with torch.device("meta"):
        units = [twin.build_unit(index) for index in range(twin.num_units)]
    assert twin.config.num_hidden_layers == (2 if kind == "bloom" else 4)
    assert sum(p.numel() for unit in units for p in unit.parameters()) < 2_000_000
    assert _difference(values) == ""


def test_a_model_that_adds_its_positions_in_every_part_is_refused() -> None:
    assert "opt of transformers" in (found := _difference(OPT))
    assert "the output is another one" in found


def _scaled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that scales what comes in, as Gemma's did."""

    def scaled(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **named: Any) -> Any:
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return forward(self, inputs_embeds=embedded * 1.5, **named)

    return scaled


def _steepened(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that gives what comes in twice its gradient."""

    def steepened(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **named: Any) -> Any:
        embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds * 1.0
        embedded.register_hook(lambda gradient: 2.0 * gradient)
        return forward(self, inputs_embeds=embedded, **named)

    return steepened


def _sharing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a base model that gives its layers a place for what they share."""

    def sharing(self: Any, **named: Any) -> Any:
        return forward(self, shared={}, **named)

    return sharing


def _reading(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a layer that reads what the first one has left for the others."""

    def reading(self: Any, hidden_states: Any, *, shared: dict[str, Any], **named: Any) -> Any:
        found = forward(self, hidden_states + shared.get("first", 0.0), **named)
        shared.setdefault("first", found)
        return found

    return reading


def test_a_scale_in_the_forward_of_the_whole_model_is_refused(
    transformers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.LlamaModel, "forward", _scaled(transformers.LlamaModel.forward))
    assert "in 6 stages the output is another one" in _difference(values_of("llama"))


def _mixing(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a whole model whose logits depend on those of the other tokens."""

    def mixing(self: Any, **named: Any) -> Any:
        output = forward(self, **named)
        output.logits = output.logits - 0.5 * output.logits.mean(1, keepdim=True)
        return output

    return mixing


def test_a_head_that_mixes_tokens_is_refused(transformers: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", _mixing(transformers.LlamaForCausalLM.forward))
    assert "with its loss in chunks of 5 tokens gradients are others" in _difference(values_of("llama"))


def test_another_gradient_alone_is_enough_to_be_refused(
    transformers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.LlamaModel, "forward", _steepened(transformers.LlamaModel.forward))
    assert "in 6 stages the gradient of units.embedding" in _difference(values_of("llama"))


def test_a_layer_that_reads_what_another_one_keeps_is_refused(
    transformers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = transformers.models.llama.modeling_llama.LlamaDecoderLayer
    monkeypatch.setattr(transformers.LlamaModel, "forward", _sharing(transformers.LlamaModel.forward))
    monkeypatch.setattr(layer, "forward", _reading(layer.forward))
    assert "in 6 stages the output is another one" in _difference(values_of("llama"))


def test_a_run_of_a_model_that_cannot_be_cut_is_refused_and_a_second_time_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = HfFamily(OPT, TOKENS, verdicts=Verdicts(tmp_path))
    assert re.match(r"opt of transformers \d.*cannot be cut exactly", str(refused.exactness_problem()))
    assert HfFamily(values_of("llama"), TOKENS, verdicts=Verdicts(tmp_path)).exactness_problem() is None
    monkeypatch.setattr("shoal.model.hf.family.difference", lambda *_: pytest.fail("compared again"))
    assert "cannot be cut exactly" in str(refused.exactness_problem())
    assert HfFamily(values_of("llama"), TOKENS, verdicts=Verdicts(tmp_path)).exactness_problem() is None


def test_a_verdict_is_of_the_versions_and_of_every_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = Verdicts(tmp_path / "made")
    key = twin_key(values_of("llama"))
    assert verdicts.load(key) is None
    verdicts.store(key, "")
    assert verdicts.load(key) == ""
    assert verdicts.load(twin_key(values_of("llama", rope_theta=1.0))) is None
    monkeypatch.setattr("shoal.model.hf.verdicts.transformers_version", lambda: "5.10.0")
    assert verdicts.load(twin_key(values_of("llama"))) is None
    for path in verdicts.folder.iterdir():
        path.write_text("{")
    assert verdicts.load(key) is None


def test_a_verdict_that_cannot_be_kept_is_found_again(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    Verdicts(tmp_path / "file").store("key", "")
    assert Verdicts(tmp_path / "file").load("key") is None
