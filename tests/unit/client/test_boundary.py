"""How long a round's trainers are waited for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from tests.alongside import alongside, until
from tests.unit.client.noted import NotedLedger

from shoal.client.boundary import BoundaryWatch
from shoal.client.pausing import Pausing
from shoal.client.stage_watch import StageWatch
from shoal.config import Config
from shoal.runtime.waking import Signal


class Desk:
    """A client's parts, as far as the end of a round depends on them."""

    def __init__(self, **run: object) -> None:
        config = Config.model_validate({"diloco": {"outer_steps": 9}, "run": run})
        self.ledger = NotedLedger()
        self.finished, self.done = Signal(), set[int]()
        self.stages = StageWatch(self.ledger)
        self.told: list[bool] = []
        stand_in: Any = SimpleNamespace
        self.pausing = Pausing(self.ledger, stand_in(pause=self._tell), stand_in(tell_swarm=lambda: None))
        self.watch = BoundaryWatch(config, self.ledger, self, self.stages, self.pausing)  # type: ignore[arg-type]
        self.is_over = False

    def is_done(self, slot: int) -> bool:
        return slot in self.done

    def finish(self, slot: int) -> None:
        self.done.add(slot)
        self.finished.notify()

    async def wait(self) -> None:
        await self.watch.reached(4, frozenset({0, 1}))
        self.is_over = True

    def _tell(self, *, paused: bool) -> None:
        self.told.append(paused)


def timeout_s(durations_s: Sequence[float], round: int, **run: object) -> float:
    desk = Desk(**run)
    desk.ledger.totals.durations_s.extend(durations_s)
    return desk.watch._timeout_s(round)


def test_the_first_rounds_and_the_last_may_take_as_long_as_configured_and_others_what_is_usual() -> None:
    assert timeout_s((), 1, first_deadline_s=12.5) == 12.5
    assert timeout_s((1.0, 1.0), 3, first_deadline_s=12.5) == 12.5
    assert timeout_s((1.0, 1.0, 1.0), 4, first_deadline_s=12.5) == 1.5
    assert timeout_s((1.0, 1.0, 1.0), 9, first_deadline_s=12.5) == 12.5


def test_a_round_that_has_to_be_repeatable_is_waited_for_as_long_as_it_takes() -> None:
    assert timeout_s((), 1, first_deadline_s=12.5, deterministic=True) == math.inf


async def test_a_round_is_over_when_the_last_trainer_is_done() -> None:
    desk = Desk(deterministic=True)
    async with alongside(desk.wait):
        desk.finish(0)
        await anyio.wait_all_tasks_blocked()
        assert not desk.is_over
        desk.finish(1)
        await until(lambda: desk.is_over)


@pytest.mark.parametrize("ends_by", ["trainers", "deadline"])
async def test_a_paused_round_is_over_only_when_it_is_resumed(ends_by: str) -> None:
    desk = Desk(first_deadline_s=0.02)
    desk.pausing.pause("me")
    async with alongside(desk.wait):
        if ends_by == "trainers":
            desk.finish(0)
            desk.finish(1)
        await anyio.sleep(0.05)
        assert not desk.is_over
        desk.pausing.resume("me")
        await until(lambda: desk.is_over)
    assert desk.told == [True, False]
