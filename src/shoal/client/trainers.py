"""The driver of `swarm.trainer_slots`: trainers are started by the launcher on request, and found again by their hello.

lost -> the machine --> launcher: start the next one
           ^      '---> replicas: fence the last one --> data server: release its leases --> the next one: go on
           '--- launched, fenced, released, hello, time
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import anyio

from shoal.client.data_link import DataLink
from shoal.client.ledger import Ledger
from shoal.client.reports import Reports
from shoal.clock import Clock
from shoal.control.membership import Membership
from shoal.errors import RemoteProtocolError
from shoal.events.losses import TrainerReady
from shoal.events.trainers import TrainerGivenUp, TrainerNotReplaced, TrainerStale
from shoal.ids import PeerId
from shoal.log import FloodGate
from shoal.runtime.launcher_messages import Launcher, StartTrainer
from shoal.runtime.waking import Mailbox, Signal
from shoal.swarm.step_operations import SendStepMessage
from shoal.swarm.trainer_slots import GoOn, ReleaseLeases, SlotEffect, TrainerSlots, TrainerThere
from shoal.transport.base import Endpoint, Received
from shoal.transport.drive import drive
from shoal.wire.messages.base import StepRange
from shoal.wire.messages.control import TrainerHello
from shoal.wire.messages.step import Fenced

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, repr=False)
class TrainerPool:
    """Keeps one trainer for each slot. A `transport.dispatch.Handler` of hellos and of answers to fences.

    Attributes:
        slots: decides; its other events are what `reports` hears.
        membership: lists the replicas that live now.
        data: frees what lost trainers have leased.
        changed: notified when something has happened to them.
    """

    slots: TrainerSlots
    endpoint: Endpoint
    launcher: Launcher
    membership: Membership
    data: DataLink
    reports: Reports
    ledger: Ledger
    clock: Clock
    _gate: FloodGate = field(default_factory=lambda: FloodGate(logger))
    changed: Signal = field(default_factory=Signal, init=False)
    _orders: Mailbox[StartTrainer | ReleaseLeases] = field(default_factory=Mailbox[StartTrainer | ReleaseLeases])
    _go_on: Callable[[int, StepRange], None] = field(default_factory=lambda: lambda _slot, _steps: None)

    # -- events

    def receive(self, event: Received) -> bool:
        """Take hellos, and what replicas say of lost trainers.

        Raises:
            RemoteProtocolError: a peer of another host says that it is a trainer: the launcher starts them here.
        """
        if not isinstance(event.message, TrainerHello | Fenced):
            return False
        if isinstance(event.message, TrainerHello) and not self.endpoint.is_here(event.peer):
            raise RemoteProtocolError(f"{event.peer} says that it is a trainer, and is none of this host")
        self._do(self.slots.receive(event.peer, event.message, self.clock.now_s()))
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """A trainer is not there any more, or a replica is not waited for."""
        self._do(self.slots.lost(peer, self.clock.now_s()))

    async def run(self) -> None:
        """Ask launcher and data server for what takes a while, and follow view and time, until cancelled: of a trainer
        whose launch the end of a round has overtaken, the next round has to know whether it is on its way."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_view)
            tasks.start_soon(drive, self.slots, self.clock, self.changed, self._do)
            async for order in self._orders:
                match order:
                    case StartTrainer():
                        tasks.start_soon(self._launch, order)
                    case ReleaseLeases():
                        tasks.start_soon(self._release, order)

    def start(self, order: StartTrainer) -> None:
        """Have a trainer started between rounds; the slots learn what came of it."""
        self._orders.put(order)

    def begin_round(
        self,
        round: int,
        slots: frozenset[int],
        steps: StepRange,
        *,
        named: Collection[PeerId] | None,
        steady: Collection[PeerId],
        go_on: Callable[[int, StepRange], None],
    ) -> None:
        """Replace who is lost from now on, see `TrainerSlots.begin_round`.

        Args:
            go_on: lets the trainer of a slot do these steps.
        """
        self._go_on, now_s = go_on, self.clock.now_s()
        self.slots.replicas(self._live(), now_s)
        self._do(self.slots.begin_round(round, slots, steps, named, steady, now_s))

    def end_round(self) -> None:
        """Nobody is replaced any more."""
        self.slots.end_round()

    async def _follow_view(self) -> None:
        while True:
            self._do(self.slots.replicas(self._live(), self.clock.now_s()))
            await self.membership.changed()

    def _live(self) -> list[PeerId]:
        return [replica.peer for replica in self.membership.view.replicas]

    async def _launch(self, order: StartTrainer) -> None:
        """Have a trainer started, which says hello later."""
        answer = await self.launcher.request(order)
        error = f"trainer {order.slot} could not be started: {answer.error}" if answer.error else ""
        self._do(self.slots.launched(order.slot, order.generation, error, self.clock.now_s()))

    async def _release(self, order: ReleaseLeases) -> None:
        answer = await self.data.release(order.slot, order.generation, order.settled)
        self._do(self.slots.released(answer, self.reports.last_number(order.slot), self.clock.now_s()))

    def _do(self, effects: Sequence[SlotEffect]) -> None:
        for effect in effects:
            match effect:
                case StartTrainer() | ReleaseLeases():
                    self._orders.put(effect)
                case SendStepMessage(to, message):
                    self.endpoint.post(to, message)
                case TrainerThere(slot, generation, hop):
                    self.endpoint.introduce(hop)
                    self.ledger.note(TrainerReady(slot, generation, self.ledger.now_s()))
                case GoOn(slot, steps):
                    self._go_on(slot, steps)
                case TrainerStale():
                    self._gate.emit(effect, effect.peer)
                case TrainerNotReplaced() | TrainerGivenUp():
                    self.ledger.note(effect)
                    self.reports.finished.notify()
                case _:
                    self.ledger.note(effect)
        self.changed.notify()
