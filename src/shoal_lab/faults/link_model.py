"""One direction of an emulated link: given bytes at a time, when they arrive and which of them wrong. No I/O, no clock.

    take(now) --> queue of the line (rate) --> under way (delay, jitter, repair of losses) --> Parcel(arrives_s, data)

The same bytes taken at the same times with the same seed give the same parcels. Which bits are flipped depends on the
seed and the place in the stream alone, not on the pieces in which the stream comes.
"""

from __future__ import annotations

import math
import random
from typing import Final, NamedTuple

from shoal_lab.faults.link import PACKET_BYTES, LinkConditions

# Bytes that travel together: a millisecond of the line, which is as fine as timers are.
_PARCEL_S: Final = 1e-3
_MAX_PARCEL_BYTES: Final = 64 * 1024
# One draw holds for so long: packets that follow each other closely have about the same delay.
_JITTER_SLOT_S: Final = 0.01


class Parcel(NamedTuple):
    """Bytes that arrive together; none at the end of the stream."""

    arrives_s: float
    data: bytes


class LinkModel:
    """One direction of a link.

    Attributes:
        num_flipped: bits flipped so far.
        num_lost: packets lost (and repaired) so far.
    """

    def __init__(self, conditions: LinkConditions, seed: object) -> None:
        """Start with an empty queue.

        Args:
            seed: each different text of it gives another fate.
        """
        self.num_flipped = self.num_lost = 0
        # One source for each kind of fault: a change of one leaves the others where they were.
        self._loss_rng, self._flip_rng, self._jitter_rng = (
            random.Random(f"{seed}/{kind}") for kind in ("loss", "flip", "jitter")
        )
        self._line_free_s = self._last_arrival_s = self._slot_ends_s = -math.inf
        self._jitter_s = 0.0
        self._conditions = conditions
        self.change(conditions)

    @property
    def conditions(self) -> LinkConditions:
        """What the link is like now."""
        return self._conditions

    def change(self, conditions: LinkConditions) -> None:
        """Be like this from now on; what was taken before arrives as it would have."""
        self._conditions = conditions
        self._packets_to_loss = self._draw_packets_to_loss()
        self._bytes_to_flip = self._draw_bytes_to_flip()
        self._slot_ends_s = -math.inf

    def take(self, now_s: float, data: bytes) -> list[Parcel]:
        """Take bytes at monotonic time `now_s`, which does not decrease; no bytes are the end of the stream.

        Returns:
            All taken bytes in order; at least one parcel.
        """
        now = self._conditions
        jitter_s = self._jitter(now_s)
        size = int(min(max(now.rate_bytes_per_s * _PARCEL_S, PACKET_BYTES), _MAX_PARCEL_BYTES))
        parcels: list[Parcel] = []
        for start in range(0, max(len(data), 1), size):
            piece = data[start : start + size]
            self._line_free_s = max(now_s, self._line_free_s) + len(piece) / now.rate_bytes_per_s
            arrives_s = self._line_free_s + now.delay_s + jitter_s + self._repair(len(piece))
            self._last_arrival_s = max(self._last_arrival_s, arrives_s)
            parcels.append(Parcel(self._last_arrival_s, self._flipped(piece)))
        return parcels

    def room_bytes(self, now_s: float) -> float:
        """Return how much fits into the line's queue: at most that should be taken at `now_s`."""
        waiting_s = max(0.0, self._line_free_s - now_s)
        waiting_bytes = waiting_s * self._conditions.rate_bytes_per_s if waiting_s else 0.0
        return max(0.0, self._conditions.queue_bytes - waiting_bytes)

    def room_at_s(self, num_bytes: float) -> float:
        """Return the monotonic time from which on so much fits into the queue."""
        waits_bytes = self._conditions.queue_bytes - num_bytes
        return self._line_free_s - waits_bytes / self._conditions.rate_bytes_per_s

    def _jitter(self, now_s: float) -> float:
        if now_s >= self._slot_ends_s:
            self._slot_ends_s = now_s + _JITTER_SLOT_S
            self._jitter_s = self._jitter_rng.uniform(0.0, self._conditions.jitter_s)
        return self._jitter_s

    def _repair(self, num_bytes: int) -> float:
        """Return how much later a piece arrives because packets of it were lost, and perhaps lost again."""
        self._packets_to_loss -= math.ceil(num_bytes / PACKET_BYTES)
        worst_s = 0.0
        while self._packets_to_loss <= 0:
            repair_s = pause_s = self._conditions.repair_s
            while self._loss_rng.random() < self._conditions.loss:
                pause_s *= 2  # as TCP does, which takes a second loss for a full line
                repair_s += pause_s
            self.num_lost += 1
            worst_s = max(worst_s, repair_s)
            self._packets_to_loss += self._draw_packets_to_loss()
        return worst_s

    def _flipped(self, piece: bytes) -> bytes:
        if self._bytes_to_flip >= len(piece):
            self._bytes_to_flip -= len(piece)
            return piece
        wrong = bytearray(piece)
        while self._bytes_to_flip < len(wrong):
            wrong[int(self._bytes_to_flip)] ^= 1 << self._flip_rng.randrange(8)
            self.num_flipped += 1
            self._bytes_to_flip += 1 + self._draw_bytes_to_flip()
        self._bytes_to_flip -= len(piece)
        return bytes(wrong)

    def _draw_packets_to_loss(self) -> float:
        loss = self._conditions.loss
        # The number of tries up to the first hit, by inverting its distribution.
        return 1 + math.log(1.0 - self._loss_rng.random()) // math.log1p(-loss) if loss else math.inf

    def _draw_bytes_to_flip(self) -> float:
        mean = self._conditions.bytes_per_flip
        return math.floor(self._flip_rng.expovariate(1.0) * mean) if math.isfinite(mean) else math.inf
