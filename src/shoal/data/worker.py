"""A data worker: prepares batches straight into the data server's pool; `python -m shoal.data.worker`.

It has no event loop: it waits for the next order on its socket, does it, reports it. It ends when the data server
closes the socket, and by the lifeline when the data server is gone in the middle of a job.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Iterator

import numpy as np

from shoal.data.failures import kind_of
from shoal.data.layout import BatchLayout
from shoal.data.pool import PoolWriter
from shoal.data.preparation import prepare
from shoal.data.source import DataSet
from shoal.data.worker_messages import DataSetOpened, Fill, Filled, OpenDataSet, Order, Report, WorkerFailed
from shoal.errors import ConfigError, InvariantViolation, ShoalError
from shoal.runtime.frames import framed, received
from shoal.runtime.lifeline import watch_in_thread
from shoal.runtime.process_control import set_process_title


class Worker:
    """The data set and the pool, as this process has them."""

    def __init__(self, order: OpenDataSet, pool_fd: int) -> None:
        """Open the data set and map the pool.

        Raises:
            ConfigError: the data set cannot be opened.
        """
        self.dataset: DataSet = order.opening.open()
        self._layout = BatchLayout.of(self.dataset, order.max_samples)
        if self._layout.place_bytes != order.place_bytes:
            raise ConfigError(
                f"the data set {self.dataset.name} has other samples in a data worker than in its data server "
                f"({self._layout.place_bytes} bytes a place, not {order.place_bytes}): it must not change during a run"
            )
        self._pool = PoolWriter(pool_fd, order.place_bytes)

    def fill(self, order: Fill) -> Filled:
        """Carry out one order.

        Raises:
            SampleError: a sample cannot be prepared.
        """
        indices = np.frombuffer(order.indices, dtype=np.int64)
        memory = self._pool.memory(order.place, self._layout.num_places(len(indices)))
        batch = self._layout.arrays(memory, len(indices))
        prepare(self.dataset, order.content, indices, batch)
        return Filled(self.dataset.skipped.take_new() if self.dataset.skipped is not None else ())


def serve(orders: Iterator[Order], pool_fd: int) -> Iterator[Report]:
    """Carry out `orders`, and yield the report of each; the first has to open the data set."""
    first = next(orders, None)
    if first is None:
        return
    if not isinstance(first, OpenDataSet):
        raise InvariantViolation(f"the first order to a data worker is {type(first).__name__}, not OpenDataSet")
    try:
        worker = Worker(first, pool_fd)
        yield DataSetOpened(worker.dataset.train.num_samples, worker.dataset.holdout.num_samples)
        for order in orders:
            if not isinstance(order, Fill):
                raise InvariantViolation(f"a data worker cannot do {type(order).__name__} twice")
            yield worker.fill(order)
    except ShoalError as error:
        yield WorkerFailed(str(error), kind_of(error))


def main() -> None:
    """Work until the data server is through. The arguments: descriptors of socket, pool and lifeline; the number."""
    control_fd, pool_fd, lifeline_fd, index = (int(argument) for argument in sys.argv[1:])
    # The data server decides when a worker ends, also where a terminal's Ctrl-C or a signal to the run reaches both.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_process_title("data_worker", index)
    watch_in_thread(lifeline_fd, "")
    with socket.socket(fileno=control_fd) as control, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for report in serve(received(control, Order), pool_fd):
            control.sendall(framed(report))


if __name__ == "__main__":
    main()
