"""A holder's end of a state transfer: offers what it holds, and sends the chunks that it is asked for.

Chunks are sent out of the held vectors themselves, which never change, so nothing is copied and the device thread is
not needed. Each peer is served by itself, at the speed at which it takes what is sent: at most the transport's high
water mark waits for it.

A replica that was left behind often hears of a record before this one has swapped to it. So who asks in vain is
remembered, and gets the offer when there is something to offer.
"""

from __future__ import annotations

import hashlib
import logging

import anyio
import anyio.to_thread
import torch

from shoal.averaging.replica_state import OuterState
from shoal.codec.raw import to_wire
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.swarm.state_transfer import CHUNK_BYTES, ChunkPlan
from shoal.swarm.view import NOTHING_HELD
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages import Traffic
from shoal.wire.messages.round import AskState, NoState, ReadState, StateChunk, StateOffer
from shoal.wire.tensors import WireTensor

logger = logging.getLogger(__name__)

MAX_REQUESTS = 64
"""Of one peer that wait; whoever asks for more at a time breaks the protocol."""

_Request = AskState | ReadState


class _Held:
    """The state that is offered, cut into chunks that share its memory."""

    def __init__(self, round: int, record_hash: str, state: OuterState, chunk_bytes: int) -> None:
        self.round = round
        self.record_hash = record_hash
        self.plan = ChunkPlan([vector.nbytes for vector in state], chunk_bytes)
        self._vectors = [vector.view(torch.uint8) if vector.numel() else vector for vector in state]

    def chunk(self, number: int) -> WireTensor:
        """Raises IndexError: there is no such chunk."""
        place = self.plan.place(number)
        return to_wire(self._vectors[place.vector][place.start : place.stop])

    def digests(self) -> bytes:
        return b"".join(hashlib.sha256(self.chunk(number).data).digest() for number in range(len(self.plan)))


class StateDonor:
    """Serves one replica's state.

    Args:
        endpoint: Of the server.
        stage: Of the replica.
        chunk_bytes: Size of a chunk; the same on all replicas.
    """

    def __init__(self, endpoint: Endpoint, stage: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._endpoint = endpoint
        self._stage = stage
        self._chunk_bytes = chunk_bytes
        self._held: _Held | None = None
        self._hashes: tuple[str, bytes] | None = None
        self._hashing = anyio.Lock()
        self._requests: dict[PeerId, dict[_Request, None]] = {}
        self._in_vain: dict[PeerId, AskState] = {}
        self._new: list[PeerId] = []
        self._has_new = anyio.Event()

    def hold(self, round: int, record_hash: str, state: OuterState) -> None:
        """From now on this state is offered, and no other; its vectors must not change any more."""
        self._held = _Held(round, record_hash, state, self._chunk_bytes)
        for peer, request in list(self._in_vain.items()):
            if self._fits(request, self._held):
                self._queue(peer, request)

    def release(self) -> None:
        """Offer nothing any more."""
        self._held = None

    def receive(self, event: Received) -> bool:
        """Take a request; see `transport.dispatch.Handler`.

        Raises:
            RemoteProtocolError: The peer asks for too much at a time.
        """
        message = event.message
        if not isinstance(message, _Request):
            return False
        if self._queue(event.peer, message) > MAX_REQUESTS:
            raise RemoteProtocolError(f"{event.peer} has asked for more than {MAX_REQUESTS} chunks at a time")
        return True

    def _queue(self, peer: PeerId, request: _Request) -> int:
        """Take note of a request; returns how many of this peer wait."""
        waiting = self._requests.get(peer)
        if waiting is None:
            waiting = self._requests[peer] = {}
            self._new.append(peer)
            self._has_new.set()
        waiting[request] = None
        return len(waiting)

    def peer_lost(self, peer: PeerId) -> None:
        """See `transport.dispatch.Handler`."""
        self._in_vain.pop(peer, None)
        self._requests.get(peer, {}).clear()

    async def run(self) -> None:
        """Serve until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                while self._new:
                    tasks.start_soon(self._serve, self._new.pop())
                self._has_new = anyio.Event()
                await self._has_new.wait()

    async def _serve(self, peer: PeerId) -> None:
        """Answer a peer's requests in their order, until there are none."""
        waiting = self._requests[peer]
        while waiting:
            request = next(iter(waiting))
            await self._answer(peer, request)
            waiting.pop(request, None)
            await self._endpoint.drained(peer)
        # Nothing can have come in between: the last check and this are one step of the event loop.
        del self._requests[peer]

    async def _answer(self, peer: PeerId, request: _Request) -> None:
        held = self._held
        if isinstance(request, AskState) and held is not None and self._fits(request, held):
            chunk_hashes = await self._chunk_hashes(held)
            if self._held is held:
                logger.info("state.offered", extra={"peer": peer, "round": held.round, "chunks": len(held.plan)})
                self._in_vain.pop(peer, None)
                self._endpoint.post(peer, StateOffer(request.record_hash, chunk_hashes))
                return
            held = self._held
        if isinstance(request, ReadState) and held is not None and request.record_hash == held.record_hash:
            try:
                chunk = held.chunk(request.chunk)
            except IndexError as error:
                self._endpoint.disconnect(peer, f"it asked for a chunk in vain: {error}")
                return
            self._endpoint.post(peer, StateChunk(request.record_hash, request.chunk), (chunk,), Traffic.STATE)
            return
        if isinstance(request, AskState):
            self._in_vain[peer] = request
        self._endpoint.post(peer, NoState(request.record_hash, NOTHING_HELD if held is None else held.round))

    def _fits(self, request: AskState, held: _Held) -> bool:
        return request.stage == self._stage and request.record_hash == held.record_hash

    async def _chunk_hashes(self, held: _Held) -> bytes:
        """Of the held state, computed when they are first asked for, beside the event loop."""
        async with self._hashing:
            if self._hashes is None or self._hashes[0] != held.record_hash:
                self._hashes = (held.record_hash, await anyio.to_thread.run_sync(held.digests))
            return self._hashes[1]
