"""When a silent connection gets a heartbeat and when it counts as dead: decided at the ticks of one timer.

Silence is added up tick by tick, and one tick counts for at most `MAX_TICKS_AT_ONCE` intervals: a process that was
itself stopped or blocked has not listened meanwhile, so that time proves nothing about its peers. Between two ticks the
event loop reads what has arrived; a peer that is alive has therefore been heard before enough ticks come together.

How much silence is too much is learnt for each peer (`Rhythm`), between two bounds. Only the receipt of bytes counts as
a sign of life, and it is the event loop that sends heartbeats: a peer that computes for a minute is not silent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from shoal.errors import InvariantViolation

MAX_TICKS_AT_ONCE = 2
"""A tick that comes later than so many intervals counts as if it had come then."""
LEAST_HEARTBEATS: Final = 2 * MAX_TICKS_AT_ONCE
"""Within a deadline: one that is late has to have room."""
K: Final = 8.0
"""Deviations above the median; of normally distributed gaps this is more than five standard deviations."""
WINDOW_TICKS: Final = 120
"""What was longer ago is forgotten: half a minute of usual heartbeats."""
MIN_TICKS: Final = 40
"""Until so much is known, `least_s` is the deadline."""

_Link = TypeVar("_Link", bound=Hashable)


class Activity(NamedTuple):
    """What happened on a connection since the tick before.

    Attributes:
        heard: bytes were received.
        spoke: bytes were sent.
        listening: this side reads; while it does not, it cannot hear the peer.
        peer: the other end; what is known of it outlasts the connection.
        is_waited_for: whether a step or a round may wait for either end; else heartbeats are as seldom as the deadline
            allows.
    """

    heard: bool
    spoke: bool
    listening: bool = True
    peer: Hashable = None
    is_waited_for: bool = True


@dataclass(frozen=True, slots=True)
class Pulse(Generic[_Link]):
    """What to do after a tick: send heartbeats on `idle`, close `dead` (with the seconds of silence)."""

    idle: tuple[_Link, ...]
    dead: tuple[tuple[_Link, float], ...]


class Rhythm:
    """How regularly one peer gives signs of life, over all its connections, and so how long a silence means nothing.

        deadline = median + K * MAD of the gaps between signs of life, within [least_s, most_s]

    Each gap counts for as long as it lasted. Counted one by one, the many short gaps of a peer that is heard in bursts
    would hide the long ones, in which most of its time passes. Half a tick is the least deviation, since gaps are
    measured in ticks. On a regular link the estimate lies far below `least_s`, which is then the deadline; it is longer
    for a peer that computes on a starved machine, or whose link delivers in bursts, and never longer than `most_s`,
    whatever the peer does to look irregular.
    """

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


class Liveness(Generic[_Link]):
    """Watches over all connections of one endpoint."""

    def __init__(
        self, *, heartbeat_s: float, deadline_s: float, now_s: float, max_deadline_s: float | None = None
    ) -> None:
        """Start at monotonic time `now_s`.

        Args:
            heartbeat_s: interval of the ticks; a connection that sent nothing for one interval sends a heartbeat.
            deadline_s: a peer that is heard regularly counts as dead after this silence.
            max_deadline_s: the same for the most irregular peer; None: `deadline_s` for all peers.

        Raises:
            InvariantViolation: the deadline leaves no room for a heartbeat that is late, or is above the longest one.
        """
        if deadline_s < LEAST_HEARTBEATS * heartbeat_s:
            raise InvariantViolation(
                f"a deadline of {deadline_s:g} s is less than {LEAST_HEARTBEATS} heartbeats of {heartbeat_s:g} s"
            )
        if max_deadline_s is not None and max_deadline_s < deadline_s:
            raise InvariantViolation(f"a longest deadline of {max_deadline_s:g} s is below that of {deadline_s:g} s")
        self._heartbeat_s = heartbeat_s
        # Ticks are never quite in time: half of one is as good as a whole one.
        self._seldom_s = deadline_s / LEAST_HEARTBEATS - heartbeat_s / 2
        self._deadline_s = deadline_s
        self._max_deadline_s = deadline_s if max_deadline_s is None else max_deadline_s
        self._last_tick_s = now_s
        self._silent_s: dict[_Link, float] = {}
        self._unsaid_s: dict[_Link, float] = {}
        self._rhythms: dict[Hashable, Rhythm] = {}

    def tick(self, now_s: float, activity: Mapping[_Link, Activity]) -> Pulse[_Link]:
        """Decide at monotonic time `now_s`, given all connections that stand and what happened on them."""
        passed_s = max(0.0, now_s - self._last_tick_s)
        elapsed_s = min(passed_s, MAX_TICKS_AT_ONCE * self._heartbeat_s)
        self._last_tick_s = now_s
        before, self._silent_s = self._silent_s, {}
        unsaid_before, self._unsaid_s = self._unsaid_s, {}
        idle: list[_Link] = []
        dead: list[tuple[_Link, float]] = []
        for link, now in activity.items():
            # A connection that was not there at the tick before starts from zero, whatever the interval.
            gap_s = before[link] + elapsed_s if link in before and now.listening else 0.0
            silent_s = 0.0 if now.heard else gap_s
            is_dead = silent_s >= self._deadline_s and silent_s >= self._rhythm(now.peer).deadline_s
            if gap_s and (now.heard or is_dead):
                self._rhythm(now.peer).heard_after(gap_s)
            if is_dead:
                dead.append((link, silent_s))
                continue
            self._silent_s[link] = silent_s
            if now.spoke:
                continue
            # What this side says is late if its ticks are, so that time counts in full.
            unsaid_s = unsaid_before.get(link, 0.0) + passed_s
            if now.is_waited_for or unsaid_s >= self._seldom_s:
                idle.append(link)
            else:
                self._unsaid_s[link] = unsaid_s
        return Pulse(tuple(idle), tuple(dead))

    def _rhythm(self, peer: Hashable) -> Rhythm:
        if peer not in self._rhythms:
            self._rhythms[peer] = Rhythm(self._heartbeat_s, self._deadline_s, self._max_deadline_s)
        return self._rhythms[peer]
