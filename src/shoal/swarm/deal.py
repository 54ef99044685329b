"""What the lease table asks of whoever decides which batch a trainer's step gets: `FixedDeal` or `SharedDeal`.

unused --deal, claim--> a trainer's --put_back--> unused
                                   '--recorded--> gone
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.swarm.sample_ranges import Batch, Ranges

NO_PLACE = -1
"""Index of a batch that belongs to no step of the plan."""


class Deal(Protocol):
    """Has every sample that nobody has. A batch has an index within the plan of the round: step * num_slots + slot."""

    @property
    def free(self) -> tuple[Batch, ...]:
        """What was cut from the stream and is nobody's now, in the order of the data."""
        ...

    def plan(self, num_slots: int, inner_steps: int, speeds: Sequence[float], *, is_resumed: bool) -> None:
        """Begin a round. What was left of the one before is dealt first, and its indices lose their meaning.

        Args:
            speeds: samples per second of each slot; 0: as in the round before, if that is known; empty: 0 for all.
            is_resumed: trainers hold some batches already; calls of `claim` follow.
        """
        ...

    def deal(self, slot: int, step: int, now_s: float) -> tuple[int, Batch] | None:
        """Give a slot's trainer the batch of a step: its index, and the batch; None if there is none for it."""
        ...

    def begun(self, index: int, now_s: float) -> None:
        """A trainer has got a batch in its hands."""
        ...

    def trained(self, index: int, now_s: float) -> None:
        """A trainer is through with a batch, and its step is committed."""
        ...

    def claim(self, samples: Ranges) -> int | None:
        """A trainer has this batch already; returns its index or `NO_PLACE`, and None if that cannot be."""
        ...

    def put_back(self, index: int, batch: Batch) -> None:
        """Nobody has this batch, or this part of one, any more."""
        ...

    def recorded(self, samples: Ranges) -> None:
        """A record contains these samples; batches that a trainer has are looked after by the caller."""
        ...

    def upcoming(self, limit: int) -> tuple[Batch, ...]:
        """Return the next batches, at most `limit`, that trainers will be given if nothing goes wrong."""
        ...
