"""Time: the only module that reads a clock and the only one that sleeps.

Monotonic seconds (`now_s`) measure durations and deadlines; they mean nothing in another process after a restart.
Wall-clock seconds (`unix_s`) are for records and for people. They count on from what the wall clock said when this
program was started, so that a clock which is set while a run goes on neither ages records nor makes them young. Roles
are forked from one process and have its time. A virtual machine that was paused has not counted meanwhile: it catches
up when its wall clock and other hosts say the same. Tests hand in a `Clock` of their own.
"""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar, Final, Protocol

import anyio


class Clock(Protocol):
    """What every part that needs time takes as an argument."""

    def now_s(self) -> float:
        """Return monotonic seconds since an arbitrary origin."""
        ...

    def unix_s(self) -> float:
        """Return seconds since 1970-01-01 UTC."""
        ...

    async def sleep_s(self, duration_s: float) -> None:
        """Suspend the calling task for `duration_s` seconds; zero or less only yields to the other tasks."""
        ...


def _awake_and_asleep_s() -> float:
    """Return monotonic seconds that pass while the machine sleeps as well, where the system has such a clock."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


_LEAST_BEHIND_S = 60.0
"""By less nobody's records are refused."""
_AGREE_S = 15.0
"""So far from each other may be what the wall clock says, which is set by then, and other hosts."""


class SystemClock:
    """The machine's clocks, and sleeping on the running event loop."""

    began_unix_s: ClassVar[float] = time.time() - _awake_and_asleep_s()
    """When the machine was started, by the wall clock of then: a run tells its next fork server that of its first."""

    def now_s(self) -> float:
        """Return `time.monotonic()`, which all processes of one host share on Linux and macOS."""
        return time.monotonic()

    def unix_s(self) -> float:
        """Return seconds since 1970-01-01 UTC, as if nobody had set the wall clock since this program was started."""
        return SystemClock.began_unix_s + _awake_and_asleep_s()

    @staticmethod
    def catch_up(ahead_s: float) -> float:
        """Count on from what the wall clock says now, if it is ahead of this count by about as much as others are.

        It never goes back, which would make old records young; and a wall clock alone may have been set to anything.

        Args:
            ahead_s: by how much the clocks of other hosts are ahead of this count.

        Returns:
            By how many seconds; 0: it counts on as it did.
        """
        behind_s = time.time() - SystemClock().unix_s()
        if behind_s < _LEAST_BEHIND_S or abs(behind_s - ahead_s) > _AGREE_S:
            return 0.0
        SystemClock.began_unix_s += behind_s
        return behind_s

    async def sleep_s(self, duration_s: float) -> None:
        """Suspend the calling task for `duration_s` seconds."""
        await anyio.sleep(max(0.0, duration_s))


TICK_S: Final = 0.5
"""What is in no hurry happens at multiples of it in monotonic time."""
_EARLY_S: Final = 0.01
"""By so much may a timer end before its time, and so be at its tick already."""


def until_tick_s(clock: Clock, duration_s: float) -> float:
    """Return how long to wait for the last tick of the next `duration_s` seconds; all of them if none comes.

    All processes of a host have the same ticks. A process that wakes up for one thing a second takes a core as long as
    one that is woken once for ten, and what one process says at a tick the others read in one go.

    Returns:
        Seconds, at most `duration_s` and a hundredth.
    """
    now_s = clock.now_s()
    left_s = math.floor((now_s + duration_s + _EARLY_S) / TICK_S) * TICK_S - now_s
    return left_s if left_s > _EARLY_S else duration_s


async def wait_for_tick(clock: Clock, duration_s: float) -> float:
    """Sleep as long as `until_tick_s` says; return by how many seconds it was longer."""
    left_s = until_tick_s(clock, duration_s)
    due_s = clock.now_s() + left_s
    await clock.sleep_s(left_s)
    return clock.now_s() - due_s


def thread_cpu_s() -> float:
    """Return the seconds for which the calling thread has computed; waiting for a core does not count."""
    return time.thread_time()


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time by which something has to have happened.

    Attributes:
        expires_at_s: in `clock.now_s()` seconds; `math.inf` never expires.
    """

    clock: Clock
    expires_at_s: float

    @classmethod
    def after(cls, clock: Clock, timeout_s: float) -> Deadline:
        """Return the deadline `timeout_s` seconds from now."""
        return cls(clock, clock.now_s() + timeout_s)

    def remaining_s(self) -> float:
        """Return the seconds that are left, never below zero."""
        return max(0.0, self.expires_at_s - self.clock.now_s())

    def expired(self) -> bool:
        """Return whether the point has been reached."""
        return self.clock.now_s() >= self.expires_at_s


@dataclass(slots=True)
class Backoff:
    """Growing pauses between attempts: `first_s`, then twice the one before, at most `max_s`, each shortened at random.

    The random part (down to `1 - jitter` of the pause) keeps peers that failed together from coming back together.
    """

    first_s: float
    max_s: float
    jitter: float = 0.5
    rng: random.Random = field(default_factory=random.Random)
    _attempts: int = 0

    def next_delay_s(self) -> float:
        """Return the next pause in seconds and count the attempt."""
        # The exponent is bounded so that a peer that is away for days cannot overflow a float.
        full_s = min(self.max_s, self.first_s * 2.0 ** min(self._attempts, 64))
        self._attempts += 1
        return full_s * (1.0 - self.jitter * self.rng.random())

    def reset(self) -> None:
        """Start again from `first_s`, after a success."""
        self._attempts = 0

    async def wait(self, clock: Clock) -> None:
        """Sleep for the next pause."""
        await clock.sleep_s(self.next_delay_s())


def utc_stamp(unix_s: float) -> str:
    """Return wall-clock seconds as `YYYYMMDD-HHMMSS` in UTC, for names of runs and files."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y%m%d-%H%M%S")


def utc_time_of_day(unix_s: float) -> str:
    """Return wall-clock seconds as `HH:MM:SSZ` in UTC, for what people read."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%H:%M:%SZ")


def utc_iso(unix_s: float) -> str:
    """Return wall-clock seconds as ISO 8601 in UTC with milliseconds, for log lines."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")
