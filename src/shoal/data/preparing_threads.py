"""Batches prepared in two threads of the data server, so that its event loop stays free.

For data that lies in memory this is the shortest way: preparing is copying, numpy lets go of the interpreter meanwhile,
and a job costs neither a message nor a second process. A small batch of such data, also of a file that the system has
in its memory, is copied at once, by the event loop itself: handing it to the thread would take the loop about as long
as copying it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.to_thread

from shoal.clock import SystemClock
from shoal.data.layout import BatchLayout
from shoal.data.pool import Pool
from shoal.data.preparation import SLOW_S, Content, Job, indices_of, prepare
from shoal.data.shuffle import PassOrder
from shoal.data.source import DataSet
from shoal.events.base import emit
from shoal.events.data import DataWorkerSlow

logger = logging.getLogger(__name__)

QUICK_BYTES = 256 << 10
"""Batches in memory up to this size are copied at once: 64 KB take 10 us, 64 windows of a file with 2 KB each 90 us.
Waking a thread and the loop takes 80."""

NUM_THREADS = 2
"""One core does not copy as fast as memory can; beyond two there is little to gain for batches that lie in memory."""


@dataclass(kw_only=True, eq=False, repr=False)
class PreparingThreads:
    """A `Preparation` in this process.

    Attributes:
        order: of the passes; only this preparation may draw from it.
        on_filled: called on the event loop for each job that is done.
        num_jobs: one for each thread, and one more, ready for the thread that is done first.
    """

    num_jobs = NUM_THREADS + 1

    dataset: DataSet
    layout: BatchLayout
    pool: Pool
    order: PassOrder
    on_filled: Callable[[Job], None]

    def __post_init__(self) -> None:
        self._clock = SystemClock()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._filled: deque[Job] = deque()
        self._report_due = False
        self._begun_s: dict[Job, float] = {}  # of those that a thread is at
        self._error: Exception | None = None
        self._failed = anyio.Event()

    def begin(self, job: Job) -> None:
        if self._may_be_quick(job.content) and self._fill(job, at_once=True):
            self.on_filled(job)
        else:
            self._jobs.put(job)

    async def run(self) -> None:
        """See `Preparation.run`; jobs at hand are finished before this returns.

        Raises:
            SampleError: a sample cannot be prepared.
        """
        loop = asyncio.get_running_loop()
        threads = [
            threading.Thread(target=self._work, args=(loop,), name=f"preparing-{index}", daemon=True)
            for index in range(NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        try:
            while not self._failed.is_set():
                with anyio.move_on_after(SLOW_S):
                    await self._failed.wait()
                self._say_slow()
            if self._error is not None:
                raise self._error
        finally:
            for _ in threads:
                self._jobs.put(None)
            with anyio.CancelScope(shield=True):
                for thread in threads:
                    await anyio.to_thread.run_sync(thread.join)

    def _may_be_quick(self, content: Content) -> bool:
        if self.dataset.augmentation is not None:
            return False
        drawn = content.is_holdout or self.order.drawn(content.samples)
        return drawn and self.layout.batch_bytes(content.num_samples) <= QUICK_BYTES

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (job := self._jobs.get()) is not None:
            self._begun_s[job] = self._clock.now_s()
            try:
                self._fill(job)
            except Exception as error:  # noqa: BLE001 - the edge of the thread: `run` raises it
                self._error = error
                loop.call_soon_threadsafe(self._failed.set)
                return
            self._begun_s.pop(job, None)
            self._filled.append(job)
            # One call of the loop for all that is done before it gets there. `_report` puts the flag down before it
            # looks, so nothing is left lying.
            if not self._report_due:
                self._report_due = True
                loop.call_soon_threadsafe(self._report)

    def _say_slow(self) -> None:
        """Say which batches have been waited for too long; each of them once."""
        for job, begun_s in list(self._begun_s.items()):
            if (took_s := self._clock.now_s() - begun_s) >= SLOW_S:
                self._begun_s.pop(job, None)
                name, num_samples = self.dataset.name, job.content.num_samples
                emit(logger, DataWorkerSlow(name, 0, os.getpid(), num_samples, round(took_s, 1)))

    def _fill(self, job: Job, *, at_once: bool = False) -> bool:
        content = job.content
        memory = self.pool.memory(job.place, self.layout.num_places(content.num_samples))
        batch = self.layout.arrays(memory, content.num_samples)
        return prepare(self.dataset, content, indices_of(content, self.order), batch, at_once=at_once)

    def _report(self) -> None:
        self._report_due = False
        while self._filled:
            self.on_filled(self._filled.popleft())
