"""A data worker: prepares batches straight into the data server's pool; `python -m shoal.data.worker`.

It has no event loop: it waits for the next order on its socket, does it, reports it. It ends when the data server
closes the socket, and by the lifeline when the data server is gone in the middle of a job.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from shoal.data.layout import BatchLayout
from shoal.data.pool import PoolWriter
from shoal.data.preparation import prepare
from shoal.data.source import DataSet
from shoal.data.worker_messages import DataSetOpened, Fill, Filled, OpenDataSet, Order, Report
from shoal.errors import ConfigError, InvariantViolation
from shoal.runtime.child import Parent
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
    """Carry out `orders`, and yield the report of each; the first has to open the data set.

    Raises:
        ConfigError: the data set cannot be opened.
        SampleError: a sample cannot be prepared.
    """
    first = next(orders, None)
    if first is None:
        return
    if not isinstance(first, OpenDataSet):
        raise InvariantViolation(f"the first order to a data worker is {type(first).__name__}, not OpenDataSet")
    worker = Worker(first, pool_fd)
    yield DataSetOpened(worker.dataset.train.num_samples, worker.dataset.holdout.num_samples)
    for order in orders:
        if not isinstance(order, Fill):
            raise InvariantViolation(f"a data worker cannot do {type(order).__name__} twice")
        yield worker.fill(order)


def main() -> None:
    """Work until the data server is through. The arguments: those of a child; the pool's descriptor, and the number."""
    pool_fd, index = (int(argument) for argument in sys.argv[3:])
    set_process_title("data_worker", index)
    with Parent[Order](Order) as data_server:
        for report in serve(data_server.orders, pool_fd):
            data_server.say(report)


if __name__ == "__main__":
    main()
