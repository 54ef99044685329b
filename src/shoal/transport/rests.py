"""For how long a connection rests after what it has sent took long to read, so that others are heard. Decisions only.

Small messages take a hundred times as long as the same bytes of tensors. Of one that sends them without end the loop
reads for half of its time; of many that do, for half of its time in all: of n of them each has a 2n-th part. Who has
sent little of the kind for a while has credit, and does not rest: a peer is not slowed down for what others do.
"""

from __future__ import annotations

from typing import Final

_MOST_CREDIT_S: Final = 0.1


class Rests:
    """What the connections of an endpoint have in common.

    Attributes:
        num_resting: connections that are not read at this moment because it took long.
    """

    def __init__(self) -> None:
        self.num_resting = 0


class Pace:
    """Of one connection."""

    def __init__(self, rests: Rests, now_s: float) -> None:
        """Begin without credit: who comes under many names has none for each."""
        self._rests = rests
        self._credit_s = 0.0
        self._since_s = now_s

    def begin(self, took_s: float, now_s: float) -> float:
        """Return for how long to rest after a reading that took so long; unless that is 0, `end` follows."""
        num_resting = self._rests.num_resting + 1
        earned_s = (now_s - self._since_s) / (2 * num_resting)
        self._credit_s = min(_MOST_CREDIT_S, self._credit_s + earned_s) - took_s
        self._since_s = now_s
        if self._credit_s >= 0.0:
            return 0.0
        self._rests.num_resting = num_resting
        return -self._credit_s * (2 * num_resting - 1)

    def end(self) -> None:
        """It rests no more."""
        self._rests.num_resting -= 1
