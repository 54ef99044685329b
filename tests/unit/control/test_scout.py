"""What a scout says of the run that it watches."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.control.membership import Membership
from shoal.control.records import GoneRecord, Opened, RunRecord
from shoal.control.scout import _watch
from shoal.ids import PeerId

pytestmark = pytest.mark.anyio


class Told:
    """What the launcher is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))


def announced(sequence: int, record: RunRecord | GoneRecord) -> list[Opened]:
    return [Opened("run", PeerId("C"), sequence, SystemClock().unix_s() + 100, record)]


@pytest.mark.parametrize(
    ("last", "reason", "ended_well"),
    [
        (RunRecord("r", 2, 1.0, ended=True), "run r has ended", True),
        (RunRecord("r", 2, 1.0, ended=True, interrupted=True), "run r has ended (interrupted at its client)", True),
        (RunRecord("r", 2, 1.0, ended=True, failure="no disk"), "run r has failed: no disk", False),
        (RunRecord("other", 2, 2.0), "a new run, other, has begun in place of r", False),
    ],
)
async def test_the_launcher_hears_how_a_run_ends(last: RunRecord, reason: str, ended_well: bool) -> None:
    membership, told = Membership(SystemClock()), Told()
    membership.update(announced(1, RunRecord("r", 2, 1.0)))
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, membership, "r", told)
            await anyio.wait_all_tasks_blocked()
            assert told.events == []
            membership.update(announced(2, last))
    assert told.events == [("run_over", {"reason": reason, "ended_well": ended_well})]


async def test_a_run_that_is_silent_is_not_over_and_may_come_back() -> None:
    membership, told = Membership(SystemClock()), Told()
    membership.update(announced(1, RunRecord("r", 2, 1.0)))
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, membership, "r", told)
            for sequence, record in ((2, GoneRecord()), (3, RunRecord("r", 2, 1.0))):
                await anyio.wait_all_tasks_blocked()
                membership.update(announced(sequence, record))
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert told.events == [("run_announced", {"is_announced": False}), ("run_announced", {"is_announced": True})]
