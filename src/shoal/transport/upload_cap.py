"""A limit on what one process sends to other hosts: a bucket of bytes, and the connections that wait for it in turn.

Frames of the control class go first, are counted, and are not held: whatever they use, tensors wait for. So the cap
holds over any time in which there is something to hold back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from shoal.clock import Clock, SystemClock
from shoal.wire.frame import MIN_PIECE_BYTES

_BURST_S: Final = 0.05
"""What may have been saved up: timers are late by about a millisecond, and must not cost throughput."""
_PIECE_S: Final = 0.05
"""A piece takes no longer than that, so that control frames and other connections get their turn."""


class ByteBucket:
    """Decides when the next bytes may be sent. Spending more than there is makes a debt, which is waited for."""

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        """Start empty, without debt."""
        self._bytes_per_s = bytes_per_s
        self._balance_bytes = 0.0
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until something may be sent; 0 for now."""
        self._fill(now_s)
        return max(0.0, -self._balance_bytes / self._bytes_per_s)

    def spend(self, num_bytes: int, now_s: float) -> None:
        """Take note of what has been sent."""
        self._fill(now_s)
        self._balance_bytes -= num_bytes

    def _fill(self, now_s: float) -> None:
        earned_bytes = (now_s - self._at_s) * self._bytes_per_s
        self._balance_bytes = min(self._balance_bytes + earned_bytes, self._bytes_per_s * _BURST_S)
        self._at_s = now_s


class UploadCap:
    """Shared by all connections of an endpoint that leave the host; used on the event loop's thread."""

    def __init__(self, max_mbit_per_s: float, clock: Clock | None = None) -> None:
        """Hold nothing back yet.

        Args:
            max_mbit_per_s: millions of bits per second in frames; what TLS and TCP add is not counted.
        """
        bytes_per_s = max_mbit_per_s * 1e6 / 8
        self._clock: Clock = clock or SystemClock()
        self._bucket = ByteBucket(bytes_per_s, self._clock.now_s())
        self._waiting: deque[Callable[[], None]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._is_waking = False
        self.piece_bytes = max(MIN_PIECE_BYTES, int(bytes_per_s * _PIECE_S))

    def allows(self, resume: Callable[[], None]) -> bool:
        """Return whether bulk frames may leave now; if not, `resume` is called when it is this connection's turn."""
        is_first = self._is_waking or not self._waiting
        if is_first and not self._bucket.wait_s(self._clock.now_s()):
            return True
        if resume not in self._waiting:
            self._waiting.append(resume)
        self._set_timer()
        return False

    def spend(self, num_bytes: int) -> None:
        """Take note of what a connection has been given to send."""
        self._bucket.spend(num_bytes, self._clock.now_s())

    def forget(self, resume: Callable[[], None]) -> None:
        """Call this one no more: its connection has ended."""
        if resume in self._waiting:
            self._waiting.remove(resume)
        if not self._waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        if self._timer is None and not self._is_waking:
            wait_s = self._bucket.wait_s(self._clock.now_s())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake)

    def _wake(self) -> None:
        """Let those that wait send, each one batch at a time, as long as there is something to spend."""
        self._timer = None
        self._is_waking = True
        while self._waiting and not self._bucket.wait_s(self._clock.now_s()):
            self._waiting.popleft()()
        self._is_waking = False
        if self._waiting:
            self._set_timer()
