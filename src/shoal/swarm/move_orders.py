"""The coordinator's part in moving servers: a pure machine that orders one move at a time and follows it.

    none --a stage has nobody, or a record--> ordered --Moving--> on its way --holds the record there--> none
      ^    or nothing is trained yet             |                    |
      '--- refused, dead, silent, too slow ------+--------------------'

Whoever was killed may be back the moment after another one was sent in its place, and take its stage again, which has
one too many then. So who has filled a gap is sent on at once where that helps.

Who goes where is `placement.improve`'s decision. A mover that another coordinator has sent is recognised by what it
says itself (`Moving` is said again to whoever takes a ballot), so a successor does not send a second one.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shoal.ids import PeerId
from shoal.swarm.placement import StageMove, improve
from shoal.swarm.view import SwarmView
from shoal.wire.messages.round import Moving


@dataclass(frozen=True, slots=True)
class MoveSettings:
    """How patient the machine is.

    Attributes:
        patience_s: how long a stage may have no server before one is sent there. A move costs the donor's share of the
            round, and a broken connection is back after a round trip, so the patience covers that. It does not cover a
            restarted process: starting, entering the DHT and choosing a stage take several seconds, in which the whole
            swarm would stand still. If that process comes back later, it takes the place that the mover has left.
        retry_s: pause before an order without an answer is sent again.
        silence_s: a mover that cannot be reached is forgotten after this time.
        timeout_s: a mover that has not arrived is forgotten after this time.
        rest_rounds: records between two moves of the same server, unless a stage has none.
        return_s: who has filled a gap is sent on, in the middle of a round, within this time of its arrival: those for
            whom it was sent may have come back meanwhile, and it has trained next to nothing since.
    """

    patience_s: float = 1.0
    retry_s: float = 0.5
    silence_s: float = 10.0
    timeout_s: float = 120.0
    rest_rounds: int = 3
    return_s: float = 10.0


class MoveEnd(enum.StrEnum):
    """How a move has ended."""

    ARRIVED = "arrived"
    REFUSED = "refused"
    CAME_BACK = "came back"
    LOST = "lost"
    TOO_SLOW = "too slow"


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Send the order to the server."""

    move: StageMove


@dataclass(frozen=True, slots=True)
class Begun:
    """A move has been ordered."""

    move: StageMove


@dataclass(frozen=True, slots=True)
class Ended:
    """It is over; with the reason where the server gave one."""

    move: StageMove
    how: MoveEnd
    reason: str = ""


MoveEffect = SendOrder | Begun | Ended


class MoveOrders:
    """The machine of one coordinator."""

    def __init__(self, num_stages: int, settings: MoveSettings | None = None) -> None:
        self.under_way: StageMove | None = None
        self._num_stages = num_stages
        self._settings = settings or MoveSettings()
        self._answered = self._was_lost = False
        self._begun_s = self._seen_s = self._repeat_at_s = 0.0
        self._gap_since_s: float | None = None
        self._filled: tuple[PeerId, float] | None = None  # who has filled a gap in this round, and until when it may go
        self._round = 0
        self._known: Mapping[PeerId, int] = {}
        self._rests_until: dict[PeerId, int] = {}
        self._refused: dict[PeerId, int] = {}
        self._unmoved: set[PeerId] = set()

    def stage_of(self, peer: PeerId, stage: int) -> int | None:
        """The stage for which a replica that is known to hold `stage` may be used; None while it is on its way."""
        move = self.under_way
        return None if move is not None and move.peer == peer and move.stage != stage else stage

    @property
    def wake_at_s(self) -> float:
        """When to call `update` at the latest; infinite if nothing waits for time."""
        if self.under_way is not None:
            ends_s = min(self._seen_s + self._settings.silence_s, self._begun_s + self._settings.timeout_s)
            return ends_s if self._answered else min(ends_s, self._repeat_at_s)
        return math.inf if self._gap_since_s is None else self._gap_since_s + self._settings.patience_s

    # -- events

    def recorded(self, view: SwarmView, holders: Mapping[PeerId, int], round: int, now_s: float) -> list[MoveEffect]:
        """A record has been committed and no round is trained, so a donor's move costs no work.

        Args:
            view: the servers, at the stages that they serve now.
            holders: the replicas that hold the record, with their stages.
        """
        self._round, self._filled = round, None
        effects = self.update(view, holders, holders, now_s)
        if self.under_way is None:
            resting = {peer for peer, until in self._rests_until.items() if until > round}
            effects += self._order(view, holders, resting, now_s)
        return effects

    def placed(self, view: SwarmView, holders: Mapping[PeerId, int], now_s: float) -> list[MoveEffect]:
        """Training has not begun: correct where servers stand. If no move is under way then, they stand well.

        Args:
            view: the servers, at the stages that they serve now.
            holders: the replicas that can be reached, with their stages.
        """
        if self.under_way is not None:
            return []
        move = improve(view, self._num_stages, holders, self._unmoved, trains=False)
        return [] if move is None else self._ordered(move, now_s)

    def update(
        self, view: SwarmView, holders: Mapping[PeerId, int], known: Mapping[PeerId, int], now_s: float
    ) -> list[MoveEffect]:
        """Follow the move that is under way, or fill a stage that has no server.

        Args:
            view: the servers, at the stages that they serve now.
            holders: the replicas that hold the record that stands, with their stages.
            known: the stage that each replica has named on its present connection.
        """
        self._known = known
        effects = self._follow(holders, known, now_s)
        if not view.missing_stages(self._num_stages):
            self._gap_since_s = None
        elif self._gap_since_s is None:
            self._gap_since_s = now_s
        elif self.under_way is None and now_s >= self._gap_since_s + self._settings.patience_s:
            effects += self._order(view, holders, (), now_s, only_urgent=True)
            self._gap_since_s = now_s  # if nobody can go now, it is tried again later
        if self.under_way is None and self._filled is not None and not view.missing_stages(self._num_stages):
            effects += self._send_on(self._filled, view, holders, now_s)
        return effects

    def receive(self, peer: PeerId, message: Moving, now_s: float) -> list[MoveEffect]:
        """A server has said under this client's ballot that it goes to a stage, or why it does not."""
        move, stage, refused = self.under_way, message.stage, message.refused
        if move is None and not refused:
            if self._known.get(peer) == stage or self._refused.get(peer) == self._round:
                return []  # a late repetition, of what was said before it arrived or refused
            # Sent by an earlier coordinator; where it comes from does not matter any more.
            self._begin(StageMove(peer, stage, stage, False), now_s)
            self._answered = True
            return []
        if move is None or move.peer != peer or move.stage != stage:
            return []
        if refused:
            self._refused[peer] = self._round
            return [self._end(move, MoveEnd.REFUSED, refused)]
        self._answered, self._seen_s = True, now_s
        return []

    def lost(self, peer: PeerId) -> None:
        """The connection to a peer has ended, as it does once in every move."""
        if self.under_way is not None and self.under_way.peer == peer:
            self._was_lost = True

    # -- parts

    def _order(
        self,
        view: SwarmView,
        holders: Mapping[PeerId, int],
        resting: Collection[PeerId],
        now_s: float,
        only_urgent: bool = False,
    ) -> list[MoveEffect]:
        exempt = {*resting, *(peer for peer, round in self._refused.items() if round == self._round)}
        move = improve(view, self._num_stages, holders, exempt, trains=True)
        if move is None or (only_urgent and not move.urgent):
            return []
        return self._ordered(move, now_s)

    def _send_on(
        self, filled: tuple[PeerId, float], view: SwarmView, holders: Mapping[PeerId, int], now_s: float
    ) -> list[MoveEffect]:
        """Who has filled a gap leaves again where it is not needed any more; what others have trained stays."""
        peer, until_s = filled
        if now_s >= until_s:
            self._filled = None
            return []
        others = {replica.peer for replica in view.replicas} - {peer}
        move = improve(view, self._num_stages, holders, others, trains=True)
        if move is None:
            return []
        self._filled = None  # once: it may refuse
        return self._ordered(move, now_s)

    def _ordered(self, move: StageMove, now_s: float) -> list[MoveEffect]:
        self._begin(move, now_s)
        return [Begun(move), SendOrder(move)]

    def _begin(self, move: StageMove, now_s: float) -> None:
        self.under_way = move
        self._answered = self._was_lost = False
        self._begun_s = self._seen_s = now_s
        self._repeat_at_s = now_s + self._settings.retry_s

    def _follow(self, holders: Mapping[PeerId, int], known: Mapping[PeerId, int], now_s: float) -> list[MoveEffect]:
        move = self.under_way
        if move is None:
            return []
        if holders.get(move.peer) == move.stage:
            self._filled = (move.peer, now_s + self._settings.return_s) if move.urgent else None
            return [self._end(move, MoveEnd.ARRIVED)]
        if move.peer in known:
            self._seen_s = now_s
            if self._was_lost and known[move.peer] != move.stage:
                return [self._end(move, MoveEnd.CAME_BACK)]
        if now_s >= self._seen_s + self._settings.silence_s:
            return [self._end(move, MoveEnd.LOST)]
        if now_s >= self._begun_s + self._settings.timeout_s:
            return [self._end(move, MoveEnd.TOO_SLOW)]
        if not self._answered and now_s >= self._repeat_at_s:
            self._repeat_at_s = now_s + self._settings.retry_s
            return [SendOrder(move)]
        return []

    def _end(self, move: StageMove, how: MoveEnd, reason: str = "") -> Ended:
        self.under_way = None
        self._rests_until[move.peer] = self._round + self._settings.rest_rounds
        if how is not MoveEnd.ARRIVED:
            self._unmoved.add(move.peer)
        return Ended(move, how, reason)
