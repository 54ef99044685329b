"""Settles what a lost trainer has left behind: every live replica refuses it from now on, and says what it had done.

Whom to ask, for how long, and what the answers prove is decided in `swarm/takeover.py`; here are network and clock.
"""

from __future__ import annotations

from collections.abc import Collection

import anyio

from shoal.client.ledger import Ledger
from shoal.clock import Clock
from shoal.control.membership import Membership
from shoal.events.trainers import TrainerFenced
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.swarm.takeover import Settled, TakeoverMachine
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.step import Fenced


class Fencing:
    """The client's side of `Fence`. A `transport.dispatch.Handler`."""

    def __init__(self, *, endpoint: Endpoint, clock: Clock, ledger: Ledger, membership: Membership) -> None:
        """Fence no trainer yet.

        Args:
            membership: lists the replicas that live now.
        """
        self._endpoint = endpoint
        self._clock = clock
        self._ledger = ledger
        self._membership = membership
        self._round = 0
        self._named: Collection[PeerId] | None = None
        self._steady: set[PeerId] = set()
        self._machines: dict[int, TakeoverMachine] = {}
        self._changed = Signal()

    def receive(self, event: Received) -> bool:
        """Take answers."""
        if not isinstance(event.message, Fenced):
            return False
        for slot in event.message.generations:
            if slot in self._machines:
                self._machines[slot].receive(event.peer, event.message)
        self._changed.notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """It is not waited for any more, and what answers in its name later may be another generation."""
        self._steady.discard(peer)
        self._changed.notify()

    def begin_round(self, round: int, named: Collection[PeerId] | None, connected: Collection[PeerId]) -> None:
        """A round is trained from now on.

        Args:
            named: the replicas that the round's trainers have been told of. It is read when a trainer is lost, so the
                caller adds replicas that come in meanwhile. None: an earlier start of this client told the trainers.
            connected: replicas that were connected before any trainer was told of the round.
        """
        self._round, self._named = round, named
        self._steady = set(connected)

    async def settle(self, slot: int, lowest: int) -> Settled:
        """Have every generation of a slot's trainer below `lowest` refused; return what it has done in the round."""
        begun_s = self._clock.now_s()
        machine = self._machines[slot] = TakeoverMachine(slot, lowest, self._round, begun_s)
        try:
            while not machine.is_over(self._live, self._clock.now_s()):
                for send in machine.asks(self._live, self._clock.now_s()):
                    self._endpoint.post(send.to, send.message)
                changed = self._changed.coming
                with anyio.move_on_after(machine.wake_at_s - self._clock.now_s()):
                    await changed.wait()
        finally:
            del self._machines[slot]
        everyone = None if self._named is None else {*self._live, *self._named}
        settled = machine.settled(everyone, self._steady)
        self._ledger.note(
            TrainerFenced(
                slot=slot,
                lowest=lowest,
                committed=len(settled.committed),
                in_doubt=len(settled.in_doubt),
                complete=settled.complete,
                after_s=round(self._clock.now_s() - begun_s, 3),
            )
        )
        return settled

    @property
    def _live(self) -> list[PeerId]:
        return [replica.peer for replica in self._membership.view.replicas]
