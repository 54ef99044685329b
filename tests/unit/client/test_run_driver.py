"""What the driver of a run carries out is void when another record stands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from shoal.client.run_driver import RunDriver
from shoal.ids import Ballot, PeerId
from shoal.swarm.run_effects import BeginRound
from shoal.wire.messages.base import StepRange

ORDER = BeginRound(2, StepRange(10, 20), "D1", 0.0, None)


class Desk:
    """A driver whose rounds begin when `disk` is set, and what it has told the machine."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.disk = anyio.Event()
        machine = SimpleNamespace(
            begun=lambda now_s: self.told.append(now_s),
            overtaken=lambda: self.told.append("overtaken"),
            deposed=lambda highest: self.told.append(highest.number),
        )
        parts: dict[str, Any] = dict.fromkeys(
            ("facts", "succession", "membership", "reassignment", "trainers", "records", "saving", "turn_taken")
        )
        begin = SimpleNamespace(begin=self.begin)
        ledger = SimpleNamespace(now_s=lambda: 7.0)
        driver: Any = RunDriver
        self.driver: RunDriver = driver(machine=machine, begin=begin, ledger=ledger, changes=(), **parts)

    async def begin(self, order: BeginRound) -> None:
        await self.disk.wait()
        self.told.append(order.round)

    async def carry_out(self) -> None:
        await self.driver._do(ORDER, cast(Any, None))


async def test_the_time_of_a_round_counts_from_when_it_has_begun() -> None:
    desk = Desk()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.carry_out)
        await anyio.wait_all_tasks_blocked()
        assert desk.told == []
        desk.disk.set()
    assert desk.told == [2, 7.0]


@pytest.mark.parametrize("by", ["overtaken", "deposed"])
async def test_a_round_that_waits_for_a_disk_is_not_begun_when_it_is_void(by: str) -> None:
    desk = Desk()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.carry_out)
        await anyio.wait_all_tasks_blocked()
        if by == "overtaken":
            desk.driver.overtaken()
        else:
            desk.driver.deposed(Ballot(9, PeerId("other"), 1))
    assert desk.told == ["overtaken" if by == "overtaken" else 9]
    desk.disk.set()
    await desk.carry_out()
    assert desk.told[1:] == [2, 7.0], "the next one is not cancelled with it"
