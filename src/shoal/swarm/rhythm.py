"""How regularly a peer gives signs of life, and so for how long its silence means nothing: a pure estimate.

    deadline = median + K * MAD of the gaps between signs of life, within [least_s, most_s]

Each gap counts for as long as it lasted. Counted one by one, the many short gaps of a peer that is heard in bursts
would hide the long ones, in which most of its time passes. Half a tick is the least deviation, since gaps are measured
in ticks. On a regular link the estimate lies far below `least_s`, which is then the deadline; it is longer for a peer
that computes on a starved machine, or whose link delivers in bursts, and never longer than `most_s`, whatever the peer
does to look irregular.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

K: Final = 8.0
"""Deviations above the median; of normally distributed gaps this is more than five standard deviations."""
WINDOW_TICKS: Final = 120
"""What was longer ago is forgotten: half a minute of usual heartbeats."""
MIN_TICKS: Final = 40
"""Until so much is known, `least_s` is the deadline."""


class Rhythm:
    """The last gaps of one peer, over all its connections."""

    def __init__(self, tick_s: float, least_s: float, most_s: float) -> None:
        """Know nothing yet.

        Args:
            tick_s: how often silence is looked at; heartbeats come as often.
            least_s: deadline of a regular peer.
            most_s: deadline of the most irregular peer, at least `least_s`.
        """
        self._tick_s = tick_s
        self._least_s = least_s
        self._most_s = most_s
        self._gaps_s: deque[float] = deque()
        self._total_s = 0.0

    def heard_after(self, gap_s: float) -> None:
        """Note that the peer was heard, or given up, so many seconds after the sign of life before."""
        self._gaps_s.append(gap_s)
        self._total_s += gap_s
        while self._total_s - self._gaps_s[0] > WINDOW_TICKS * self._tick_s:
            self._total_s -= self._gaps_s.popleft()

    @property
    def deadline_s(self) -> float:
        """Seconds of silence after which the peer counts as dead."""
        if self._total_s < MIN_TICKS * self._tick_s:
            return self._least_s
        median_s = _median((gap_s, gap_s) for gap_s in self._gaps_s)
        deviation_s = _median((abs(gap_s - median_s), gap_s) for gap_s in self._gaps_s)
        usual_s = median_s + K * max(deviation_s, self._tick_s / 2)
        return min(max(usual_s, self._least_s), self._most_s)


def _median(weighted: Iterable[tuple[float, float]]) -> float:
    """Return the value up to which half of the weight of (value, weight) lies; there is at least one weight."""
    ordered = sorted(weighted)
    half = sum(weight for _, weight in ordered) / 2
    for value, weight in ordered:
        half -= weight
        if half <= 0:
            return value
    return ordered[-1][0]
