"""Which batches lie in the pool before they are asked for: decides what is prepared next, and where.

A batch is prepared when somebody waits for it, or when it will be asked for soon and a place is free. A prediction that
did not come true is dropped as soon as it is no longer predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.data.layout import BatchLayout
from shoal.data.pool import Pool
from shoal.data.preparation import Content, Job, Preparation


class Preparer:
    """The batches that lie in the pool and belong to nobody yet, and those on their way there."""

    def __init__(self, pool: Pool, layout: BatchLayout, preparation: Preparation) -> None:
        """Prepare nothing yet.

        Args:
            pool: other users may take places from it too.
            layout: says how many places a batch takes.
            preparation: does the work; its owner reports each job that is done to `filled`.
        """
        self._pool = pool
        self._layout = layout
        self._preparation = preparation
        self._ready: dict[Content, int] = {}
        self._preparing: set[Content] = set()

    def take(self, content: Content) -> int | None:
        """Return the place that holds `content`, which now belongs to the caller, or None if it is not ready."""
        return self._ready.pop(content, None)

    @property
    def passes(self) -> set[int]:
        """Of which passes over the training data samples are being read."""
        contents = (content for content in self._preparing if not content.is_holdout)
        return {item.pass_number for content in contents for item in content.samples}

    def start(self, urgent: Sequence[Content], ahead: Sequence[Content]) -> None:
        """Start what can be started: first `urgent`, which somebody waits for, then `ahead`; drop everything else."""
        wanted = {*urgent, *ahead}
        for content in [content for content in self._ready if content not in wanted]:
            self._pool.release(self._ready.pop(content))
        for position, content in enumerate([*urgent, *ahead]):
            if len(self._preparing) >= self._preparation.num_jobs:
                return
            if content in self._preparing or content in self._ready:
                continue
            num_places = self._layout.num_places(content.num_samples)
            place = self._pool.take(num_places)
            while place is None and position < len(urgent) and self._evict(keep=urgent):
                place = self._pool.take(num_places)
            if place is None:
                return
            self._preparing.add(content)
            self._preparation.begin(Job(content, place))

    def filled(self, job: Job) -> None:
        """A batch is complete."""
        self._preparing.discard(job.content)
        self._ready[job.content] = job.place

    def _evict(self, keep: Sequence[Content]) -> bool:
        """Give up the batch that is needed last of those that nobody waits for, if there is one."""
        victim = next((content for content in reversed(self._ready) if content not in keep), None)
        if victim is not None:
            self._pool.release(self._ready.pop(victim))
        return victim is not None
