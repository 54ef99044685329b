"""How often the registry is read, and how many are asked. Pure: pauses are counted, no clock is read.

A search asks everybody near and costs them and this one some 25 ms of a core in all, so an idle swarm should do it
seldom, and ask a few of those who hold the records as long as nothing happens:

    somebody waits for others to appear:  0.1 s, and 5 % of the time already waited, up to 5 s
    else:                                 2 s after a change, and a quarter of the time without one, up to 15 s

    a search:         for 15 s since somebody began to wait or something changed, and when something seems to expire,
                      3 s before and then
    else:             of each record's holders two, and every two minutes all

What is lost is noticed by its connection, and what expires at its time: neither waits for the next read.
"""

from __future__ import annotations

import math

from shoal.control.record_holders import REPLICAS, SOME

FAST_READ_S, MAX_FAST_READ_S = 0.1, 5.0
SLOW_READ_S, MAX_SLOW_READ_S = 2.0, 15.0
"""The longest is half of a record's time to live, in which it is renewed three times."""
SEARCH_FOR_S, ALL_EVERY_S = 15.0, 120.0
SEARCH_AHEAD_S = 3.0
"""Who is alive has renewed its record by then, and a search may take a second."""
_FAST_SHARE, _SLOW_SHARE = 0.05, 0.25


class ReadPace:
    """Chooses the pause after each read.

    Attributes:
        holders: how many holders of each record the next read asks; None: everybody who may be one.
    """

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._quiet_s = 0.0
        self._since_all_s = 0.0
        self.holders: int | None = None

    def pause_s(self, *, awaited: bool, changed: bool, expires_in_s: float = math.inf) -> float:
        """Return how long to pause now.

        Args:
            awaited: a caller waits for a change that only the registry can tell.
            changed: the view has changed since the last call.
            expires_in_s: until the next record expires, unless it is renewed.
        """
        if changed:
            self._quiet_s = 0.0
        if awaited:
            pause_s = min(MAX_FAST_READ_S, FAST_READ_S + _FAST_SHARE * self._waited_s)
            self._waited_s += pause_s
        else:
            self._waited_s = 0.0
            pause_s = min(MAX_SLOW_READ_S, SLOW_READ_S + _SLOW_SHARE * self._quiet_s)
        self._quiet_s += pause_s
        calm_s = min(self._quiet_s, self._waited_s) if awaited else self._quiet_s
        self._since_all_s += pause_s
        self.holders = SOME
        seems_to_expire = expires_in_s <= pause_s + SEARCH_AHEAD_S
        if calm_s <= SEARCH_FOR_S or seems_to_expire:
            self.holders = None
        elif self._since_all_s >= ALL_EVERY_S:
            self.holders = REPLICAS
        if self.holders != SOME:
            self._since_all_s = 0.0
        if seems_to_expire:
            pause_s = min(pause_s, expires_in_s if expires_in_s <= SEARCH_AHEAD_S else expires_in_s - SEARCH_AHEAD_S)
        return max(0.0, pause_s)
