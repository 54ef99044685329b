"""The transfer of one content: connects the machine to network, clock and memory.

endpoint -> put -> ContentTransfer -> requests to the donors; chunks into the given vectors -> verified
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from shoal.clock import Clock
from shoal.codec.raw import to_wire
from shoal.ids import PeerId
from shoal.optim.vector_memory import is_in_file, leave
from shoal.runtime.waking import Signal
from shoal.swarm.content_transfer import (
    AskDonor,
    ChunkPlan,
    ContentTransfer,
    Distrust,
    Late,
    Nobody,
    Request,
    Store,
    TransferDone,
    TransferEffect,
    TransferSettings,
    Verify,
)
from shoal.swarm.view import NO_BASE
from shoal.transport.base import Endpoint, PeerLost, Received
from shoal.wire.messages import Hop
from shoal.wire.messages.transfer import Chunk, ContentName, Have, Missing, Read, Want
from shoal.wire.tensors import WireTensor

INLINE_BYTES = 1 << 16
"""Hashing less than this takes less time than handing it to a thread."""


class ContentFetch(ABC):
    """One transfer: the machine, what has arrived, and the vectors that it goes into.

    Subclasses say who may have the content, whether it is right, and how long it is of use.

    Args:
        vectors: the transfer writes into them.
        chunk_bytes: the same for all who have the content.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        clock: Clock,
        name: ContentName,
        vectors: Sequence[Tensor],
        settings: TransferSettings,
        chunk_bytes: int,
    ) -> None:
        self.name = name
        self._endpoint = endpoint
        self._clock = clock
        self._plan = ChunkPlan([vector.nbytes for vector in vectors], chunk_bytes)
        self.num_chunks = len(self._plan)
        self.machine = ContentTransfer(self.num_chunks, settings)
        self._bytes = [vector.view(torch.uint8) if vector.numel() else vector for vector in vectors]
        self._events: deque[Received | PeerLost] = deque()
        self._waiting: set[tuple[PeerId, int]] = set()  # chunks among the events
        self._has_events = Signal()
        self._arrived: WireTensor | None = None
        self._is_complete = self._is_done = False
        self._base_round = NO_BASE
        self._scope = anyio.CancelScope()

    # -- what is fetched

    @abstractmethod
    def peers(self) -> Mapping[PeerId, Hop | None]:
        """Return who may have it now; None: a connection stands."""

    @abstractmethod
    async def is_right(self) -> bool:
        """Return whether the whole, all of whose chunks are here, is what the name says."""

    @abstractmethod
    def is_lost(self, is_offered: bool, base_round: int) -> bool:
        """Return whether to give up; asked after each event.

        Args:
            is_offered: a donor offers the content now.
            base_round: the newest record that a donor holds which does not have the content; `NO_BASE`: none.
        """

    @abstractmethod
    def report(self, effect: Distrust | Nobody | Late) -> None:
        """Something goes wrong."""

    def progressed(self) -> None:  # noqa: B027
        """A chunk has come."""

    # -- the transfer

    def put(self, event: Received | PeerLost) -> None:
        """Take an answer, or a loss; those about another content are none of its business."""
        if isinstance(event, Received):
            if getattr(event.message, "name", None) != self.name:
                return
            if isinstance(event.message, Chunk):
                arrived = (event.peer, event.message.chunk)
                # What nobody has asked for, or what comes twice, must not fill the memory while others are hashed.
                if arrived in self._waiting or not self.machine.is_requested(*arrived):
                    return
                self._waiting.add(arrived)
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Look again whether it is still of use."""
        self._has_events.notify()

    def cancel(self) -> None:
        """Give it up."""
        self._scope.cancel()

    async def run(self) -> bool:
        """Return True when the vectors hold the content, False when it is given up."""
        with self._scope:
            return await self._run()
        return False

    async def _run(self) -> bool:
        while not self._is_done:
            now_s = self._clock.now_s()
            if self._is_complete:
                self._is_complete = False
                is_right = await self.is_right()
                if not is_right and self.is_lost(self.machine.is_offered, self._base_round):
                    return False
                await self._do(self.machine.verified(is_right, self._clock.now_s()))
            elif self.is_lost(self.machine.is_offered, self._base_round):
                return False
            elif self.machine.wake_at_s <= now_s:
                await self._do(self.machine.peers(self.peers(), now_s))
                await self._do(self.machine.tick(now_s))
            elif self._events:
                await self._take(self._events.popleft())
            else:
                with anyio.move_on_after(self.machine.wake_at_s - now_s):
                    await self._has_events.wait()
        return True

    async def _take(self, event: Received | PeerLost) -> None:
        if isinstance(event, PeerLost):
            await self._do(self.machine.lost(event.peer, self._clock.now_s()))
            return
        match event.message:
            case Have(_, chunk_hashes):
                await self._do(self.machine.offered(event.peer, chunk_hashes, self._clock.now_s()))
            case Missing(_, base_round):
                self._base_round = max(self._base_round, base_round)
                await self._do(self.machine.refused(event.peer, self._clock.now_s()))
            case Chunk(_, chunk):
                self._waiting.discard((event.peer, chunk))
                self._arrived = event.tensors[0]
                digest = await self._digest(chunk, self._arrived.data)
                await self._do(self.machine.received(event.peer, chunk, digest, self._clock.now_s()))
                self._arrived = None
            case _:
                pass

    async def _digest(self, chunk: int, data: memoryview) -> bytes:
        if not 0 <= chunk < self.num_chunks:
            return b""
        place = self._plan.place(chunk)
        if data.nbytes != place.stop - place.start:
            return b""
        if data.nbytes <= INLINE_BYTES:
            return hashlib.sha256(data).digest()
        return (await anyio.to_thread.run_sync(hashlib.sha256, data)).digest()

    async def _store(self, chunk: int, data: memoryview) -> None:
        place = self._plan.place(chunk)
        into = self._bytes[place.vector][place.start : place.stop]
        if is_in_file(into):
            # A disk that stands still holds up this transfer, and not the loop.
            await anyio.to_thread.run_sync(_store_in_file, into, data)
        else:
            to_wire(into).data[:] = data

    async def _do(self, effects: Sequence[TransferEffect]) -> None:
        for effect in effects:
            match effect:
                case AskDonor(peer):
                    hop = self.peers().get(peer)
                    if hop is not None:
                        self._endpoint.introduce(hop)
                    self._endpoint.post(peer, Want(self.name))
                case Request(peer, chunk):
                    self._endpoint.post(peer, Read(self.name, chunk))
                case Store(chunk):
                    if self._arrived is not None:
                        await self._store(chunk, self._arrived.data)
                        self.progressed()
                case Verify():
                    self._is_complete = True
                case TransferDone():
                    self._is_done = True
                case Distrust() | Nobody() | Late():
                    self.report(effect)


def _store_in_file(into: Tensor, data: memoryview) -> None:
    # Torch copies without the lock of Python, as a slice of memory does not.
    into.copy_(torch.frombuffer(data, dtype=torch.uint8))
    leave(into)
