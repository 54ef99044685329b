"""Clocks that a test sets: time stands still until the test moves it, or whoever sleeps does."""

from __future__ import annotations

import anyio

from shoal.clock import SystemClock


class SetClock(SystemClock):
    """Both times stand still until a test moves them."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def now_s(self) -> float:
        return self.now

    def unix_s(self) -> float:
        return self.now


class ManualClock(SetClock):
    """A sleep is over at once, and moves both times.

    Attributes:
        slept_s: How long each sleep was.
    """

    def __init__(self, now: float = 100.0) -> None:
        super().__init__(now)
        self.slept_s: list[float] = []

    async def sleep_s(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now += duration_s


class FewSleeps(ManualClock):
    """So many sleeps are over at once, the next one when it is cancelled.

    Attributes:
        over: Set when that one has begun.
    """

    def __init__(self, times: int, now: float = 100.3) -> None:
        super().__init__(now)
        self.over = anyio.Event()
        self._times = times

    async def sleep_s(self, duration_s: float) -> None:
        if len(self.slept_s) == self._times:
            self.over.set()
            await anyio.sleep_forever()
        await super().sleep_s(duration_s)


class PassingClock(SetClock):
    """A sleep is over once the test has let as much time pass."""

    def __init__(self, now: float = 100.0) -> None:
        super().__init__(now)
        self._passed = anyio.Event()

    async def sleep_s(self, duration_s: float) -> None:
        until_s = self.now + duration_s
        while self.now < until_s:
            await self._passed.wait()

    def pass_s(self, duration_s: float) -> None:
        """Move both times, and wake who has slept enough."""
        self.now += duration_s
        passed, self._passed = self._passed, anyio.Event()
        passed.set()
