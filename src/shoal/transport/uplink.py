"""The way out of a host, which its connections to other hosts share: whose tensors go next, and how much at most.

    control frames  --> at once; they count against the cap
    of steps        --> within the cap, one connection after the other
    of averages     --> the same, and only while no other connection has frames of steps that its socket has not taken
    all others      --> the same, and neither frames of steps nor of averages

A trainer waits for a step and a round for averages, nobody for a checkpoint or the state of a newcomer. Where more
urgent frames fill the line, each class has one byte in `_SHARE` nevertheless, or a round would never end; and a
connection whose peer takes nothing holds up no other one for longer than `_STUCK_S`.

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
from dataclasses import dataclass, field
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
_STUCK_S: Final = 2.0
"""A connection that begins on a line which other frames fill takes a piece a second until it has its part of it."""
_TIME_BYTES: Final = 8

Resume = Callable[[], None]


class Urgency(enum.IntEnum):
    """Of frames with tensors, by what waits for them; the most urgent one is the least."""

    STEP = enum.auto()
    ROUND = enum.auto()
    BACKGROUND = enum.auto()


@dataclass(slots=True)
class _Class:
    """The connections with frames of one urgency.

    Attributes:
        waiting: those whose turn it is not yet.
        unsent: those which have frames that their sockets have not taken, and no more urgent ones.
        held_from_s: when more urgent frames have left last, or began to be in the way.
        credit_bytes: what this class may send beside those.
    """

    waiting: deque[Resume] = field(default_factory=deque[Resume])
    unsent: set[Resume] = field(default_factory=set[Resume])
    held_from_s: float = 0.0
    credit_bytes: float = 0.0


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
        self._of = {urgency: _Class() for urgency in Urgency}
        # Of each class those that are more urgent, and those that are less.
        self._before = {each: [self._of[other] for other in Urgency if other < each] for each in Urgency}
        self._behind = {each: [self._of[other] for other in Urgency if other > each] for each in Urgency}
        self._timer: asyncio.TimerHandle | None = None
        self._is_waking = False

    @property
    def is_capped(self) -> bool:
        """Whether there is a limit on what is sent."""
        return self._bucket is not None

    def allows(self, resume: Resume, urgency: Urgency) -> bool:
        """Return whether such frames may leave now; if not, `resume` is called when it is this connection's turn."""
        waiting = self._of[urgency].waiting
        is_its_turn = self._is_waking or not waiting
        if is_its_turn and not self._wait_s(resume, urgency):
            return True
        if resume not in waiting:
            self._stop_waiting(resume)
            waiting.append(resume)
        self._set_timer()
        return False

    def spend(self, num_bytes: int, urgency: Urgency | None) -> None:
        """Take note of what a connection has been given to send; `urgency` None: control frames alone."""
        now_s = self._clock.now_s()
        if self._bucket is not None:
            self._bucket.spend(num_bytes, now_s)
        if urgency is None:
            return
        if any(each.unsent or each.waiting for each in self._before[urgency]):
            self._of[urgency].credit_bytes -= num_bytes
        for each in self._behind[urgency]:
            each.held_from_s = now_s
            # No class ever saves up more than a piece, so that it holds up no other one for longer.
            each.credit_bytes = min(_PIECE_BYTES, each.credit_bytes + num_bytes / (_SHARE - 1))
            if each.waiting and each.credit_bytes > 0.0:
                self._set_timer()

    def unsent(self, resume: Resume, urgency: Urgency | None) -> None:
        """Take note of the most urgent frames of a connection that its socket has not taken; None: there are none."""
        for other, each in self._of.items():
            if other is not urgency and resume in each.unsent:
                each.unsent.discard(resume)
                self._set_timer()
        if urgency is None:
            return
        for other in Urgency:
            if other > urgency and not any(each.unsent for each in self._before[other]):
                # It has just begun to be in the way: nothing was earned before, and a debt stays one.
                held = self._of[other]
                held.held_from_s, held.credit_bytes = self._clock.now_s(), min(held.credit_bytes, 0.0)
        self._of[urgency].unsent.add(resume)

    def forget(self, resume: Resume) -> None:
        """Call this one no more: its connection has ended."""
        self._stop_waiting(resume)
        for each in self._of.values():
            each.unsent.discard(resume)
        self._set_timer()

    def _stop_waiting(self, resume: Resume) -> None:
        for each in self._of.values():
            if resume in each.waiting:
                each.waiting.remove(resume)

    def _wait_s(self, resume: Resume, urgency: Urgency) -> float:
        """Return the seconds until frames of this class may leave, if nothing else happens."""
        now_s = self._clock.now_s()
        wait_s = 0.0 if self._bucket is None else self._bucket.wait_s(now_s)
        own = self._of[urgency]
        is_held = any(each.waiting or each.unsent - {resume} for each in self._before[urgency])
        if is_held and own.credit_bytes <= 0.0:
            wait_s = max(wait_s, own.held_from_s + _STUCK_S - now_s)
        return wait_s

    def _set_timer(self) -> None:
        """See to it that the first of those that wait is called in time."""
        if self._is_waking:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waits_s = [self._wait_s(each.waiting[0], urgency) for urgency, each in self._of.items() if each.waiting]
        if waits_s:
            self._timer = asyncio.get_running_loop().call_later(min(waits_s), self._wake)

    def _wake(self) -> None:
        """Let those that wait send, each one batch at a time, as long as there is something to spend."""
        self._timer = None
        self._is_waking = True
        try:
            # Who is refused after all waits again. So that nobody is called without end, the rest is for the next time.
            for _ in range(sum(len(each.waiting) for each in self._of.values())):
                if (resume := self._next()) is None:
                    break
                resume()
        finally:
            self._is_waking = False
            self._set_timer()

    def _next(self) -> Resume | None:
        """Remove and return whose turn it is; less urgent ones have their share, if any, before others go on."""
        for urgency in reversed(Urgency):
            waiting = self._of[urgency].waiting
            if waiting and not self._wait_s(waiting[0], urgency):
                return waiting.popleft()
        return None
