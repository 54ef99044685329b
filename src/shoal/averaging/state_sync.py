"""A newcomer's end of a state transfer: connects the machine to network, clock and memory.

    endpoint -> receive -> StateTransfer -> requests to the donors; chunks into new vectors -> compared with the record

Nobody waits for it, and it gives up only when it is cancelled: as long as nobody holds the bytes it waits, and says so.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from shoal.averaging.replica_state import OuterState
from shoal.clock import Clock
from shoal.codec.raw import to_wire
from shoal.errors import RemoteProtocolError, StateMismatch
from shoal.ids import PeerId
from shoal.swarm.round_effects import Fetch
from shoal.swarm.state_transfer import (
    CHUNK_BYTES,
    Ask,
    ChunkPlan,
    Distrust,
    Done,
    Late,
    Nobody,
    Request,
    StateTransfer,
    Store,
    TransferEffect,
    TransferSettings,
    Verify,
)
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, PeerLost, Received
from shoal.wire.messages import Hop
from shoal.wire.messages.round import AskState, NoState, ReadState, StateChunk, StateOffer
from shoal.wire.tensors import WireTensor

logger = logging.getLogger(__name__)

INLINE_BYTES = 1 << 16
"""Hashing less than this takes less time than handing it to a thread."""

_Answer = StateOffer | NoState | StateChunk


class StateSync:
    """Fetches states of one stage.

    Args:
        endpoint: Of the server.
        stage: Of the replica.
        view: The swarm as it is now: where the holders are looked for.
        clock: For patience.
        settings: How much of it.
        chunk_bytes: Size of a chunk; the same on all replicas.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        stage: int,
        *,
        view: Callable[[], SwarmView],
        clock: Clock,
        settings: TransferSettings,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._endpoint = endpoint
        self._stage = stage
        self._view = view
        self._clock = clock
        self._settings = settings
        self._chunk_bytes = chunk_bytes
        self._transfer: _Transfer | None = None

    def receive(self, event: Received) -> bool:
        """Take an answer; what comes late is dropped. See `transport.dispatch.Handler`.

        Raises:
            RemoteProtocolError: A chunk comes without its bytes.
        """
        message = event.message
        if not isinstance(message, _Answer):
            return False
        if isinstance(message, StateChunk) and [tensor.dtype for tensor in event.tensors] != ["uint8"]:
            raise RemoteProtocolError(f"{event.peer} sent chunk {message.chunk} not as one tensor of bytes")
        if self._transfer is not None and message.record_hash == self._transfer.order.record_hash:
            self._transfer.put(event)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """See `transport.dispatch.Handler`."""
        if self._transfer is not None:
            self._transfer.put(PeerLost(peer, "lost"))

    async def fetch(self, order: Fetch, template: OuterState) -> OuterState:
        """Return the state that a record names for this stage, once it is here and verified.

        One at a time: the caller cancels it when it wants another one.

        Args:
            order: Which record, and what its state hashes to.
            template: Has the sizes and types of the state.
        """
        plan = ChunkPlan([vector.nbytes for vector in template], self._chunk_bytes)
        transfer = _Transfer(self._endpoint, self._stage, self._view, self._clock, order, plan, self._settings)
        self._transfer = transfer
        try:
            return await transfer.run(template)
        finally:
            if self._transfer is transfer:
                self._transfer = None


class _Transfer:
    """One transfer: the machine, what has arrived, and the vectors that it goes into."""

    def __init__(
        self,
        endpoint: Endpoint,
        stage: int,
        view: Callable[[], SwarmView],
        clock: Clock,
        order: Fetch,
        plan: ChunkPlan,
        settings: TransferSettings,
    ) -> None:
        self.order = order
        self._endpoint = endpoint
        self._stage = stage
        self._view = view
        self._clock = clock
        self._plan = plan
        self._machine = StateTransfer(len(plan), settings)
        self._events: deque[Received | PeerLost] = deque()
        self._has_events = anyio.Event()
        self._arrived: WireTensor | None = None
        self._memory: list[memoryview] = []
        self._is_complete = self._is_done = False

    def put(self, event: Received | PeerLost) -> None:
        self._events.append(event)
        self._has_events.set()

    async def run(self, template: OuterState) -> OuterState:
        number, begun_s = self.order.record.round, self._clock.now_s()
        state = OuterState(*(torch.empty_like(vector) for vector in template))
        self._memory = [_bytes_of(vector) for vector in state]
        logger.info("state.fetching", extra={"stage": self._stage, "round": number, "chunks": len(self._plan)})
        while not self._is_done:
            now_s = self._clock.now_s()
            wake_at_s = self._machine.wake_at_s
            if self._is_complete:
                self._is_complete = False
                hashes = await anyio.to_thread.run_sync(state.hashes)
                self._do(self._machine.verified(hashes == self.order.hashes, now_s))
            elif wake_at_s is not None and wake_at_s <= now_s:
                self._do(self._machine.peers(self._replicas(), now_s))
                self._do(self._machine.tick(now_s))
            elif self._events:
                await self._take(self._events.popleft())
            elif wake_at_s is not None:
                self._has_events = anyio.Event()
                with anyio.move_on_after(wake_at_s - now_s):
                    await self._has_events.wait()
        took_s = round(self._clock.now_s() - begun_s, 3)
        sources = dict(self._machine.sources)
        logger.info("state.fetched", extra={"stage": self._stage, "round": number, "took_s": took_s, "from": sources})
        return state

    def _replicas(self) -> dict[PeerId, Hop]:
        return {r.peer: r.hop for r in self._view().by_stage(self._stage) if r.peer != self._endpoint.peer_id}

    async def _take(self, event: Received | PeerLost) -> None:
        if isinstance(event, PeerLost):
            self._do(self._machine.lost(event.peer, self._clock.now_s()))
            return
        match event.message:
            case StateOffer(_, chunk_hashes):
                self._do(self._machine.offered(event.peer, chunk_hashes, self._clock.now_s()))
            case NoState():
                self._do(self._machine.refused(event.peer, self._clock.now_s()))
            case StateChunk(_, chunk):
                self._arrived = event.tensors[0]
                digest = await self._digest(chunk, self._arrived.data)
                self._do(self._machine.received(event.peer, chunk, digest, self._clock.now_s()))
                self._arrived = None
            case _:
                pass

    async def _digest(self, chunk: int, data: memoryview) -> bytes:
        if not 0 <= chunk < len(self._plan):
            return b""
        place = self._plan.place(chunk)
        if data.nbytes != place.stop - place.start:
            return b""
        if data.nbytes <= INLINE_BYTES:
            return hashlib.sha256(data).digest()
        return (await anyio.to_thread.run_sync(hashlib.sha256, data)).digest()

    def _do(self, effects: Sequence[TransferEffect]) -> None:
        stage, round, digest = self._stage, self.order.record.round, self.order.record_hash
        for effect in effects:
            match effect:
                case Ask(peer):
                    self._endpoint.introduce(self._replicas()[peer])
                    self._endpoint.post(peer, AskState(stage, digest))
                case Request(peer, chunk):
                    self._endpoint.post(peer, ReadState(digest, chunk))
                case Store(chunk):
                    if self._arrived is not None:
                        place = self._plan.place(chunk)
                        self._memory[place.vector][place.start : place.stop] = self._arrived.data
                case Verify():
                    self._is_complete = True
                case Done():
                    self._is_done = True
                case Distrust(peer, reason):
                    error = StateMismatch(f"peer {peer} does not give the state of record {round}: {reason}")
                    logger.warning("state.donor_distrusted", extra={"peer": peer, "stage": stage, "reason": str(error)})
                case Nobody():
                    reason = f"stage {stage}: nobody holds record {round}; waiting for a server that does"
                    logger.warning("state.nobody", extra={"stage": stage, "round": round, "reason": reason})
                case Late(num_missing):
                    reason = f"{num_missing} of {len(self._plan)} chunks are missing; everybody is asked again"
                    logger.warning("state.late", extra={"stage": stage, "round": round, "reason": reason})


def _bytes_of(vector: Tensor) -> memoryview:
    """The memory of a contiguous vector, to be written to."""
    return to_wire(vector).data
