"""The way out of a host, which its connections to other hosts share: whose tensors go next, and how much at most.

    control frames     --> at once; they count against the cap
    step frames        --> within the cap, one connection after the other
    background frames  --> the same, and only while no other connection has step frames that its socket has not taken

Somebody waits for a step, nobody for the state of a newcomer. Where steps fill the line, background frames have one
byte in `_SHARE` nevertheless, or a round would never end; and a connection whose peer takes nothing holds up no other
one for longer than `_STUCK_S`.

The cap is one for all processes of a launcher: each spends time of the same uplink, a number in a file that all have
in memory. That is done without a lock: in the microsecond in which two do it at once one piece too many leaves, but
a process that is frozen with a lock in its hand would hold up the others for good.
"""

from __future__ import annotations

import asyncio
import enum
import mmap
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from shoal.clock import Clock, SystemClock
from shoal.wire.frame import MIN_PIECE_BYTES

_BURST_S: Final = 0.05
"""What may have been saved up: timers are late by about a millisecond, and must not cost throughput."""
_PIECE_S: Final = 0.05
"""A piece takes no longer than that, so that control frames and other connections get their turn."""
_PIECE_BYTES: Final = 64 * 1024
"""Small enough to leave in much less than `_STUCK_S` on a line of a few Mbit/s, which is in no way stuck."""
_SHARE: Final = 8
_STUCK_S: Final = 0.5
_TIME_BYTES: Final = 8

Resume = Callable[[], None]


class Urgency(enum.Enum):
    """Of frames with tensors, by what waits for them."""

    STEP = enum.auto()
    BACKGROUND = enum.auto()


class UplinkTime:
    """When the uplink has sent all that it was given, in monotonic seconds; shared through a file, if one is named."""

    def __init__(self, path: Path | None = None) -> None:
        """Open the file, or make it."""
        if path is None:
            self._seconds = memoryview(bytearray(_TIME_BYTES)).cast("d")
            return
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, _TIME_BYTES)
            # Read and written whole, which `struct` does not promise: it clears the place first.
            self._seconds = memoryview(mmap.mmap(descriptor, _TIME_BYTES)).cast("d")
        finally:
            os.close(descriptor)

    @property
    def free_at_s(self) -> float:
        """The time; long ago if nothing was sent yet."""
        return self._seconds[0]

    @free_at_s.setter
    def free_at_s(self, at_s: float) -> None:
        self._seconds[0] = at_s


class ByteBucket:
    """Decides when the next bytes may be sent. Spending more than there is makes a debt, which is waited for."""

    def __init__(self, bytes_per_s: float, time: UplinkTime | None = None) -> None:
        """Start with what may have been saved up."""
        self._bytes_per_s = bytes_per_s
        self._time = time or UplinkTime()

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until something may be sent; 0 for now."""
        return max(0.0, self._time.free_at_s - now_s)

    def spend(self, num_bytes: int, now_s: float) -> None:
        """Take note of what has been sent."""
        self._time.free_at_s = max(self._time.free_at_s, now_s - _BURST_S) + num_bytes / self._bytes_per_s


class Uplink:
    """Shared by all connections of an endpoint that leave the host; used on the event loop's thread.

    A connection is known by what lets it go on writing, its `resume`.

    Attributes:
        piece_bytes: the most of a tensor that a connection is to hand to its socket at a time.
    """

    def __init__(
        self, max_mbit_per_s: float | None = None, *, shared: Path | None = None, clock: Clock | None = None
    ) -> None:
        """Hold nothing back yet.

        Args:
            max_mbit_per_s: millions of bits per second in frames; what TLS and TCP add is not counted. None: no cap.
            shared: the file by which the processes of a host have one cap; None: this process has its own.
        """
        self._clock: Clock = clock or SystemClock()
        self._bucket: ByteBucket | None = None
        self.piece_bytes = _PIECE_BYTES
        if max_mbit_per_s is not None:
            bytes_per_s = max_mbit_per_s * 1e6 / 8
            self._bucket = ByteBucket(bytes_per_s, UplinkTime(shared))
            self.piece_bytes = min(_PIECE_BYTES, max(MIN_PIECE_BYTES, int(bytes_per_s * _PIECE_S)))
        self._waiting: dict[Urgency, deque[Resume]] = {urgency: deque() for urgency in Urgency}
        self._stepping: set[Resume] = set()
        self._stepped_at_s = 0.0
        self._credit_bytes = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._is_waking = False

    @property
    def is_capped(self) -> bool:
        """Whether there is a limit on what is sent."""
        return self._bucket is not None

    def allows(self, resume: Resume, urgency: Urgency) -> bool:
        """Return whether such frames may leave now; if not, `resume` is called when it is this connection's turn."""
        is_its_turn = self._is_waking or not self._waiting[urgency]
        if is_its_turn and not self._wait_s(resume, urgency):
            return True
        if resume not in self._waiting[urgency]:
            self._stop_waiting(resume)
            self._waiting[urgency].append(resume)
        self._set_timer()
        return False

    def spend(self, num_bytes: int, urgency: Urgency | None) -> None:
        """Take note of what a connection has been given to send; `urgency` None: control frames alone."""
        now_s = self._clock.now_s()
        if self._bucket is not None:
            self._bucket.spend(num_bytes, now_s)
        if urgency is Urgency.STEP:
            self._stepped_at_s = now_s
            # The background never saves up more than a piece, so that it holds up no step for longer.
            self._credit_bytes = min(_PIECE_BYTES, self._credit_bytes + num_bytes / (_SHARE - 1))
            if self._waiting[Urgency.BACKGROUND] and self._credit_bytes > 0.0:
                self._set_timer()
        elif urgency is Urgency.BACKGROUND and (self._stepping or self._waiting[Urgency.STEP]):
            self._credit_bytes -= num_bytes

    def steps(self, resume: Resume, *, are_left: bool) -> None:
        """Take note of whether a connection has step frames which its socket has not taken."""
        if are_left:
            if not self._stepping:
                # It has just begun to be in the way: nothing was earned before, and a debt stays one.
                self._stepped_at_s, self._credit_bytes = self._clock.now_s(), min(self._credit_bytes, 0.0)
            self._stepping.add(resume)
        elif resume in self._stepping:
            self._stepping.discard(resume)
            self._set_timer()

    def forget(self, resume: Resume) -> None:
        """Call this one no more: its connection has ended."""
        self._stop_waiting(resume)
        self._stepping.discard(resume)
        self._set_timer()

    def _stop_waiting(self, resume: Resume) -> None:
        for waiting in self._waiting.values():
            if resume in waiting:
                waiting.remove(resume)

    def _wait_s(self, resume: Resume, urgency: Urgency) -> float:
        """Return the seconds until frames of this class may leave, if nothing else happens."""
        now_s = self._clock.now_s()
        wait_s = 0.0 if self._bucket is None else self._bucket.wait_s(now_s)
        has_steps_before = bool(self._waiting[Urgency.STEP] or self._stepping - {resume})
        if urgency is Urgency.BACKGROUND and has_steps_before and self._credit_bytes <= 0.0:
            wait_s = max(wait_s, self._stepped_at_s + _STUCK_S - now_s)
        return wait_s

    def _set_timer(self) -> None:
        """See to it that the first of those that wait is called in time."""
        if self._is_waking:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waits_s = [self._wait_s(waiting[0], urgency) for urgency, waiting in self._waiting.items() if waiting]
        if waits_s:
            self._timer = asyncio.get_running_loop().call_later(min(waits_s), self._wake)

    def _wake(self) -> None:
        """Let those that wait send, each one batch at a time, as long as there is something to spend."""
        self._timer = None
        self._is_waking = True
        try:
            # Who is refused after all waits again. So that nobody is called without end, the rest is for the next time.
            for _ in range(sum(map(len, self._waiting.values()))):
                if (resume := self._next()) is None:
                    break
                resume()
        finally:
            self._is_waking = False
            self._set_timer()

    def _next(self) -> Resume | None:
        """Remove and return whose turn it is; the background has its share, if it has one, before the steps go on."""
        for urgency in (Urgency.BACKGROUND, Urgency.STEP):
            waiting = self._waiting[urgency]
            if waiting and not self._wait_s(waiting[0], urgency):
                return waiting.popleft()
        return None
