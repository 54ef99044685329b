"""How long a boundary may take, judged by past rounds: median + k * MAD (median absolute deviation).

Both are untouched by a few extreme rounds, so one round in which a machine hung does not stretch the next deadlines.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

MIN_ROUNDS = 3
"""Before this many rounds are known, the configured first deadline holds."""
_DEVIATIONS = 8.0
_SLOWER_IS_NORMAL = 1.5
"""A boundary deadline is never closer than this factor above the median: very even rounds have almost no deviation."""


def boundary_s(durations_s: Sequence[float], first_deadline_s: float) -> float:
    """Seconds after which the trainers of a round are not waited for any more; arguments as for `deadline_s`."""
    usual_s = deadline_s(durations_s, _DEVIATIONS, first_deadline_s)
    slowest = sorted(durations_s)
    return max(usual_s, _SLOWER_IS_NORMAL * slowest[len(slowest) // 2]) if slowest else usual_s


def deadline_s(durations_s: Sequence[float], k: float, first_deadline_s: float) -> float:
    """Return the seconds after which a late peer is no longer waited for.

    Args:
        k: number of deviations above the median that are still normal.
        first_deadline_s: used while fewer than `MIN_ROUNDS` durations are known.
    """
    if len(durations_s) < MIN_ROUNDS:
        return first_deadline_s
    median_s = statistics.median(durations_s)
    mad_s = statistics.median(abs(duration_s - median_s) for duration_s in durations_s)
    return median_s + k * mad_s
