"""Which steps of which rounds an average has: each step once in the average of each fragment."""

from __future__ import annotations

import pytest

from shoal.config.diloco import DilocoConfig
from shoal.ids import PeerId, StepKey
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.step import StepEntry, StepsTrained


def log(round: int, targets: list[int]) -> tuple[StepEntry, ...]:
    """Steps with so many targets; one without is skipped."""
    keys = [StepKey(0, 1, 100 * round + number, 0) for number in range(len(targets))]
    return tuple(
        StepEntry(key, (PeerId("a"),), 0, (SampleRange(0, 0, 1),), 1, each or 7, 1.0, 0.1, each == 0)
        for key, each in zip(keys, targets, strict=True)
    )


def brought(cuts: CutRule, rounds: list[list[int]]) -> list[int]:
    """What a member of all these rounds weighs in each."""
    earlier: tuple[StepsTrained, ...] = ()
    found: list[int] = []
    for number, targets in enumerate(rounds, 1):
        found.append(cuts.brought(number, log(number, targets), earlier).num_targets)
        earlier = cuts.still_earlier(number, earlier, log(number, targets))
    return found


ROUNDS = [[1, 2, 4], [8, 16, 32], [64, 128, 256], [512, 1024, 2048], [4096, 0, 8192]]


def first(count: int) -> int:
    """The targets of the first so many steps."""
    return sum([each for targets in ROUNDS for each in targets][:count])


@pytest.mark.parametrize("num_fragments", [1, 2, 3])
@pytest.mark.parametrize("cut_after", [1, 2, 3])
def test_each_step_is_once_in_the_average_of_each_fragment(num_fragments: int, cut_after: int) -> None:
    cuts = CutRule(num_fragments, cut_after)
    last = [0] * num_fragments
    for number, found in enumerate(brought(cuts, ROUNDS), 1):
        until = first(3 * (number - 1) + cut_after)
        assert found == until - last[number % num_fragments]
        last[number % num_fragments] = until


def test_the_last_round_of_a_run_leaves_nothing_to_a_later_one() -> None:
    cuts = CutRule(1, cut_after=1, last_round=5)
    found = brought(cuts, ROUNDS)
    assert sum(found) == first(15)
    assert found[-1] == 1024 + 2048 + 4096 + 8192
    assert (cuts.commits(4), cuts.commits(5)) == (1, None)


def test_a_round_with_fewer_steps_than_its_cut_has_all_of_them() -> None:
    assert brought(CutRule(1, cut_after=2), [[1], [2, 4, 8], [], [16]]) == [1, 6, 8, 16]


@pytest.mark.parametrize(("cuts", "num_rounds", "left"), [(CutRule(4), 1, 2), (CutRule(4, cut_after=2), 1, 5)])
def test_what_a_replica_had_left_of_the_last_rounds_can_be_told_apart(
    cuts: CutRule, num_rounds: int, left: int
) -> None:
    earlier: tuple[StepsTrained, ...] = ()
    for number, targets in enumerate(ROUNDS, 1):
        earlier = cuts.still_earlier(number, earlier, log(number, targets))
    assert len(cuts.before(earlier, num_rounds)) == left
    assert cuts.before(earlier, 9) == ()


def test_a_rule_follows_from_the_configuration_and_from_what_files_of_older_runs_say_of_it() -> None:
    diloco = DilocoConfig(
        inner_steps=30, outer_steps=9, fragments=3, overlap_steps=5, averaging_compression="int4", overlap_merge="mean"
    )
    assert CutRule.of(diloco) == CutRule(3, 25, 9)
    assert CutRule.said(diloco.model_dump()) == CutRule(3, 25, 9)
    assert CutRule.said({"outer_steps": 9}) == CutRule(1, None, 9)
    assert EVERY_STEP.commits(1) is None
    assert not EVERY_STEP.keeps_own
    assert CutRule(1, 2).keeps_own
    assert CutRule(2).keeps_own
