"""Who prepares batches: two threads of the data server, or as many processes as it was told."""

from __future__ import annotations

from collections.abc import Callable

from shoal.data.layout import BatchLayout
from shoal.data.pool import Pool
from shoal.data.preparation import Job, Preparation
from shoal.data.preparing_threads import PreparingThreads
from shoal.data.shuffle import PassOrder
from shoal.data.source import DataSet
from shoal.data.worker_messages import Opening
from shoal.data.workers import DataWorkers
from shoal.errors import InvariantViolation


def open_preparation(
    *,
    dataset: DataSet,
    layout: BatchLayout,
    pool: Pool,
    order: PassOrder,
    num_workers: int,
    opening: Opening | None,
    on_filled: Callable[[Job], None],
) -> Preparation:
    """Return the `Preparation` for this number of workers; nothing is started yet.

    Args:
        order: of the passes; only the preparation may draw from it.
        num_workers: processes; 0: two threads of this process.
        opening: how processes open the data set; None without processes.
        on_filled: called on the event loop for each job that is done.
    """
    if num_workers == 0:
        return PreparingThreads(dataset=dataset, layout=layout, pool=pool, order=order, on_filled=on_filled)
    if opening is None:
        raise InvariantViolation(f"{num_workers} data workers were asked for and not told what to open")
    return DataWorkers(
        num_workers=num_workers,
        opening=opening,
        dataset=dataset,
        layout=layout,
        pool=pool,
        order=order,
        on_filled=on_filled,
    )
