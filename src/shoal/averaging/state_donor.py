"""A holder's end of a state transfer: offers what it holds and keeps, and sends the chunks that it is asked for.

Chunks are sent out of the held vectors themselves, which never change, so nothing is copied and the device thread is
not needed. Each peer is served by itself, at the speed at which it takes what is sent: at most the transport's high
water mark waits for it.

A replica that was left behind often hears of a record before this one has swapped to it. So who asks in vain is
remembered, and gets the offer when there is something to offer.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from shoal.averaging.replica_state import Contribution, OuterState
from shoal.codec.raw import to_wire
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.swarm.state_keeping import PieceKey, StateKeeping
from shoal.swarm.state_transfer import CHUNK_BYTES, ChunkPlan
from shoal.swarm.view import NO_BASE
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages import Traffic
from shoal.wire.messages.round import AskState, NoState, ReadState, StateChunk, StateOffer
from shoal.wire.tensors import WireTensor

logger = logging.getLogger(__name__)

MAX_REQUESTS = 64
"""Of one peer that wait; whoever asks for more at a time breaks the protocol."""

_Request = AskState | ReadState


class _Offered:
    """Vectors that are offered, cut into chunks that share their memory."""

    def __init__(self, vectors: Sequence[Tensor], chunk_bytes: int) -> None:
        self.plan = ChunkPlan([vector.nbytes for vector in vectors], chunk_bytes)
        self._vectors = [vector.view(torch.uint8) if vector.numel() else vector for vector in vectors]
        self._hashes: bytes | None = None

    def chunk(self, number: int) -> WireTensor:
        """Raises IndexError: there is no such chunk."""
        place = self.plan.place(number)
        return to_wire(self._vectors[place.vector][place.start : place.stop])

    def hashes(self) -> bytes:
        """SHA-256 of the chunks, computed when they are first asked for."""
        if self._hashes is None:
            chunks = (self.chunk(number) for number in range(len(self.plan)))
            self._hashes = b"".join(hashlib.sha256(chunk.data).digest() for chunk in chunks)
        return self._hashes


class StateDonor:
    """Serves one replica's state.

    Args:
        chunk_bytes: The same on all replicas.
    """

    def __init__(self, endpoint: Endpoint, stage: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._endpoint = endpoint
        self._stage = stage
        self._chunk_bytes = chunk_bytes
        self._keeping = StateKeeping()
        self._offered: dict[PieceKey, _Offered] = {}
        self._base_round = NO_BASE
        self._hashing = anyio.Lock()
        self._requests: dict[PeerId, dict[_Request, None]] = {}
        self._in_vain: dict[PeerId, AskState] = {}
        self._new: list[PeerId] = []
        self._has_new = anyio.Event()

    @property
    def is_followed(self) -> bool:
        """Whether some newcomer is on its way, and may need the averages of the next round."""
        return self._keeping.is_followed

    def hold(self, round: int, record_hash: str, state: OuterState, average: Contribution | None = None) -> None:
        """Offer this state from now on, beside states that others are still reading.

        Args:
            state: Its vectors must not change any more.
            average: The ring's result in the record's round, if it is at hand; must not change any more either.
        """
        for key in self._keeping.swapped(record_hash, round, average is not None):
            self._offered.pop(key, None)
        self._base_round = round
        self._offered[PieceKey(record_hash, False)] = _Offered(state, self._chunk_bytes)
        if average is not None and self._keeping.keeps(PieceKey(record_hash, True)):
            self._offered[PieceKey(record_hash, True)] = _Offered(average, self._chunk_bytes)
        for peer, request in list(self._in_vain.items()):
            if self._find(request) is not None:
                self._queue(peer, request)

    def release(self) -> None:
        """Offer nothing any more: this machine's memory is not to be trusted."""
        self._keeping = StateKeeping()
        self._offered.clear()
        self._base_round = NO_BASE

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
        key = PieceKey(request.record_hash, request.is_average)
        offered = self._find(request)
        if offered is None:
            if isinstance(request, AskState):
                self._in_vain[peer] = request
            self._endpoint.post(peer, NoState(key.record_hash, self._base_round, key.is_average))
            return
        self._keeping.asked(key, peer)
        if isinstance(request, AskState):
            # What is hashed stays alive meanwhile; if it is dropped, the reads that follow are told so.
            async with self._hashing:
                hashes = await anyio.to_thread.run_sync(offered.hashes)
            fields = {"peer": peer, "record": key.record_hash, "average": key.is_average, "chunks": len(offered.plan)}
            logger.info("state.offered", extra=fields)
            self._in_vain.pop(peer, None)
            self._endpoint.post(peer, StateOffer(key.record_hash, hashes, key.is_average))
            return
        try:
            chunk = offered.chunk(request.chunk)
        except IndexError as error:
            self._endpoint.disconnect(peer, f"it asked for a chunk in vain: {error}")
            return
        message = StateChunk(key.record_hash, request.chunk, key.is_average)
        self._endpoint.post(peer, message, (chunk,), Traffic.STATE)

    def _find(self, request: _Request) -> _Offered | None:
        """What is asked for, if it is here and of this stage."""
        if isinstance(request, AskState) and request.stage != self._stage:
            return None
        return self._offered.get(PieceKey(request.record_hash, request.is_average))
