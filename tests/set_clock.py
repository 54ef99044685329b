"""A clock that a test sets."""

from __future__ import annotations

from shoal.clock import SystemClock


class SetClock(SystemClock):
    """Both times stand still until a test moves them."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def now_s(self) -> float:
        return self.now

    def unix_s(self) -> float:
        return self.now
