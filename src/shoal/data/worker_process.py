"""The data server's side of one data worker: starts its process, hands it jobs, hears its reports, ends it.

It is a child (`runtime.child`) that has the pool as well. Its socket is the event loop's: an order may be larger than
what the socket takes at once, and whoever hands out jobs does not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import anyio

from shoal.data.preparation import Job
from shoal.data.skipped_samples import UnreadableSample
from shoal.data.source import Indices
from shoal.data.worker_messages import DataSetOpened, Fill, Filled, OpenDataSet, Report
from shoal.errors import ShoalError
from shoal.runtime.child import Child, ChildFailed, Stillness
from shoal.runtime.frames import framed
from shoal.runtime.role_spec import ExitStatus


class WorkerProcess(asyncio.Protocol):
    """One process of a data worker.

    Attributes:
        opened: what the process said of the data set; None until then.
        failed: why it gave up; None: it did not.
        skipped: samples that it has met during the job that it has reported last, and cannot read.
        job: the job that it has been given and has not reported; None: it has none.
        was_stopped: it was killed because it stood still.
        ended: set when the process is gone or has given up.
    """

    def __init__(self, index: int, pool_fd: int, changed: Callable[[WorkerProcess, Job | None], None]) -> None:
        """Start the process, which takes about a millisecond; `open` connects it.

        Args:
            index: the worker's number, for the title of its process.
            changed: is told that this worker has done a job, or (None) has opened the data set.

        Raises:
            OSError: the system refuses another process.
        """
        self.opened: DataSetOpened | None = None
        self.failed: ShoalError | None = None
        self.skipped: tuple[UnreadableSample, ...] = ()
        self.job: Job | None = None
        self.job_since_s = 0.0
        self.was_stopped = False
        self.ended = anyio.Event()
        self.index = index
        self._changed = changed
        self._transport: asyncio.Transport | None = None
        self._child = Child[Report]("shoal.data.worker", Report, (pool_fd, index), pass_fds=(pool_fd,))
        self.pid = self._child.pid
        self._stillness = Stillness(self.pid)

    @property
    def is_idle(self) -> bool:
        """Whether it can be given a job."""
        return self.opened is not None and self.job is None and not self.has_ended

    @property
    def is_busy(self) -> bool:
        """Whether it opens the data set or has a job."""
        return not (self.has_ended or self.is_idle)

    @property
    def has_ended(self) -> bool:
        """Whether it is gone or about to be, or has given up."""
        return self.was_stopped or self.ended.is_set()

    async def open(self, order: OpenDataSet) -> None:
        """Have it open the data set; `opened` or `failed` follows."""
        self._child.control.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=self._child.control)
        self._send(framed(order))

    def fill(self, job: Job, indices: Indices, now_s: float) -> None:
        """Give it a job, when it has none: to write samples `indices` (n) into the place."""
        self.job, self.job_since_s = job, now_s
        # What was seen before it was idle says nothing of this job.
        self._stillness = Stillness(self.pid)
        self._send(framed(Fill(job.place, job.content, indices.tobytes())))

    def stands_still(self, now_s: float) -> bool:
        """Look at the process; see `Stillness.look`."""
        return self._stillness.look(now_s)

    def kill_stopped(self) -> None:
        """Kill it because it stands still; `ended` follows."""
        self.was_stopped = True
        self._child.kill()

    def give_up(self, why: ShoalError) -> None:
        """End it because of what it has reported."""
        self.failed = why
        self.ended.set()

    async def aclose(self) -> ExitStatus:
        """Kill and reap it; afterwards it writes to no place any more."""
        self._child.kill()
        with anyio.CancelScope(shield=True):
            await self._child.ended()
            if self._transport is not None:
                self._transport.abort()
                await self.ended.wait()
        return self._child.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        for report in self._child.complete(data):
            match report:
                case DataSetOpened() as opened:
                    self.opened = opened
                    self._changed(self, None)
                case Filled(skipped):
                    done, self.job = self.job, None
                    self.skipped = skipped
                    self._changed(self, done)
                case ChildFailed() as failed:
                    self.give_up(failed.error())

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()

    def _send(self, frame: bytes) -> None:
        # To one that is gone nothing need be said: its end follows, and its jobs go to another.
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)
