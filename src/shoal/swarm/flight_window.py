"""How many microbatches of a step a trainer has in flight: more, where the way is long and replicas have room. Pure.

    near    stage 0   F0 F1 F2 B0 F3 B1 ..         the way is computing: `base` in flight keep every stage busy
    far     stage 0   F0 F1 F2 ~~~~~~ B0 F3 B1     the way is a line: who computes waits for it

A path *holds* as many microbatches as its slowest part does in the time that one is there and back. Both are measured
in every step, and are the same whatever is in flight: the shortest time from sending a microbatch to hearing that it
is done, and the usual time between two that are done one after the other. The window follows what a few steps in a row
say, and not before they say twice as many as `base`, or half of what it is. It is never above what each replica of the
path has said that it holds.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from itertools import pairwise

from shoal.ids import PeerId
from shoal.swarm.microbatch_cut import MAX_MICROBATCHES

_IN_A_ROW = 3
"""Steps that have to agree: one may have met an evaluation, or a busy machine."""
_SHORT_S = 0.01
"""A microbatch that is back so soon has crossed no line, and what is measured of it are turns of event loops."""


class FlightWindow:
    """Of one trainer.

    Args:
        base: microbatches that keep the stages of a path without lines busy; infinite: all of a step.
    """

    def __init__(self, base: float) -> None:
        self._base = self._wanted = base
        self._path: tuple[PeerId, ...] = ()
        self._rooms: dict[tuple[int, PeerId], int] = {}
        self._held = deque[int](maxlen=_IN_A_ROW)
        self._fed_s: list[float] = []
        self._done_s: dict[int, float] = {}

    def begin(self, path: tuple[PeerId, ...]) -> None:
        """An attempt over this path begins: of another one nothing is known."""
        if path != self._path:
            self._path, self._wanted = path, self._base
            self._held.clear()
        self._fed_s, self._done_s = [], {}

    def opened(self, peer: PeerId, room: int) -> None:
        """A replica of the path takes part; it holds so many microbatches of a step."""
        self._rooms[self._path.index(peer), peer] = room

    def lost(self, peer: PeerId) -> None:
        """What answers next as this peer may have less memory."""
        self._rooms = {place: room for place, room in self._rooms.items() if place[1] != peer}

    @property
    def size(self) -> float:
        """How many may be in flight now."""
        room = min((self._rooms.get(place, 0) for place in enumerate(self._path)), default=0)
        return max(self._base, min(self._wanted, room))

    def may_feed(self) -> bool:
        """Whether one more may be sent."""
        return len(self._fed_s) - len(self._done_s) < self.size

    def fed(self, now_s: float) -> None:
        """The next microbatch has been sent."""
        self._fed_s.append(now_s)

    def done(self, microbatch: int, now_s: float) -> None:
        """A microbatch is done, as the first replica says; of one that was not sent, or again, that means nothing."""
        if microbatch < len(self._fed_s):
            self._done_s.setdefault(microbatch, now_s)

    def trained(self) -> None:
        """All microbatches are done: decide for the next steps."""
        if len(self._fed_s) <= self._base or len(self._done_s) < len(self._fed_s):
            return  # all of them at once are not more than may be in flight anyway
        self._held.append(held(self._fed_s, [self._done_s[each] for each in range(len(self._fed_s))]))
        if len(self._held) < _IN_A_ROW:
            return
        least, most = min(self._held), max(self._held)
        if least >= 2 * self._base and least > self._wanted:
            self._wanted = least
        elif most <= max(self._base, self._wanted / 2):
            self._wanted = most if most >= 2 * self._base else self._base


def held(fed_s: Sequence[float], done_s: Sequence[float]) -> int:
    """Return how many microbatches the path of a step holds, one at least, from when each was sent and was done."""
    flight_s = min(done - fed for fed, done in zip(fed_s, done_s, strict=True))
    if flight_s < _SHORT_S or len(done_s) < 2:
        return 1
    # Where a window is too small there are gaps as long as the line between those that were sent together: fewer.
    turn_s = statistics.median_low(later - earlier for earlier, later in pairwise(done_s))
    most = MAX_MICROBATCHES - 1
    return 1 + (most if turn_s * most <= flight_s else math.ceil(flight_s / turn_s))
