"""Writes batches into the pool before they are asked for, in worker threads so that the event loop stays free.

A batch is prepared when somebody waits for it, or when it will be asked for soon and a place is free. A prediction that
did not come true is dropped as soon as it is no longer predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread
import numpy as np
from anyio.abc import TaskGroup

from shoal.data.layout import BatchLayout
from shoal.data.pool import Pool
from shoal.data.shuffle import PassOrder
from shoal.data.source import DataSet
from shoal.swarm.sample_ranges import Ranges, count


@dataclass(frozen=True, slots=True)
class Content:
    """What a place holds: positions in shuffled passes of the training samples, or held-out samples in their order."""

    samples: Ranges
    is_holdout: bool = False

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return count(self.samples)


class Preparer:
    """The batches that lie in the pool and belong to nobody yet, and those on their way there."""

    def __init__(
        self,
        *,
        dataset: DataSet,
        layout: BatchLayout,
        pool: Pool,
        seed: int,
        num_workers: int,
        on_ready: Callable[[], None],
    ) -> None:
        """Prepare nothing yet.

        Args:
            dataset: the samples.
            layout: of a place.
            pool: where the places are; others may take places from it too.
            seed: of the order of the passes.
            num_workers: batches that are prepared at the same time, each in a thread.
            on_ready: called on the event loop whenever another batch is ready.
        """
        self._dataset = dataset
        self._layout = layout
        self._pool = pool
        self._order = PassOrder(seed, dataset.train.num_samples)
        self._num_workers = num_workers
        self._threads = anyio.CapacityLimiter(num_workers)
        self._on_ready = on_ready
        self._ready: dict[Content, int] = {}
        self._preparing: set[Content] = set()

    def take(self, content: Content) -> int | None:
        """Return the place that holds `content`, which now belongs to the caller, or None if it is not ready."""
        return self._ready.pop(content, None)

    def start(self, group: TaskGroup, urgent: Sequence[Content], ahead: Sequence[Content]) -> None:
        """Start what can be started: first `urgent`, which somebody waits for, then `ahead`; drop everything else."""
        wanted = {*urgent, *ahead}
        for content in [content for content in self._ready if content not in wanted]:
            self._pool.release(self._ready.pop(content))
        for position, content in enumerate([*urgent, *ahead]):
            if len(self._preparing) >= self._num_workers:
                return
            if content in self._preparing or content in self._ready:
                continue
            place = self._pool.take()
            if place is None and position < len(urgent):
                place = self._evict(keep=urgent)
            if place is None:
                return
            self._preparing.add(content)
            group.start_soon(self._prepare, content, place)

    def _evict(self, keep: Sequence[Content]) -> int | None:
        """Give up the batch that is needed last of those that nobody waits for."""
        victim = next((content for content in reversed(self._ready) if content not in keep), None)
        return None if victim is None else self._ready.pop(victim)

    async def _prepare(self, content: Content, place: int) -> None:
        await anyio.to_thread.run_sync(self._fill, content, place, limiter=self._threads)
        self._preparing.discard(content)
        self._ready[content] = place
        self._on_ready()

    def _fill(self, content: Content, place: int) -> None:
        inputs, labels = self._layout.arrays(self._pool.memory(place), content.num_samples)
        if content.is_holdout:
            parts = [np.arange(item.start, item.stop, dtype=np.int64) for item in content.samples]
            self._dataset.holdout.read_into(np.concatenate(parts), inputs, labels)
        else:
            self._dataset.train.read_into(self._order.indices(content.samples), inputs, labels)
