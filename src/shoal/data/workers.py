"""Batches prepared in processes: hands out jobs, replaces processes that die or stand still, and has their jobs done
anew.

    begin --> (order of the pass is drawn) --> waiting --> with a worker --Filled--> reported, once
                                                  ^             |
                                                  '-- it died --'
                                                      '-- it was killed because it stood still

What a dead worker was writing is nobody's batch yet: its place belongs to the job, and is filled again from the start
once the process is gone. Which worker does a job has no influence on its bytes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import anyio
import anyio.to_thread

from shoal.clock import SystemClock
from shoal.data.layout import BatchLayout
from shoal.data.pool import Pool
from shoal.data.preparation import SLOW_S, Job, indices_of
from shoal.data.shuffle import PassOrder
from shoal.data.source import DataSet
from shoal.data.worker_messages import DataSetOpened, OpenDataSet, Opening
from shoal.data.worker_process import WorkerProcess
from shoal.errors import ConfigError, SampleError
from shoal.events.base import emit
from shoal.events.data import DataProcessStopped, DataWorkerDied, DataWorkerSlow
from shoal.runtime.child import LOOK_S
from shoal.runtime.waking import Mailbox, Signal

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""So many workers may die in a row while they open the data set, or over the same batch."""


class DataWorkers:
    """A `Preparation` in processes of its own.

    Attributes:
        num_jobs: one for each worker. A second job would wait behind the first even if another worker is idle; asking
            for the next one takes 0.1 ms, and data that is prepared faster than that needs no workers.
    """

    def __init__(
        self,
        *,
        num_workers: int,
        opening: Opening,
        dataset: DataSet,
        layout: BatchLayout,
        pool: Pool,
        order: PassOrder,
        on_filled: Callable[[Job], None],
    ) -> None:
        """Start nothing yet.

        Args:
            dataset: the same data set, as this process has opened it.
            order: of the passes; only this preparation may draw from it.
            on_filled: called on the event loop for each job that is done.
        """
        self.num_jobs = num_workers
        self._first_order = OpenDataSet(opening, layout.place_bytes, layout.max_samples)
        self._opened = DataSetOpened(dataset.train.num_samples, dataset.holdout.num_samples)
        self._dataset_name = dataset.name
        self._skipped = dataset.skipped
        self._pool = pool
        self._order = order
        self._on_filled = on_filled
        self._clock = SystemClock()
        self._undrawn = Mailbox[Job]()
        self._waiting: deque[Job] = deque()
        self._workers: list[WorkerProcess] = []
        self._work_begun = Signal()
        self._said_slow: set[Job] = set()
        self._deaths_by_place: dict[int, int] = {}
        self._deaths_opening = 0

    @property
    def pids(self) -> list[int]:
        """Of the processes that have opened the data set."""
        return [worker.pid for worker in self._workers if worker.opened is not None]

    def begin(self, job: Job) -> None:
        if job.content.is_holdout or self._order.drawn(job.content.samples):
            self._waiting.append(job)
            self._hand_out()
        else:
            self._undrawn.put(job)

    async def run(self) -> None:
        """See `Preparation.run`; all processes have ended when this returns.

        Raises:
            SampleError: a sample cannot be prepared, or workers die of it.
            ConfigError: the workers cannot open the data set.
        """
        async with anyio.create_task_group() as group:
            group.start_soon(self._draw)
            group.start_soon(self._watch)
            for index in range(self.num_jobs):
                group.start_soon(self._keep, index)

    async def _draw(self) -> None:
        """Draw the orders of passes in a thread, and let the jobs that need them go on."""
        async for job in self._undrawn:
            await anyio.to_thread.run_sync(indices_of, job.content, self._order)
            self._waiting.append(job)
            self._hand_out()

    async def _keep(self, index: int) -> None:
        """Keep one worker running."""
        while True:
            worker = WorkerProcess(index, self._pool.fd, self._changed)
            self._workers.append(worker)
            self._work_begun.notify()
            try:
                await worker.open(self._first_order)
                await worker.ended.wait()
            finally:
                status = await worker.aclose()
                self._workers.remove(worker)
            self._check(worker, str(status))
            emit(logger, DataWorkerDied(index, worker.pid, str(status)))
            # Before what has not been begun: somebody may be waiting for these.
            if worker.job is not None:
                self._waiting.appendleft(worker.job)
                self._hand_out()

    async def _watch(self) -> None:
        """Look at the workers as long as one of them is busy: a process that is stopped does not end by itself."""
        while True:
            while not any(worker.is_busy for worker in self._workers):
                await self._work_begun.wait()
            await self._clock.sleep_s(LOOK_S)
            for worker in self._workers:
                if worker.is_busy:
                    self._look_at(worker, self._clock.now_s())

    def _look_at(self, worker: WorkerProcess, now_s: float) -> None:
        if worker.stands_still(now_s):
            emit(logger, DataProcessStopped(f"data worker {worker.index}", worker.pid))
            worker.kill_stopped()
        elif (job := worker.job) is not None and now_s - worker.job_since_s > SLOW_S and job not in self._said_slow:
            self._said_slow.add(job)
            took_s = round(now_s - worker.job_since_s, 1)
            emit(
                logger,
                DataWorkerSlow(self._dataset_name, worker.index, worker.pid, job.content.num_samples, took_s),
            )

    def _check(self, worker: WorkerProcess, status: str) -> None:
        """Count the death of a worker, and raise if another one would only die of the same."""
        if worker.failed is not None:
            raise worker.failed
        if worker.was_stopped:
            # Of what somebody did to it, and not of its batch.
            return
        if worker.opened is None:
            self._deaths_opening += 1
            if self._deaths_opening >= MAX_DEATHS:
                raise ConfigError(
                    f"{MAX_DEATHS} data workers died in a row while they opened data.dataset_name = "
                    f"{self._dataset_name} (the last one: {status}): see the data server's output, or set "
                    "data.num_workers = 0"
                )
        if (job := worker.job) is not None:
            deaths = self._deaths_by_place[job.place] = self._deaths_by_place.get(job.place, 0) + 1
            if deaths >= MAX_DEATHS:
                samples = indices_of(job.content, self._order).tolist()
                raise SampleError(
                    f"{deaths} data workers died over one batch of data.dataset_name = {self._dataset_name} "
                    f"(the last one: {status}): one of its samples {samples} kills whoever prepares it"
                )

    def _changed(self, worker: WorkerProcess, job: Job | None) -> None:
        """A worker has opened the data set, or (`job`) filled a place."""
        if job is not None:
            self._deaths_by_place.pop(job.place, None)
            self._said_slow.discard(job)
            self._count_skipped(worker)
            self._on_filled(job)
        elif worker.opened != self._opened:
            worker.give_up(
                ConfigError(
                    f"data.dataset_name = {self._dataset_name} has {worker.opened} in a data worker and "
                    f"{self._opened} in its data server: it must not change during a run"
                )
            )
        else:
            self._deaths_opening = 0
        self._hand_out()

    def _count_skipped(self, worker: WorkerProcess) -> None:
        """Count what the worker could not read; all workers together may have met too much of it."""
        if self._skipped is None:
            return
        try:
            self._skipped.add_all(worker.skipped)
        except SampleError as error:
            worker.give_up(error)

    def _hand_out(self) -> None:
        """Give waiting jobs to workers that have none."""
        idle = [worker for worker in self._workers if worker.is_idle]
        while self._waiting and idle:
            job = self._waiting.popleft()
            idle.pop().fill(job, indices_of(job.content, self._order), self._clock.now_s())
            self._work_begun.notify()
