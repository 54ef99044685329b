"""Trainers that are lost in a round: how often a slot is given another one, and what is said when it has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import anyio
import pytest
from tests.unit.client.noted import NotedLedger

from shoal.client.takeover import MAX_PER_ROUND, Takeover
from shoal.events.base import Event
from shoal.events.trainers import TrainerGivenUp, TrainerNotReplaced
from shoal.wire.messages.base import StepRange


class _Trainers:
    """Of one slot: what is started does not arrive, or is lost as soon as it is there."""

    def __init__(self, *, arrive: bool) -> None:
        self.present: Mapping[int, object] = {}
        self.arrive = arrive
        self.started: list[int] = []
        self.gone = anyio.Event()

    def advance(self, slot: int) -> int:
        return len(self.started) + 2

    async def start(self, slot: int, generation: int) -> None:
        self.started.append(generation)

    async def arrived(self, slot: int) -> bool:
        return self.arrive

    async def changed(self) -> None:
        await self.gone.wait()
        self.gone = anyio.Event()


class _Reports:
    def __init__(self) -> None:
        self.excused: set[int] = set()

    def is_done(self, slot: int) -> bool:
        return slot in self.excused

    def excuse(self, slot: int) -> None:
        self.excused.add(slot)


@pytest.mark.parametrize("arrive", [False, True])
async def test_a_slot_without_a_trainer_is_given_up_for_the_round_and_that_is_said(arrive: bool) -> None:
    trainers, reports, ledger = _Trainers(arrive=arrive), _Reports(), NotedLedger()
    without: Any = None
    takeover = Takeover(
        trainers=cast(Any, trainers), reports=cast(Any, reports), fencing=without, data=without, ledger=ledger
    )
    gone_on: list[int] = []
    with anyio.move_on_after(0.3):
        await takeover.run(frozenset({0}), StepRange(5, 5), lambda slot, _: gone_on.append(slot))
    assert reports.excused == {0}
    [said] = cast(list[Event], ledger.noted)
    if arrive:
        assert said == TrainerGivenUp(0, MAX_PER_ROUND)
        assert gone_on == [0] * MAX_PER_ROUND
    else:
        assert said == TrainerNotReplaced(0, "trainer 0 was started but did not report; see its log")
        assert gone_on == []
