"""What a run cannot go on without is written as soon as the disk takes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
from tests.set_clock import ManualClock, PassingClock
from tests.unit.client.noted import NotedLedger

from shoal.client.needed_files import NeededFiles
from shoal.errors import StorageError
from shoal.events.hosts import DiskTakesAgain
from shoal.events.run import DiskTakesNothing

FULL = "cannot write it (No space left on device): free space there"


class Disk:
    """Refuses the first writes.

    Attributes:
        tried: How often it was written to.
    """

    def __init__(self, num_refused: float) -> None:
        self.num_refused, self.tried = num_refused, 0

    async def write(self) -> str:
        self.tried += 1
        if self.tried <= self.num_refused:
            raise StorageError(FULL)
        return "written"


async def test_what_a_disk_does_not_take_is_tried_again_which_is_said_once_and_when_it_is_over() -> None:
    clock, ledger, disk = ManualClock(), NotedLedger(), Disk(4)
    needed = NeededFiles(ledger, clock)
    assert await needed.written(disk.write) == "written"
    assert await needed.written(disk.write) == "written"
    assert ledger.noted == [DiskTakesNothing(FULL, 30.0), DiskTakesAgain("the client")]
    assert len(clock.slept_s) == 4
    said = next(line for line in ledger.said if "waits" in line)
    assert said == f"the run waits for its disk: {FULL}; in 30 minutes it ends"


async def test_a_disk_that_takes_nothing_for_half_an_hour_ends_the_run_with_what_it_says() -> None:
    clock, ledger, disk = ManualClock(), NotedLedger(), Disk(1e9)
    with pytest.raises(StorageError, match="free space there"):
        await NeededFiles(ledger, clock).written(disk.write)
    assert 1800.0 <= sum(clock.slept_s) < 1810.0
    assert max(clock.slept_s) <= 5.0
    assert ledger.noted == [DiskTakesNothing(FULL, 30.0)]


async def test_several_things_that_wait_for_one_disk_are_said_once() -> None:
    clock, ledger, disk = PassingClock(), NotedLedger(), Disk(2)
    needed = NeededFiles(ledger, clock)
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(needed.written, disk.write)
        await anyio.wait_all_tasks_blocked()
        clock.pass_s(10.0)
    assert disk.tried == 4
    assert ledger.noted == [DiskTakesNothing(FULL, 30.0), DiskTakesAgain("the client")]


async def test_who_is_cancelled_while_it_waits_writes_nothing_also_if_the_pause_is_over_by_then() -> None:
    clock, ledger, disk = PassingClock(), NotedLedger(), Disk(1)
    needed = NeededFiles(ledger, clock)
    scope = anyio.CancelScope()

    async def wait(write: Callable[[], Awaitable[str]]) -> None:
        with scope:
            await needed.written(write)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, disk.write)
        await anyio.wait_all_tasks_blocked()
        clock.pass_s(10.0)
        scope.cancel()
    assert (disk.tried, scope.cancelled_caught) == (1, True)
    await needed.written(disk.write)
    assert ledger.noted == [DiskTakesNothing(FULL, 30.0), DiskTakesAgain("the client")], "the next one tells the end"
