"""What the launcher asks the supervisor for: roles, when to start them again, and how they ended."""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass
from typing import Final

from shoal.clock import Backoff


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a role that failed is started again.

    A role that exits with 0 is done and is not started again, unless it serves on. Nor is one that fails by itself
    before it was ever ready.

    Attributes:
        max_restarts: the most within `window_s`; after that the role is given up. 0 never restarts.
        window_s: the time over which restarts are counted; after a longer run the pauses are short again.
        failed_window_s: the same for those of a role that has failed by itself: it may meet the same again.
        first_delay_s: the pause before the first restart; it doubles with each further one.
        serves_on: it ends when it is told; if it does so unasked, somebody has sent it a SIGTERM, and it is missed.
        only_killed: restart only a role that was killed; if it fails by itself, its error is its last word.
        last_words: the kinds of errors that are its last word, since it would meet the same again.
    """

    max_restarts: int = 0
    window_s: float = 60.0
    failed_window_s: float = 3600.0
    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    serves_on: bool = False
    only_killed: bool = False
    last_words: frozenset[str] = frozenset()


NEVER_RESTART = RestartPolicy()


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One role to run.

    Attributes:
        role, index: its name, as in "server" 2.
        entry: "package.module:function", an async function, found after the fork; see `shoal.runtime.role.RoleEntry`.
        payload: handed to the entry; travels over a socket, so it may hold secrets.
        output_path: standard output and error are appended to this file; empty: they go where the launcher's go.
        nice: added to the launcher's own; not below 0.
    """

    role: str
    index: int
    entry: str
    payload: bytes = b""
    restart: RestartPolicy = NEVER_RESTART
    output_path: str = ""
    nice: int = 0

    def __str__(self) -> str:
        return f"{self.role}:{self.index}"


_MEANS: Final = {signal.SIGBUS: ": a disk fails, or is full, on which memory of it lay in files"}
"""What a process that is killed so cannot say itself."""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How a process ended.

    Attributes:
        code: the exit code; negative: the number of the signal that ended it.
    """

    code: int

    @property
    def ok(self) -> bool:
        """Whether it ended by itself and successfully."""
        return self.code == 0

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        if -self.code not in set(signal.Signals):
            # Those of the real-time range have no names.
            return f"killed by signal {-self.code}"
        killed = signal.Signals(-self.code)
        return f"killed by {killed.name}{_MEANS.get(killed, '')}"


KILLED = ExitStatus(-signal.SIGKILL)


class RestartHistory:
    """Decides, for one role, whether and after which pause it is started again."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._backoff = Backoff(first_s=policy.first_delay_s, max_s=policy.max_delay_s)
        self._restarts_s: deque[float] = deque()
        self._failures_s: deque[float] = deque()

    def next_delay_s(self, now_s: float, *, has_failed: bool = False) -> float | None:
        """Count an end at monotonic time `now_s`; return the pause before the restart, or None to give up.

        Args:
            has_failed: by itself; else it was killed.
        """
        _forget(self._restarts_s, now_s - self._policy.window_s)
        _forget(self._failures_s, now_s - self._policy.failed_window_s)
        counted = max(len(self._restarts_s), len(self._failures_s) if has_failed else 0)
        if counted >= self._policy.max_restarts:
            return None
        if has_failed:
            self._failures_s.append(now_s)
        if not self._restarts_s:
            self._backoff.reset()
        self._restarts_s.append(now_s)
        return self._backoff.next_delay_s()


def _forget(times_s: deque[float], until_s: float) -> None:
    while times_s and times_s[0] <= until_s:
        times_s.popleft()
