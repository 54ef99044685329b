"""Sends servers to the stages that need them: connects `swarm.move_orders` with the round's coordinator and the view.

    view, coordinator --> MoveOrders --> Move to the server, repeated --> Moving --> a holder of the new stage

The registry says seconds later where a server is. So the view that this client acts on is corrected: by what each
replica says itself to the coordinator, and by what was ordered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field

import anyio

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.ledger import Ledger
from shoal.clock import Clock
from shoal.control.membership import Membership
from shoal.events.stages import MoveEnded, MoveFailed, MoveOrdered
from shoal.ids import PeerId
from shoal.runtime.waking import Signal, pass_on
from shoal.swarm.move_orders import Begun, Ended, MoveEffect, MoveEnd, MoveOrders, SendOrder
from shoal.swarm.placement import StageMove
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.round import Move, Moving


@dataclass(kw_only=True, eq=False, repr=False)
class Reassignment:
    """Orders moves. A `transport.dispatch.Handler`.

    Attributes:
        coordinator: servers are sent under its ballot.
        moved: notified when it has changed who may be used, or servers stand where they should.
        is_placing: servers are being sent to the stages where they should stand at first.
    """

    endpoint: Endpoint
    coordinator: RoundCoordinator
    membership: Membership
    clock: Clock
    num_stages: InitVar[int]
    ledger: Ledger
    _holders: Mapping[PeerId, int] = field(default_factory=dict[PeerId, int])
    moved: Signal = field(default_factory=Signal, init=False)
    _wake: Signal = field(default_factory=Signal)
    is_placing: bool = field(default=False, init=False)

    def __post_init__(self, num_stages: int) -> None:
        self._machine = MoveOrders(num_stages)

    def is_moving(self, peer: PeerId) -> bool:
        """Whether a server is on its way, so that it ends its connections by itself."""
        move = self._machine.under_way
        return move is not None and move.peer == peer

    def usable(self, view: SwarmView, holders: Mapping[PeerId, int]) -> SwarmView:
        """Return the view with only those replicas that may be used, at the stages that they serve.

        Args:
            holders: the replicas that hold the record that stands, with their stages.
        """
        stages = {
            peer: stage for peer, held in holders.items() if (stage := self._machine.stage_of(peer, held)) is not None
        }
        return view.without([replica.peer for replica in view.replicas if replica.peer not in stages]).placed(stages)

    # -- events

    def receive(self, event: Received) -> bool:
        """Take what servers say about their moves."""
        message = event.message
        if not isinstance(message, Moving):
            return False
        if message.ballot == self.coordinator.ballot:
            self._do(self._machine.receive(event.peer, message, self.clock.now_s()))
            self._wake.notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        self._machine.lost(peer)

    # -- orders

    def recorded(self, holders: Mapping[PeerId, int], round: int) -> None:
        """A record has been committed, and the next round has not begun: see whether a server is better off elsewhere.

        Args:
            holders: the replicas that hold the record, with their stages.
        """
        self._holders = holders
        self._do(self._machine.recorded(self._view(), holders, round, self.clock.now_s()))
        self._wake.notify()

    def place(self) -> None:
        """Before the first round, which this client leads: have servers stand where they should.

        Those that have started together could not all see each other when they chose (`swarm.placement`).
        """
        self.is_placing = True
        self._wake.notify()

    async def run(self) -> None:
        """Follow the moves that were ordered, and fill stages that have no server, until cancelled."""
        async with anyio.create_task_group() as tasks:
            for changed in (self.membership.changed, self.coordinator.changed):
                tasks.start_soon(pass_on, changed, self._wake)
            while True:
                woken = self._wake.coming
                before = self._machine.under_way
                self._look()
                if self._machine.under_way != before:
                    self.moved.notify()
                with anyio.move_on_after(self._machine.wake_at_s - self.clock.now_s()):
                    await woken.wait()

    def _look(self) -> None:
        if not self.coordinator.leads:
            return
        now = self.coordinator.holders
        if now is not None:
            self._holders = now
        known = self.coordinator.stages
        if not self._holders and self.coordinator.round == 1:
            self._holders = known  # before the first record everyone has what it takes to begin
        # While the coordinator asks who holds what, those that held it and can be reached are who may be sent.
        holders = {peer: stage for peer, stage in self._holders.items() if known.get(peer) == stage}
        self._do(self._machine.update(self._view(), holders, known, self.clock.now_s()))
        # Only who has said what it holds can be sent; who cannot be reached leaves the view.
        if self.is_placing and now is not None and all(r.peer in known for r in self.membership.view.replicas):
            self._do(self._machine.placed(self._view(), holders, self.clock.now_s()))
            if self._machine.under_way is None:
                self.is_placing = False
                self.moved.notify()

    def _view(self) -> SwarmView:
        return self.membership.view.placed(self.coordinator.stages)

    def _do(self, effects: Sequence[MoveEffect]) -> None:
        for effect in effects:
            move = effect.move
            places = move.peer, self.membership.view.name_of(move.peer), move.origin, move.stage
            match effect:
                case SendOrder():
                    order = Move(self.coordinator.ballot, self.coordinator.round, move.stage, move.urgent)
                    self.endpoint.post(move.peer, order)
                case Begun():
                    self.ledger.note(MoveOrdered(*places, move.urgent, _reason(move, self.is_placing)))
                case Ended(_, MoveEnd.ARRIVED):
                    self.ledger.note(MoveEnded(*places))
                case Ended(_, how, reason):
                    self.ledger.note(MoveFailed(*places, str(how), reason))


def _reason(move: StageMove, is_placing: bool) -> str:
    if is_placing:
        return "not all servers saw each other when they chose"
    return f"stage {move.stage} {'had no replica' if move.urgent else 'has fewer servers than the others'}"
