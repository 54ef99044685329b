"""A program with data workers one of which never ends its job: prints their pids, and is then killed by its test."""

from __future__ import annotations

import json
import sys

import anyio
import anyio.to_thread
from tests.integration.data.sources import Trap, trapped
from tests.unit.data.host import host

from shoal.data.workers import DataWorkers
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.feed import PlanRound


async def main() -> None:
    trap = Trap(num_samples=8, hangs=3)
    async with host(8, 4, dataset=trapped(trap), num_workers=2, opening=trap.opening()) as at:
        at.tell(PlanRound(1, 2, StepRange(0, 1)))
        # One of the two batches of the pass is prepared; by then both workers have begun.
        async with anyio.create_task_group() as group:

            async def lease(slot: int) -> None:
                await at.trainer(slot).lease(1, 0)
                group.cancel_scope.cancel()

            group.start_soon(lease, 0)
            group.start_soon(lease, 1)
        workers = at.service.preparation
        assert isinstance(workers, DataWorkers)
        print(json.dumps(workers.pids), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.read)


anyio.run(main, backend_options={"use_uvloop": True})
