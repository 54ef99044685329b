"""Has mirrors write a checkpoint of the last record of a run that ends, while servers are there to give what it has.

    RunCounts (is_last) -> a mirror gets what it lacks, and writes -> LastKept, or the mirror is lost -> all may leave

Whoever stops a run expects that it goes on as if it had not been stopped. The mirrors need the servers for that, and
servers leave when the client has said its last word.
"""

from __future__ import annotations

from typing import Final

import anyio

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.checkpoint_counts import CheckpointCounts
from shoal.client.ledger import Ledger
from shoal.control.membership import Membership
from shoal.events.mirror import LastCheckpointAwaited, LastCheckpointLacks
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.mirror import LastKept

_SWAP_S: Final = 2.0
"""So long may servers take to say that they have swapped to a record that was just committed."""
_SAY_AFTER_S: Final = 4.0
_MOST_S: Final = 600.0
"""Without a word from a mirror that is there; then the run ends with the checkpoint before."""


class LastCheckpoint:
    """The last checkpoint, as the client sees it. A `transport.dispatch.Handler`."""

    def __init__(
        self,
        endpoint: Endpoint,
        membership: Membership,
        coordinator: RoundCoordinator,
        ledger: Ledger,
        counts: CheckpointCounts,
    ) -> None:
        """Wait for nothing yet.

        Args:
            counts: have what goes into a checkpoint of the record that stands, beside states.
        """
        self._endpoint = endpoint
        self._membership = membership
        self._coordinator = coordinator
        self._ledger = ledger
        self._counts = counts
        self._awaited: set[PeerId] = set()
        self._lacks: list[str] = []
        self._changed = Signal()

    def receive(self, event: Received) -> bool:
        """Take a mirror's word."""
        kept = event.message
        if not isinstance(kept, LastKept):
            return False
        if event.peer in self._awaited:
            self._lacks += [kept.lacks] if kept.lacks else []
            self._settle(event.peer)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """A mirror that is lost writes nothing that is waited for."""
        if peer in self._awaited:
            self._lacks.append("its mirror was lost before it was written")
            self._settle(peer)

    async def left(self) -> None:
        """Return when the mirrors that are there have written what they can, or are silent for long."""
        with anyio.move_on_after(_SWAP_S):
            await self._coordinator.swapped()
        standing = self._coordinator.standing
        self._awaited = {mirror.peer for mirror in self._membership.view.mirrors}
        if standing is None or self._coordinator.holders is None or not self._awaited:
            return
        counts = self._counts.standing(is_last=True)
        for peer in self._awaited:
            self._endpoint.post(peer, counts)
        with anyio.move_on_after(_MOST_S):
            with anyio.move_on_after(_SAY_AFTER_S):
                await self._settled()
            if self._awaited:
                self._ledger.note(LastCheckpointAwaited(standing.record.round))
                await self._settled()
        if self._awaited:
            self._lacks.append(f"its mirror has said nothing for {_MOST_S:g} s")
        for lacks in self._lacks:
            self._ledger.note(LastCheckpointLacks(standing.record.round, lacks))

    def _settle(self, peer: PeerId) -> None:
        self._awaited.discard(peer)
        self._changed.notify()

    async def _settled(self) -> None:
        while self._awaited:
            await self._changed.wait()
