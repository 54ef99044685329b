"""A newcomer's end of a state transfer: what is fetched in which order, until the newest record's state is here.

    Fetch -> StateChain -> PieceTransfer: whole state -> PieceTransfer: averages -> ... -> compared with each record

Nobody waits for it, and it gives up only when it is cancelled: as long as nobody holds the bytes it waits, and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio.to_thread
import torch
from torch import Tensor

from shoal.averaging.piece_transfer import Answer, PieceTransfer, TransferContext
from shoal.averaging.replica_state import Contribution, OuterState
from shoal.clock import Clock
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.swarm.round_effects import Fetch
from shoal.swarm.state_chain import Piece, StateChain
from shoal.swarm.state_keeping import is_too_slow
from shoal.swarm.state_transfer import CHUNK_BYTES, TransferSettings
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, PeerLost, Received
from shoal.wire.messages.round import StageHashes, StateChunk

logger = logging.getLogger(__name__)

Successor = Callable[[OuterState, Contribution], Awaitable[OuterState]]
"""The outer step: the state that follows from one and the averages of the round after it."""

Take = Callable[[OuterState, StageHashes], Awaitable[None]]
"""Given a state that is complete, with its hashes."""


class StateSync:
    """Fetches states of one stage.

    Args:
        view: Returns the swarm as it is now, to find the holders.
        chunk_bytes: The same on all replicas.
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
        self._context = TransferContext(endpoint, stage, view, clock, settings, chunk_bytes)
        self._chain: StateChain | None = None
        self._transfer: PieceTransfer | None = None

    @property
    def distrusted(self) -> frozenset[PeerId]:
        """Who has given wrong bytes of what is being fetched; see `StateTransfer.distrusted`."""
        return frozenset() if self._transfer is None else self._transfer.distrusted

    def receive(self, event: Received) -> bool:
        """Take an answer; what comes late is dropped. See `transport.dispatch.Handler`.

        Raises:
            RemoteProtocolError: A chunk comes without its bytes.
        """
        message = event.message
        if not isinstance(message, Answer):
            return False
        if isinstance(message, StateChunk) and [tensor.dtype for tensor in event.tensors] != ["uint8"]:
            raise RemoteProtocolError(f"{event.peer} sent chunk {message.chunk} not as one tensor of bytes")
        if self._transfer is not None and self._transfer.is_about(message):
            self._transfer.put(event)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """See `transport.dispatch.Handler`."""
        if self._transfer is not None:
            self._transfer.put(PeerLost(peer, "lost"))

    def follow(self, order: Fetch) -> bool:
        """A newer record is committed; returns whether what is being fetched leads to it, and `fetch` goes on to it."""
        if self._chain is None or not self._chain.follow(order):
            return False
        if self._transfer is not None:
            self._transfer.wake()
        return True

    async def fetch(
        self,
        order: Fetch,
        template: OuterState,
        base: tuple[OuterState, StageHashes] | None,
        successor: Successor,
        take: Take,
    ) -> Fetch:
        """Get the state that a record names for this stage, or that of a newer record that it was told to `follow`.

        One call at a time: a caller that wants another state cancels it.

        Args:
            order: Names the record and the hashes of its state.
            template: Has the sizes and types of the state.
            base: The state of the record before, with its hashes; None: it is not here.
            take: Is given the state, verified; and again if a newer record has been committed meanwhile.

        Returns:
            The order of the record whose state was taken last.
        """
        state, hashes = (None, None) if base is None else base
        chain = self._chain = StateChain(order, hashes)
        try:
            while True:
                while (piece := chain.piece) is not None:
                    base_state = state if piece.is_average else None
                    is_here, found = await self._get(chain, piece, template, base_state, successor)
                    if is_here:
                        state = found
                        chain.reached()
                    else:
                        is_wrong = piece.is_average and found is not None
                        _say_lost(self._context.stage, piece, chain.newest, template, is_wrong)
                        chain.restart()
                newest = chain.newest
                if state is not None:
                    await take(state, newest.hashes)
                if chain.newest is newest:
                    return newest
        finally:
            if self._chain is chain:
                self._chain = self._transfer = None

    async def _get(
        self, chain: StateChain, piece: Piece, template: OuterState, base: OuterState | None, successor: Successor
    ) -> tuple[bool, OuterState | None]:
        """Get one piece; returns whether it is here, and the state that it leads to, if all of it has come.

        Without the one there may be the other: a state that is not the record's.
        """
        result: OuterState | None = None

        async def verify(vectors: Sequence[Tensor]) -> bool:
            nonlocal result
            result = OuterState(*vectors) if base is None else await successor(base, Contribution(*vectors))
            return await anyio.to_thread.run_sync(result.hashes) == piece.order.hashes

        like = template if base is None else Contribution(template.parameters_N, template.floats_F, template.integers_I)
        vectors = tuple(torch.empty_like(vector) for vector in like)
        transfer = self._transfer = PieceTransfer(self._context, piece, vectors, verify, chain.is_lost)
        is_here = await transfer.run()
        return is_here, result


def _say_lost(stage: int, piece: Piece, newest: Fetch, template: OuterState, is_wrong: bool) -> None:
    round, newest_round = piece.order.record.round, newest.record.round
    average_bytes = sum(vector.nbytes for vector in template) - template.momentum_N.nbytes
    if is_wrong:
        cause = f"The averages of record {round} have not led to the state that it names"
    elif is_too_slow(piece.is_average, round, newest_round):
        cause = (
            f"The link is too slow: the transfer can only end if it brings {average_bytes / 1e6:.1f} MB, the averages "
            "of one round, in less time than a round takes: raise diloco.inner_steps or use a faster link"
        )
    else:
        cause = (
            "The link is not the cause: the servers that kept it have gone, or have room only for what newcomers read "
            "that came before this one; it arrives after them"
        )
    what = f"stage {stage}: nobody has what leads to record {round} and on"
    reason = f"{what}; the transfer starts again with record {newest_round}. {cause}"
    logger.warning("state.overtaken", extra={"stage": stage, "round": round, "reason": reason})
