"""Who is lost, since when, over whom the work goes on, what it cost and when it is back: in words for the user.

    server_lost, lost -> "server 0@box2 (stage 0) has said nothing for 2.1 s ..."
      step_committed  -> "trainer 0 trains again after 2.9 s without a step (server 0@box2 lost)"
      found           -> "server 0@box2 is heard again after 14.0 s; it catches up"
      caught_up       -> "server 0@box2 has caught up ..."

Bookkeeping, no I/O. Times are monotonic seconds.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shoal.clock import Clock, utc_time_of_day
from shoal.ids import PeerId
from shoal.swarm.view import Replica
from shoal.transport.base import PeerLost

logger = logging.getLogger(__name__)

_NUM_STEPS = 64
"""So many steps of each slot are remembered, to see where it paused."""


@dataclass
class _Loss:
    """One process that is lost; `waiting` are the slots that have committed no step since."""

    name: str
    since_s: float
    noticed_s: float
    waiting: set[int]
    is_heard: bool = False


class LossNotices:
    """Follows what a client loses."""

    def __init__(self, *, clock: Clock, notice: Callable[[str], None], name_of: Callable[[PeerId], str]) -> None:
        """Begin with nothing lost.

        Args:
            notice: tells the user something that stays on the screen.
        """
        self._clock = clock
        self._notice = notice
        self._name_of = name_of
        self._ended: PeerLost | None = None
        self._servers: dict[PeerId, _Loss] = {}
        self._stalled: list[_Loss] = []
        self._steps_s: dict[int, deque[float]] = {}

    def connection_ended(self, lost: PeerLost) -> None:
        """Learn how a connection has ended; comes before anybody says what that means."""
        self._ended = lost

    def server_lost(self, replica: Replica, others: Sequence[Replica], slots: Collection[int]) -> None:
        """A server is lost.

        Args:
            others: the replicas that are left in its stage.
            slots: trainers whose steps ran over the server.
        """
        peer, name = replica.peer, f"{self._name_of(replica.peer)} (stage {replica.stage})"
        known = self._servers.get(peer)
        silent_s = self._silent_s(peer)
        if known is not None and not known.is_heard:
            return
        loss = self._begin(self._name_of(peer), silent_s, slots)
        loss.since_s = min(loss.since_s, loss.since_s if known is None else known.since_s)
        self._servers[peer] = loss
        names = [self._name_of(other.peer) for other in others]
        if not names:
            onwards = f"nobody else serves stage {replica.stage}"
        elif slots:
            onwards = f"its work goes on over {_list(names)}"
        else:
            onwards = f"no trainer's steps ran over it, {_list(names)} {'serve' if len(names) > 1 else 'serves'} on"
        logger.warning("server.lost", extra={"peer": peer, "stage": replica.stage, "silent_s": silent_s, "over": names})
        self._notice(f"{name} {self._how(silent_s)}; {onwards}")

    def lost(self, name: str, slots: Collection[int], peer: PeerId | None = None) -> None:
        """Another process is lost that its host starts again or replaces, as a trainer; these slots need it."""
        silent_s = 0.0 if peer is None else self._silent_s(peer)
        self._begin(name, silent_s, slots)
        if silent_s:
            logger.warning("role.silent", extra={"role": name, "silent_s": silent_s})
            self._notice(f"{name} {self._how(silent_s)}; another one takes its place")

    def step_committed(self, slot: int, at_s: float) -> None:
        """A slot has committed a step at that time."""
        steps_s = self._steps_s.setdefault(slot, deque(maxlen=_NUM_STEPS))
        steps_s.append(at_s)
        due = [loss for loss in self._stalled if slot in loss.waiting and at_s >= loss.noticed_s]
        for loss in due:
            loss.waiting.discard(slot)
        if not due:
            return
        self._stalled = [loss for loss in self._stalled if loss.waiting]
        paused_s = _longest_pause_s(steps_s, min(loss.since_s for loss in due))
        names = list(dict.fromkeys(loss.name for loss in due))
        logger.info("training.goes_on", extra={"slot": slot, "paused_s": round(paused_s, 3), "lost": names})
        self._notice(f"trainer {slot} trains again after {paused_s:.1f} s without a step ({_list(names)} lost)")

    def found(self, peer: PeerId) -> None:
        """There is a connection with a peer."""
        loss = self._servers.get(peer)
        if loss is None or loss.is_heard:
            return
        loss.is_heard = True
        logger.info("server.heard_again", extra={"peer": peer, "after_s": round(self._age_s(loss), 3)})
        self._notice(f"{loss.name} is heard again after {self._age_s(loss):.1f} s; it catches up")

    async def run(self, changed: Callable[[], Awaitable[None]], holders: Callable[[], Mapping[PeerId, int]]) -> None:
        """Say who has caught up, whenever a replica has said something, until cancelled."""
        while True:
            await changed()
            self.caught_up(holders())

    def caught_up(self, holders: Mapping[PeerId, int]) -> None:
        """These replicas hold the record that stands, and take part, with their stages."""
        for peer in [peer for peer, loss in self._servers.items() if loss.is_heard and peer in holders]:
            loss = self._servers.pop(peer)
            logger.info("server.back", extra={"peer": peer, "after_s": round(self._age_s(loss), 3)})
            self._notice(
                f"{loss.name} has caught up, {self._age_s(loss):.1f} s after it was heard last: "
                f"it serves stage {holders[peer]} again"
            )

    def _begin(self, name: str, silent_s: float, slots: Collection[int]) -> _Loss:
        now_s = self._clock.now_s()
        loss = _Loss(name, now_s - silent_s, now_s, set(slots))
        if slots:
            self._stalled.append(loss)
        return loss

    def _silent_s(self, peer: PeerId) -> float:
        """For how long nothing had been heard of a peer when its connection was given up; 0 if its end was told."""
        return self._ended.silent_s if self._ended is not None and self._ended.peer == peer else 0.0

    def _how(self, silent_s: float) -> str:
        if not silent_s:
            return "is gone: its connection has closed"
        since = utc_time_of_day(self._clock.unix_s() - silent_s)
        return f"has said nothing for {silent_s:.1f} s (since {since}), so it is frozen or cut off"

    def _age_s(self, loss: _Loss) -> float:
        return self._clock.now_s() - loss.since_s


def _longest_pause_s(steps_s: Collection[float], since_s: float) -> float:
    """Return the longest time without a step that has ended since: the first step may have come before the notice."""
    known_s = sorted((since_s, *steps_s)) if min(steps_s) > since_s else list(steps_s)
    return max((now_s - before_s for before_s, now_s in pairwise(known_s) if now_s > since_s), default=0.0)


def _list(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last
