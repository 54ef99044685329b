"""The client's trainers: one for each slot, started by the launcher on request, found again by their hello."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Protocol

import anyio

from shoal.client.ledger import Ledger
from shoal.errors import ControlError
from shoal.events.losses import TrainerReady
from shoal.events.trainers import TrainersSilent, TrainerStale
from shoal.ids import PeerId
from shoal.log import FloodGate
from shoal.runtime.launcher_messages import LauncherRequest, Reply, StartTrainer
from shoal.runtime.waking import Signal
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import TrainerHello

logger = logging.getLogger(__name__)


class Launcher(Protocol):
    """Who starts processes for the client; `runtime.control_pipe.RoleControl` asks the one of this host."""

    async def request(self, asked: LauncherRequest[Reply]) -> Reply:
        """Ask for something.

        Raises:
            ConnectionLost: the launcher is gone.
        """
        ...


class TrainerPool:
    """Keeps one trainer for each slot.

    A slot's trainer counts as present from its hello on until its connection ends.
    """

    def __init__(
        self, *, endpoint: Endpoint, launcher: Launcher, ledger: Ledger, start_timeout_s: float, above: int = 0
    ) -> None:
        """Start with no trainer.

        Args:
            start_timeout_s: how long a started trainer may take to say hello.
            above: how far generations begin above those in the records, as other hosts may have replaced trainers.
        """
        self._above = above
        self._endpoint = endpoint
        self._launcher = launcher
        self._ledger = ledger
        self._start_timeout_s = start_timeout_s
        self._gate = FloodGate(logger)
        self._hops: dict[int, Hop] = {}
        self._generations: dict[int, int] = {}
        self._arrived: dict[int, int] = {}
        self._booting: set[int] = set()
        self._rounds: dict[int, int] = {}
        self._changed = Signal()

    @property
    def present(self) -> Mapping[int, Hop]:
        """Slots whose trainer has said hello and is connected."""
        return self._hops

    @property
    def generations(self) -> Mapping[int, int]:
        """The latest generation of each slot's trainer."""
        return self._generations

    def round_of(self, slot: int) -> int:
        """Return the round that a slot's trainer was in when it said hello; 0: it waits for its first."""
        return self._rounds.get(slot, 0)

    def adopt(self, generations: Mapping[int, int], running: Collection[int]) -> None:
        """Take over the trainers that an earlier start of this client had started, before any message is taken.

        Args:
            generations: of the trainer that was last started in each slot.
            running: slots whose trainer has not ended; it says hello by itself.
        """
        self._generations = dict(generations)
        self._booting = set(running)

    def begin_above(self, lowest: Mapping[int, int], above: int) -> None:
        """Ignore from now on every trainer that was started earlier, here or by a client of another host.

        Args:
            lowest: the lowest generation of each slot that may still act, from the newest record.
            above: how often trainers of other hosts may have been replaced since that record.
        """
        slots = lowest.keys() | self._generations.keys()
        highest = {slot: max(self._generations.get(slot, 0), lowest.get(slot, 0)) for slot in slots}
        self._generations = {slot: generation + above for slot, generation in highest.items()}
        self._above = max(self._above, above)
        self._hops.clear()
        self._booting.clear()
        self._changed.notify()

    async def returned(self, timeout_s: float) -> None:
        """Wait until the trainers that were adopted have said hello, or are not waited for any longer."""
        await self._arrivals(sorted(self._booting), timeout_s)

    def slot_of(self, peer: PeerId) -> int | None:
        """Return the slot whose trainer `peer` is."""
        return next((slot for slot, hop in self._hops.items() if hop.peer == peer), None)

    def receive(self, event: Received) -> bool:
        """Take hellos."""
        hello = event.message
        if not isinstance(hello, TrainerHello):
            return False
        if hello.generation != self._generations.get(hello.slot) or hello.hop.peer != event.peer:
            self._gate.emit(TrainerStale(event.peer, hello.slot, hello.generation), event.peer)
            return True
        self._endpoint.introduce(hello.hop)
        self._hops[hello.slot] = hello.hop
        self._arrived[hello.slot] = hello.generation
        self._rounds[hello.slot] = hello.round
        self._booting.discard(hello.slot)
        self._ledger.note(TrainerReady(hello.slot, hello.generation, self._ledger.now_s()))
        self._changed.notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """Forget the trainer whose connection ended."""
        slot = self.slot_of(peer)
        if slot is not None:
            del self._hops[slot]
            self._changed.notify()

    async def ensure(self, num_slots: int) -> None:
        """Start the trainers that slots 0..num_slots-1 lack, and wait until they have said hello.

        One that does not say hello in time is left behind, as long as there is another; the next call starts it anew.

        Raises:
            ControlError: the launcher could not start one, or none of them said hello in time.
        """
        missing = [slot for slot in range(num_slots) if slot not in self._hops]
        for slot in missing:
            if slot not in self._booting:
                await self.start(slot, self.advance(slot))
        if await self._arrivals(missing, self._start_timeout_s):
            return
        silent = self._silent(missing)
        if not self._hops:
            raise ControlError(
                f"trainers {silent} were started but did not report within {self._start_timeout_s:.0f} s; "
                "see their logs"
            )
        self._ledger.note(TrainersSilent(tuple(silent), self._start_timeout_s))

    def advance(self, slot: int) -> int:
        """Return the generation of the slot's next trainer; earlier ones are not believed any more."""
        self._generations[slot] = self._generations.get(slot, self._above) + 1
        return self._generations[slot]

    async def start(self, slot: int, generation: int) -> None:
        """Have a trainer started; it says hello later.

        Raises:
            ControlError: the launcher could not start it.
        """
        self._booting.add(slot)
        answer = await self._launcher.request(StartTrainer(slot, generation))
        if answer.error:
            self._booting.discard(slot)
            raise ControlError(f"trainer {slot} could not be started: {answer.error}")

    async def arrived(self, slot: int) -> bool:
        """Wait until the slot's latest trainer has said hello; returns False if it does not in time."""
        return await self._arrivals([slot], self._start_timeout_s)

    async def changed(self) -> None:
        """Wait until a trainer has come or gone."""
        await self._changed.wait()

    async def _arrivals(self, slots: list[int], timeout_s: float) -> bool:
        with anyio.move_on_after(timeout_s):
            # One that is lost after its hello is not waited for.
            while self._silent(slots):
                await self._changed.wait()
            return True
        self._booting.difference_update(self._silent(slots))
        return False

    def _silent(self, slots: list[int]) -> list[int]:
        return [slot for slot in slots if self._arrived.get(slot) != self._generations[slot]]
