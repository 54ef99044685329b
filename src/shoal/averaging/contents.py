"""What a peer gives to others and gets from them: contents by their names, one handler for all kinds.

offer -> Want, Read -> Have, Chunk                what it has
fetch -> ContentFetch -> Want, Read -> ...        what it wants

Which contents there are, and for how long, the parts say that use it: a replica's state and what leads on from it
(`state_donor`, `state_sync`), snapshots (`snapshot_owner`, `snapshot_exchange`).

Chunks are sent out of the offered vectors themselves, which never change, so nothing is copied (but chunks of files),
and the device thread is not needed. Each peer is served by itself, at the speed at which it takes what is sent: at most
the transport's high water mark waits for it. Who asks in vain is remembered, and gets the offer when there is something
to offer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from shoal.averaging.content_fetch import ContentFetch
from shoal.clock import Clock
from shoal.codec.raw import to_wire
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.optim.vector_memory import IN_MEMORY, VectorMemory, is_in_file, leave
from shoal.runtime.waking import Mailbox
from shoal.swarm.content_transfer import CHUNK_BYTES, ChunkPlan
from shoal.swarm.view import NO_BASE
from shoal.transport.base import Endpoint, PeerLost, Received
from shoal.wire.messages import Traffic
from shoal.wire.messages.transfer import Chunk, ContentKind, ContentName, Have, Missing, Read, Want
from shoal.wire.tensors import WireTensor

MAX_REQUESTS = 64
"""Of one peer that wait; whoever asks for more at a time breaks the protocol."""

Request = Want | Read
"""What others ask of who offers."""

Asked = Callable[[PeerId, Request, int], None]
"""Told of each request for a content, or for a part of it, and of the number of its chunks."""


class Offered:
    """Vectors that are offered, cut into chunks that share their memory.

    Args:
        vectors: must not change any more.
        hashes: of the chunks, where they are known already.
    """

    def __init__(
        self,
        vectors: Sequence[Tensor],
        chunk_bytes: int,
        asked: Asked | None = None,
        hashes: bytes | None = None,
    ) -> None:
        self.plan = ChunkPlan([vector.nbytes for vector in vectors], chunk_bytes)
        self.asked = asked
        self._vectors = [vector.view(torch.uint8) if vector.numel() else vector for vector in vectors]
        self._hashes = hashes

    @property
    def is_in_file(self) -> bool:
        """Whether a disk is read for its chunks."""
        return any(map(is_in_file, self._vectors))

    def chunk(self, number: int) -> WireTensor:
        """Raises IndexError: there is no such chunk."""
        place = self.plan.place(number)
        part = self._vectors[place.vector][place.start : place.stop]
        if not is_in_file(part):
            return to_wire(part)
        # The connection writes it when it can: its pages would come back then, and stay.
        copied = part.clone()
        leave(part)
        return to_wire(copied)

    @property
    def is_hashed(self) -> bool:
        """Whether `hashes` has nothing to compute."""
        return self._hashes is not None

    def hashes(self) -> bytes:
        """SHA-256 of the chunks, computed when they are first asked for."""
        if self._hashes is None:
            chunks = (self.chunk(number) for number in range(len(self.plan)))
            self._hashes = b"".join(hashlib.sha256(chunk.data).digest() for chunk in chunks)
        return self._hashes


class Contents:
    """The contents of one peer. A `transport.dispatch.Handler`.

    Args:
        chunk_bytes: of states and averages; the same on all replicas.
        memory: where what comes, and is kept for others, lies.

    Attributes:
        offered: what others may have, by name.
        base_rounds: of each stage the newest record whose state is given.
    """

    def __init__(
        self, endpoint: Endpoint, clock: Clock, chunk_bytes: int = CHUNK_BYTES, memory: VectorMemory = IN_MEMORY
    ) -> None:
        self.memory = memory
        self.endpoint = endpoint
        self.clock = clock
        self.chunk_bytes = chunk_bytes
        self.offered: dict[ContentName, Offered] = {}
        self.base_rounds: dict[int, int] = {}
        self._hashing = anyio.Lock()
        self._requests: dict[PeerId, dict[Request, None]] = {}
        self._in_vain: dict[PeerId, Want] = {}
        self._new = Mailbox[PeerId]()
        self._fetches: list[ContentFetch] = []

    def offer(self, name: ContentName, offered: Offered) -> None:
        """Give this to those who want it, until it is dropped."""
        self.offered[name] = offered
        for peer, request in list(self._in_vain.items()):
            if request.name == name:
                self._queue(peer, request)

    def drop(self, name: ContentName) -> None:
        """Give this no more."""
        self.offered.pop(name, None)

    async def fetch(self, transfer: ContentFetch) -> bool:
        """Get a content; see `ContentFetch.run`."""
        self._fetches.append(transfer)
        try:
            return await transfer.run()
        finally:
            self._fetches.remove(transfer)

    def receive(self, event: Received) -> bool:
        """Take a request or an answer; see `transport.dispatch.Handler`. What comes late is dropped.

        Raises:
            RemoteProtocolError: the peer asks for too much at a time, or sends a chunk without its bytes.
        """
        match event.message:
            case Want() | Read() as request:
                if self._queue(event.peer, request) > MAX_REQUESTS:
                    raise RemoteProtocolError(f"{event.peer} has asked for more than {MAX_REQUESTS} chunks at a time")
            case Chunk(_, chunk) if [tensor.dtype for tensor in event.tensors] != ["uint8"]:
                raise RemoteProtocolError(f"{event.peer} sent chunk {chunk} not as one tensor of bytes")
            case Have() | Missing() | Chunk():
                for transfer in self._fetches:
                    transfer.put(event)
            case _:
                return False
        return True

    def peer_lost(self, peer: PeerId) -> None:
        self._in_vain.pop(peer, None)
        self._requests.get(peer, {}).clear()
        for transfer in self._fetches:
            transfer.put(PeerLost(peer, "lost"))

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as tasks:
            async for peer in self._new:
                tasks.start_soon(self._serve, peer)

    # -- parts

    def _queue(self, peer: PeerId, request: Request) -> int:
        """Take note of a request; returns how many of this peer wait."""
        waiting = self._requests.get(peer)
        if waiting is None:
            waiting = self._requests[peer] = {}
            self._new.put(peer)
        waiting[request] = None
        return len(waiting)

    async def _serve(self, peer: PeerId) -> None:
        """Answer a peer's requests in their order, until there are none."""
        waiting = self._requests[peer]
        while waiting:
            request = next(iter(waiting))
            await self._answer(peer, request)
            waiting.pop(request, None)
            if not request.name.kind.leads_to_record:
                # A buddy may be the next stage of a path: a step's tensor waits for one chunk at most.
                await self.endpoint.flushed(peer)
            else:
                await self.endpoint.drained(peer)
        # Nothing can have come in between: the last check and this are one step of the event loop.
        del self._requests[peer]

    async def _answer(self, peer: PeerId, request: Request) -> None:
        name = request.name
        offered = self.offered.get(name)
        if offered is None:
            if isinstance(request, Want):
                self._in_vain[peer] = request
            self.endpoint.post(peer, Missing(name, self.base_rounds.get(name.stage, NO_BASE)))
            return
        if offered.asked is not None:
            offered.asked(peer, request, len(offered.plan))
        if isinstance(request, Want):
            # Who wants a snapshot does not wait for long: not until a large state is hashed for somebody else.
            if not offered.is_hashed:
                # What is hashed stays alive meanwhile; if it is dropped, the reads that follow are told so.
                async with self._hashing:
                    await anyio.to_thread.run_sync(offered.hashes)
            self._in_vain.pop(peer, None)
            self.endpoint.post(peer, Have(name, offered.hashes()))
            return
        try:
            if offered.is_in_file:
                # The disk may stand still, which nobody else is to wait for.
                chunk = await anyio.to_thread.run_sync(offered.chunk, request.chunk)
            else:
                chunk = offered.chunk(request.chunk)
        except IndexError as error:
            self.endpoint.disconnect(peer, f"it asked for a chunk in vain: {error}")
            return
        traffic = Traffic.PSEUDO_GRADIENTS if name.kind is ContentKind.PAYLOAD else Traffic.STATE
        self.endpoint.post(peer, Chunk(name, request.chunk), (chunk,), traffic)
