"""What a scout says of the run that it watches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import anyio
import pytest

from shoal.clock import SystemClock
from shoal.control.membership import Membership
from shoal.control.records import GoneRecord, MonitorRecord, Opened, RunRecord
from shoal.control.registry import Registry
from shoal.control.scout import _running, _tell_peers, _watch
from shoal.errors import BootstrapError
from shoal.ids import PeerId

pytestmark = pytest.mark.anyio


class Board:
    """Where a scout reads what others announce, and what it announces itself."""

    def __init__(self) -> None:
        self.membership = Membership(SystemClock())
        self.own: RunRecord | None = None

    def advertise(self, record: RunRecord) -> None:
        self.own = record
        self._update(1, record)

    async def withdraw(self) -> None:
        self.own = None
        self._update(2, GoneRecord())

    def _update(self, sequence: int, record: RunRecord | GoneRecord) -> None:
        self.membership.update([Opened("run", PeerId("S"), sequence, SystemClock().unix_s() + 100, record)])


KEPT = RunRecord("r", 2, 5.0, b"shared", kept=True)


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
    board, told = Board(), Told()
    board.membership.update(announced(1, RunRecord("r", 2, 1.0)))
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, board, KEPT, told)
            await anyio.wait_all_tasks_blocked()
            assert told.events == []
            board.membership.update(announced(2, last))
    assert told.events == [("run_over", {"reason": reason, "ended_well": ended_well})]


async def test_a_run_that_is_silent_is_not_over_and_may_come_back() -> None:
    board, told = Board(), Told()
    board.membership.update(announced(1, RunRecord("r", 2, 1.0)))
    kept: list[RunRecord | None] = []
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_watch, board, KEPT, told)
            await anyio.wait_all_tasks_blocked()
            for sequence, record in ((2, GoneRecord()), (3, RunRecord("r", 2, 1.0))):
                board.membership.update(announced(sequence, record))
                await anyio.wait_all_tasks_blocked()
                kept.append(board.own)
            tasks.cancel_scope.cancel()
    assert kept == [KEPT, None], "while no client announces the run, the scout does, so that the next one finds it"
    assert told.events == [("run_announced", {"is_announced": False}), ("run_announced", {"is_announced": True})]


@dataclass
class Silent:
    """A registry in which no run is announced."""

    clock_difference_s: float | None
    membership: Membership


@pytest.mark.parametrize(
    ("difference_s", "message"),
    [
        (3600.0, "their clocks are about 3600 s ahead of this host's"),
        (-7200.4, "their clocks are about 7200 s behind this host's"),
        (None, "none of them knew a run with experiment_prefix = sandbox"),
    ],
)
async def test_who_finds_no_run_is_told_when_the_clocks_are_the_reason(
    difference_s: float | None, message: str
) -> None:
    silent = Silent(difference_s, Membership(SystemClock()))
    with pytest.raises(BootstrapError, match=message):
        await _running(cast("Registry", silent), 0.01, "sandbox")


async def test_the_launcher_is_told_where_the_swarm_can_be_joined_whenever_that_changes() -> None:
    membership, told = Membership(SystemClock()), Told()
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_tell_peers, membership, told)
            for number in (1, 2):
                await anyio.wait_all_tasks_blocked()
                record = MonitorRecord(("unix:/m",), 1.0, maddrs=(f"/m{number}",))
                expires_unix_s = SystemClock().unix_s() + 100
                membership.update([Opened("monitor", PeerId("M"), number, expires_unix_s, record)])
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert told.events == [("peers", {"maddrs": ("/m1",)}), ("peers", {"maddrs": ("/m2",)})]
