"""Gives the servers of a run that is resumed what the inner optimizers knew at the checkpoint, before the first step.

place after place: file of each stage -> TakeInner -> InnerTaken, lost, or silent

The replica at home in a slot goes on with what was kept of that slot, or of the first one that was kept of its stage;
so do those that are at home in none, which come after them. Where nothing was kept, or it cannot be taken, an optimizer
begins anew, which is said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
import anyio.to_thread
import torch

from shoal.averaging.contents import Contents, Request
from shoal.averaging.digest_fetch import digest_of, offered
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.client.ledger import Ledger
from shoal.errors import StorageError
from shoal.events.stages import InnerAnew, InnerGiven
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.transport.base import Received
from shoal.wire.messages.inner import InnerState, InnerTaken, TakeInner

_SILENT_S = 30.0
"""Without a word from replicas that are there: they hash a large content before they take it."""


class Inheritance:
    """What one client has to give. A `transport.dispatch.Handler`.

    Args:
        checkpoint: from which the run was resumed; None: it was not.
    """

    def __init__(self, contents: Contents, ledger: Ledger, checkpoint: StoredCheckpoint | None) -> None:
        self._contents = contents
        self._endpoint = contents.endpoint
        self._ledger = ledger
        self._checkpoint = checkpoint
        self._waiting: dict[PeerId, str] = {}
        self._refused: dict[PeerId, str] = {}
        self._changed = Signal()

    async def give(self, replicas: Sequence[Sequence[PeerId]], record_hash: str) -> None:
        """Return when every replica trains on with what was kept, or begins anew; nothing happens unless the round is
        trained on top of the checkpoint's record.

        Args:
            replicas: of each stage, those of slots in their order, then the others.

        Raises:
            StateMismatch: the checkpoint is not what it was.
            StorageError: it cannot be read.
        """
        checkpoint = self._checkpoint
        if checkpoint is None or checkpoint.manifest.record != record_hash:
            return
        self._refused = {}
        for place in range(max(map(len, replicas))):
            at_place = {stage: peers[place] for stage, peers in enumerate(replicas) if place < len(peers)}
            await self._give_place(checkpoint, place, at_place)
        round, num = checkpoint.manifest.round, sum(map(len, replicas))
        if len(self._refused) < num:
            self._ledger.note(InnerGiven(round, num - len(self._refused), num))
        if self._refused:
            self._ledger.note(InnerAnew(round, self._refused))

    def receive(self, event: Received) -> bool:
        """Take a replica's answer; see `transport.dispatch.Handler`."""
        taken = event.message
        if not isinstance(taken, InnerTaken):
            return False
        if self._waiting.get(event.peer) == taken.digest:
            self._answered(event.peer, taken.refused)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        if peer in self._waiting:
            self._answered(peer, "they were lost")

    # -- parts

    async def _give_place(self, checkpoint: StoredCheckpoint, place: int, peers: Mapping[int, PeerId]) -> None:
        given: list[InnerState] = []
        for stage, peer in peers.items():
            inner = await self._offer(checkpoint, stage, place)
            if inner is None:
                self._refused[peer] = "the checkpoint has nothing for them"
                continue
            given.append(inner)
            self._waiting[peer] = inner.digest
            self._endpoint.post(peer, TakeInner(inner))
        while self._waiting:
            with anyio.move_on_after(_SILENT_S) as timer:
                await self._changed.wait()
            if timer.cancelled_caught:
                for peer in list(self._waiting):
                    self._answered(peer, f"they have said nothing for {_SILENT_S:.0f} s")
        for inner in given:
            self._contents.drop(inner.name)

    async def _offer(self, checkpoint: StoredCheckpoint, stage: int, slot: int) -> InnerState | None:
        try:
            content = await anyio.to_thread.run_sync(checkpoint.inner_content, stage, slot)
        except OSError as error:
            raise StorageError(
                f"the checkpoint of round {checkpoint.manifest.round} cannot be read: {error}"
            ) from error
        if content is None:
            return None
        vector = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        offers = offered(vector, self._asked)
        digest = digest_of(await anyio.to_thread.run_sync(offers.hashes))
        inner = InnerState(stage, checkpoint.manifest.record, digest, vector.nbytes)
        self._contents.offer(inner.name, offers)
        return inner

    def _asked(self, peer: PeerId, request: Request, num_chunks: int) -> None:
        self._changed.notify()

    def _answered(self, peer: PeerId, refused: str) -> None:
        del self._waiting[peer]
        if refused:
            self._refused[peer] = refused
        self._changed.notify()
