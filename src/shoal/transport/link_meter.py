"""What the link with one peer is like, as far as the connection's own traffic shows: round trip and receive rate.

Round trip: now and then a heartbeat carries a number that the peer sends back at once. Queues, on either side and on
the way, can only make that longer, so the least of the last few answers is closest to the link itself.

Receive rate: bytes over time, counted only between two reads of which the first left a frame unfinished: then the peer
had more to send, and what passed was the link's time and not the peer's. Time in which this side did not read does not
count either. Sums instead of single readings: what a stalled link delivers in one burst counts with its stall.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from shoal.clock import Clock

PING_INTERVAL_S: Final = 1.0
PING_PATIENCE_S: Final = 10.0
"""An answer that takes longer is not waited for."""
NUM_ROUND_TRIPS: Final = 8
"""So many of the last answers count."""
MIN_MEASURED_BYTES: Final = 256 * 1024
"""Below it, the receive rate is unknown: a socket's buffer alone says nothing."""
MEMORY_S: Final = 5.0
"""Seconds of receiving after which a measurement counts by 1/e."""


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """What is known of a link; None: not known (yet).

    Attributes:
        round_trip_s: of a small message, with the least queueing that was seen lately.
        receive_bytes_per_s: how fast the peer's large frames come in.
    """

    round_trip_s: float | None = None
    receive_bytes_per_s: float | None = None


class LinkMeter:
    """Measures the link with one peer, over all connections with it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._round_trips_s: deque[float] = deque(maxlen=NUM_ROUND_TRIPS)
        self._ping = 0
        self._pinged_s = -math.inf
        self._answered = True
        self._unfinished_since_s: float | None = None
        self._bytes = self._seconds = 0.0
        self._measured_bytes = 0

    @property
    def estimate(self) -> LinkEstimate:
        """What is known now."""
        known = self._measured_bytes >= MIN_MEASURED_BYTES and self._seconds > 0
        return LinkEstimate(
            round_trip_s=min(self._round_trips_s, default=None),
            receive_bytes_per_s=self._bytes / self._seconds if known else None,
        )

    def connected(self) -> None:
        """Start on a new connection: what was under way on the one before is gone; what is known stays."""
        self._pinged_s, self._answered = -math.inf, True
        self._unfinished_since_s = None

    def ping(self) -> int:
        """Return the number to be sent now and answered by the peer, or 0 if none is due."""
        now_s = self._clock.now_s()
        if now_s - self._pinged_s < (PING_INTERVAL_S if self._answered else PING_PATIENCE_S):
            return 0
        self._ping += 1
        self._pinged_s, self._answered = now_s, False
        return self._ping

    def pong(self, number: int) -> None:
        """Take the peer's answer; one that was not asked for, or comes twice or too late, says nothing."""
        if number == self._ping and not self._answered:
            self._answered = True
            self._round_trips_s.append(self._clock.now_s() - self._pinged_s)

    def received(self, num_bytes: int, *, unfinished: bool) -> None:
        """Take note of a read, after which a frame is `unfinished`, or none."""
        since_s = self._unfinished_since_s
        if since_s is None and not unfinished:
            return
        now_s = self._clock.now_s()
        self._unfinished_since_s = now_s if unfinished else None
        if since_s is not None:
            seconds = now_s - since_s
            kept = math.exp(-seconds / MEMORY_S)
            self._bytes = self._bytes * kept + num_bytes
            self._seconds = self._seconds * kept + seconds
            self._measured_bytes += num_bytes

    def paused(self) -> None:
        """Take note that this side reads no more for a while."""
        self._unfinished_since_s = None
