"""When a round may be ended, and the time by which that is judged: a user's pause is no part of it. Pure state, no I/O.

training --all trainers are done-----------------------------------> over
   | ^ '----the deadline passes while trainers can train-----------> over
   | |              '--while they cannot: it begins anew as soon as they can
   v |
 paused: nothing is over, and no time passes
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_ROUNDS = 3
"""Before this many rounds are known, the configured first deadline holds."""
_DEVIATIONS = 8.0
_SLOWER_IS_NORMAL = 1.5
"""A boundary deadline is never closer than this factor above the median: very even rounds have almost no deviation."""


@dataclass
class RunTime:
    """The seconds of a run: its host's monotonic clock, which stands still while the run is paused.

    Attributes:
        paused_s: how long all pauses were that are over.
        paused_at_s: when the present pause began, in monotonic seconds; None: there is none.
    """

    paused_s: float = 0.0
    paused_at_s: float | None = None

    @property
    def is_paused(self) -> bool:
        """Whether a user wants the run to stand still."""
        return self.paused_at_s is not None

    def pause(self, now_s: float) -> None:
        """Stand still; in a pause this changes nothing."""
        if self.paused_at_s is None:
            self.paused_at_s = now_s

    def resume(self, now_s: float) -> None:
        """Go on; without a pause this changes nothing."""
        if self.paused_at_s is not None:
            self.paused_s += self.pause_s(now_s)
            self.paused_at_s = None

    def pause_s(self, now_s: float) -> float:
        """Return for how long the present pause has lasted; 0 without one."""
        return 0.0 if self.paused_at_s is None else max(0.0, now_s - self.paused_at_s)

    def all_pauses_s(self, now_s: float) -> float:
        """Return for how long the run has been paused in all."""
        return self.paused_s + self.pause_s(now_s)

    def at_s(self, now_s: float) -> float:
        """Return the run's time; `now_s` is not before the present pause."""
        return now_s - self.all_pauses_s(now_s)


class RoundBoundary:
    """How long the trainers of one round are waited for."""

    def __init__(self, time: RunTime, timeout_s: float, now_s: float) -> None:
        """Wait from now on.

        Args:
            time: of the run; others pause it.
            timeout_s: how long trainers are waited for that are not done; infinite: as long as it takes.
        """
        self._time = time
        self._timeout_s = timeout_s
        # The deadline has passed while nobody could train.
        self._is_stuck = False
        self.begin(now_s)

    def begin(self, now_s: float) -> None:
        """Wait from now on: trainers could not train before."""
        self._ends_s = self._time.at_s(now_s) + self._timeout_s

    def is_over(self, now_s: float, *, all_done: bool, is_stuck: bool) -> bool:
        """Return whether the round may be ended now; to be asked whenever an argument has changed, and after `left_s`.

        Args:
            all_done: nothing more is expected of any trainer.
            is_stuck: nobody can train: a stage is served by nobody, nobody hands out samples, or all steps are refused.
        """
        if self._time.is_paused:
            # Also not if all are done: who pauses a run finds it in the same round later.
            return False
        if all_done:
            return True
        run_s = self._time.at_s(now_s)
        if self._is_stuck and not is_stuck:
            self._is_stuck = False
            self.begin(now_s)
        if run_s < self._ends_s:
            return False
        self._is_stuck = is_stuck
        return not is_stuck

    def left_s(self, now_s: float) -> float:
        """Return after how many seconds `is_over` may be true although nothing has changed; infinite: never."""
        if self._time.is_paused or self._is_stuck:
            return math.inf
        return max(0.0, self._ends_s - self._time.at_s(now_s))


def boundary_s(durations_s: Sequence[float], first_deadline_s: float) -> float:
    """Seconds after which the trainers of a round are not waited for any more; arguments as for `deadline_s`."""
    usual_s = deadline_s(durations_s, _DEVIATIONS, first_deadline_s)
    slowest = sorted(durations_s)
    return max(usual_s, _SLOWER_IS_NORMAL * slowest[len(slowest) // 2]) if slowest else usual_s


def deadline_s(durations_s: Sequence[float], k: float, first_deadline_s: float) -> float:
    """Return the seconds after which a late peer is no longer waited for, judged by past rounds: median + k * MAD
    (median absolute deviation). A few extreme rounds touch neither: one in which a machine hung stretches no deadline.

    Args:
        k: number of deviations above the median that are still normal.
        first_deadline_s: used while fewer than `MIN_ROUNDS` durations are known.
    """
    if len(durations_s) < MIN_ROUNDS:
        return first_deadline_s
    median_s = statistics.median(durations_s)
    mad_s = statistics.median(abs(duration_s - median_s) for duration_s in durations_s)
    return median_s + k * mad_s
