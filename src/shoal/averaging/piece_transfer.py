"""The transfer of one piece of a state: connects the machine to network, clock and memory.

endpoint -> put -> StateTransfer -> requests to the donors; chunks into the given vectors -> verify
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import anyio
import anyio.to_thread
from torch import Tensor

from shoal.clock import Clock
from shoal.codec.raw import to_wire
from shoal.errors import StateMismatch
from shoal.ids import PeerId
from shoal.swarm.state_chain import Piece
from shoal.swarm.state_transfer import (
    AskDonor,
    ChunkPlan,
    Distrust,
    Late,
    Nobody,
    Request,
    StateTransfer,
    Store,
    TransferDone,
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

Answer = StateOffer | NoState | StateChunk
"""What a donor sends."""


class TransferContext(NamedTuple):
    """What all transfers of one replica share; see `state_sync.StateSync`."""

    endpoint: Endpoint
    stage: int
    view: Callable[[], SwarmView]
    clock: Clock
    settings: TransferSettings
    chunk_bytes: int


class PieceTransfer:
    """One transfer: the machine, what has arrived, and the vectors that it goes into.

    Args:
        vectors: The transfer writes into them.
        verify: Whether the vectors hold what the record names.
        is_lost: Whether to give up, given whether a donor offers the piece, and whether a donor has gone past it.
    """

    def __init__(
        self,
        context: TransferContext,
        piece: Piece,
        vectors: Sequence[Tensor],
        verify: Callable[[Sequence[Tensor]], Awaitable[bool]],
        is_lost: Callable[[bool, bool], bool],
    ) -> None:
        self._context = context
        self._endpoint = context.endpoint
        self._clock = context.clock
        self._piece = piece
        self._vectors = vectors
        self._verify = verify
        self._is_lost = is_lost
        self._plan = ChunkPlan([vector.nbytes for vector in vectors], context.chunk_bytes)
        self._machine = StateTransfer(len(self._plan), context.settings)
        self._memory = [to_wire(vector).data for vector in vectors]
        self._events: deque[Received | PeerLost] = deque()
        self._has_events = anyio.Event()
        self._arrived: WireTensor | None = None
        self._is_complete = self._is_done = self._is_gone = False

    def is_about(self, message: Answer) -> bool:
        """Whether an answer is about this piece."""
        return message.record_hash == self._piece.order.record_hash and message.is_average == self._piece.is_average

    @property
    def distrusted(self) -> frozenset[PeerId]:
        """See `StateTransfer.distrusted`."""
        return self._machine.distrusted

    def put(self, event: Received | PeerLost) -> None:
        """Take an answer, or a loss."""
        self._events.append(event)
        self.wake()

    def wake(self) -> None:
        """Look again whether it is still of use."""
        self._has_events.set()

    async def run(self) -> bool:
        """Return True when the vectors hold the piece, False when it is given up.

        That is when nobody keeps it, or averages lead to something else than the record. The whole state of the newest
        record is waited for, and who gives it wrong is asked for nothing more.
        """
        number, begun_s = self._piece.order.record.round, self._clock.now_s()
        fields = {"stage": self._context.stage, "round": number, "average": self._piece.is_average}
        logger.info("state.fetching", extra={**fields, "chunks": len(self._plan)})
        while not self._is_done:
            now_s = self._clock.now_s()
            wake_at_s = self._machine.wake_at_s
            if self._is_complete:
                self._is_complete = False
                is_right = await self._verify(self._vectors)
                if not is_right and self._piece.is_average:
                    return False  # where the state before is not what the round began from, that is nobody's lie
                self._do(self._machine.verified(is_right, self._clock.now_s()))
            elif self._is_lost(self._machine.is_offered, self._is_gone):
                return False
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
        logger.info("state.fetched", extra={**fields, "took_s": took_s, "from": dict(self._machine.sources)})
        return True

    def _replicas(self) -> dict[PeerId, Hop]:
        view = self._context.view()
        # A client keeps the state of a stage whose last server has left.
        holders = (*view.by_stage(self._context.stage), *view.clients)
        return {holder.peer: holder.hop for holder in holders if holder.peer != self._endpoint.peer_id}

    async def _take(self, event: Received | PeerLost) -> None:
        if isinstance(event, PeerLost):
            self._do(self._machine.lost(event.peer, self._clock.now_s()))
            return
        match event.message:
            case StateOffer(_, chunk_hashes):
                self._do(self._machine.offered(event.peer, chunk_hashes, self._clock.now_s()))
            case NoState(_, base_round):
                self._is_gone |= base_round >= self._piece.order.record.round
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
        order, is_average = self._piece
        stage, round, digest = self._context.stage, order.record.round, order.record_hash
        for effect in effects:
            match effect:
                case AskDonor(peer):
                    self._endpoint.introduce(self._replicas()[peer])
                    self._endpoint.post(peer, AskState(stage, digest, is_average))
                case Request(peer, chunk):
                    self._endpoint.post(peer, ReadState(digest, chunk, is_average))
                case Store(chunk):
                    if self._arrived is not None:
                        place = self._plan.place(chunk)
                        self._memory[place.vector][place.start : place.stop] = self._arrived.data
                case Verify():
                    self._is_complete = True
                case TransferDone():
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
