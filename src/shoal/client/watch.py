"""Corrects the client's view by what its connections show, and notes who is lost, heard again and back, and who comes.

It hears of a loss before all handlers of the endpoint, while they still know who is lost; nothing depends on the order
in which these hear it.

PeerLost --> the ledger: who, since when, whose steps it hits --> the view: not there any more
        '--> trainers, coordinator, moves, ... each by its `peer_lost`
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.counters import ask_again
from shoal.client.homes import Homes
from shoal.client.ledger import Ledger
from shoal.client.reassignment import Reassignment
from shoal.clock import Clock, utc_time_of_day
from shoal.control.membership import Membership
from shoal.events.incidents import REPORTED, TroubleOver
from shoal.events.links import ServerCame
from shoal.events.losses import (
    DataServerLost,
    LossFound,
    ServerBack,
    ServerHeard,
    ServerLeaving,
    ServerLost,
    TrainerLost,
)
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import LostProcess
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.transport.base import Endpoint, PeerLost
from shoal.wire.messages.control import Heartbeat

NOTICED_S = 3.0
"""So long after a process has ended an earlier start of the client may have noticed it, on a busy host."""
BEFORE_CLIENT_S = 3.0
"""What broke so shortly before the client, it may not have noticed any more."""


@dataclass(kw_only=True, eq=False, repr=False)
class Watch:
    """Hears of each loss before the handlers do, and of each new connection.

    Attributes:
        homes: say which slots a lost replica hits.
        reassignment: says who is on its way to another stage; it then ends its connections but is not lost.
        host: what people call this one.
    """

    endpoint: Endpoint
    membership: Membership
    trainers: TrainerSlots
    homes: Homes
    reassignment: Reassignment
    data_server: PeerId
    ledger: Ledger
    clock: Clock
    host: str = ""
    _present: set[PeerId] = field(default_factory=set[PeerId])

    def __post_init__(self) -> None:
        self._incidents = self.ledger.totals.incidents
        has_begun = bool(self.ledger.earlier) or self.ledger.totals.rounds > 0
        self._rounds_before = self.ledger.totals.rounds if has_begun else None

    @property
    def _knows_all(self) -> bool:
        """Whether who was there when training began has said so: to a client that is started again, by the record."""
        totals = self.ledger.totals
        if self._rounds_before is None:
            return totals.progress.first_step_at_s is not None
        return totals.rounds > self._rounds_before

    def lost(self, loss: PeerLost) -> None:
        """A connection has ended, which beats whatever the registry says."""
        peer = loss.peer
        silent_s, still_s = loss.silent_s, loss.still_s
        since = utc_time_of_day(self.clock.unix_s() - max(silent_s, still_s))
        if peer == self.data_server and not self._incidents.is_away("data_server", ""):
            slots = tuple(self.trainers.present)
            self.ledger.note(DataServerLost(slots, self.ledger.now_s(), silent_s, since, self.host, still_s))
        if (slot := self.trainers.slot_of(peer)) is not None:
            self.ledger.note(TrainerLost(slot, silent_s, since, self.ledger.now_s(), self.host, still_s))
        server = self.membership.view.replica(peer)
        # The registry may have forgotten one that leaves already.
        stage = self._incidents.stage_left_by(peer) if server is None else server.stage
        # One that the registry names again, and that still cannot be reached, is lost once.
        if stage is not None and not self.reassignment.is_moving(peer) and not self._incidents.is_missing(peer):
            self.ledger.note(self._server_lost(loss, stage, since))
        elif server is None:
            # It reports no more that this is over; of a server the loss itself says so.
            for cause in REPORTED:
                if peer in self._incidents.troubled(cause):
                    self.ledger.note(TroubleOver(cause, peer, self.ledger.now_s()))
        self.membership.lost(peer)
        if server is not None:
            # Once: this process may only have been frozen itself. Without a connection the view ignores the server
            # until its next announcement, seconds later.
            self.endpoint.post(peer, Heartbeat())

    def leaves(self, peer: PeerId, stage: int) -> None:
        """A server has said that it leaves."""
        host = self.membership.view.host_of(peer)
        self.ledger.note(ServerLeaving(peer, self.membership.view.name_of(peer), host, stage, self.ledger.now_s()))

    def processes_ended(self, told: Sequence[LostProcess], slots: tuple[int, ...]) -> None:
        """Note which processes of this host have ended while no client was there, or shortly before.

        Args:
            told: by the launcher, also of what an earlier start has noted. One that ended at once has noted nothing.
            slots: of the round in which the client was.
        """
        unknown = self._incidents.unknown([self._found(lost, slots) for lost in told], NOTICED_S)
        since_s = min((loss.at_s for loss in unknown if loss.kind == "client"), default=math.inf) - BEFORE_CLIENT_S
        for loss in unknown:
            if loss.at_s >= since_s:
                self.ledger.note(loss)

    def _found(self, lost: LostProcess, slots: tuple[int, ...]) -> LossFound:
        who = f"the {lost.role.replace('_', ' ')}"
        if lost.role == "trainer":
            who, slots = f"trainer {lost.index}", (lost.index,)
        if lost.peer is not None:
            who, slots = self.membership.view.name_of(lost.peer), tuple(self.homes.slots_of(lost.peer))
        return LossFound(lost.role, who, slots, lost.at_s, self.ledger.now_s(), lost.peer or PeerId(""), self.host)

    def found(self, peer: PeerId) -> None:
        """There is a connection with a peer."""
        if self._incidents.is_missing(peer):
            self.ledger.note(ServerHeard(peer, self.membership.view.name_of(peer), self._away_s(peer)))
            # What it has counted tells what had happened to it.
            ask_again(self.endpoint, peer)

    async def run(self, coordinator: RoundCoordinator) -> None:
        """Note who has caught up, whenever a replica has said something, until cancelled."""
        while True:
            await coordinator.changed()
            self.caught_up(coordinator.holders or {})

    def caught_up(self, holders: Mapping[PeerId, int]) -> None:
        """These replicas hold the record that stands, and take part, with their stages."""
        if self._present and self._knows_all:
            for peer in holders.keys() - self._present:
                self.ledger.note(ServerCame(peer, self.membership.view.name_of(peer), holders[peer]))
        self._present |= holders.keys()
        for peer in self._incidents.returning() & holders.keys():
            away_s = self._away_s(peer)
            self.ledger.note(
                ServerBack(peer, self.membership.view.name_of(peer), holders[peer], away_s, self.ledger.now_s())
            )

    def _server_lost(self, loss: PeerLost, stage: int, since: str) -> ServerLost:
        peer = loss.peer
        others = [other for other in self.membership.view.by_stage(stage) if other.peer != peer]
        return ServerLost(
            peer=peer,
            who=self.membership.view.name_of(peer),
            stage=stage,
            silent_s=loss.silent_s,
            since=since,
            still_s=loss.still_s,
            over=tuple(self.membership.view.name_of(other.peer) for other in others),
            slots=tuple(self.homes.slots_of(peer)),
            at_s=self.ledger.now_s(),
            host=self.membership.view.host_of(peer),
        )

    def _away_s(self, peer: PeerId) -> float:
        return round(self.ledger.now_s() - self._incidents.began_s(peer), 3)
