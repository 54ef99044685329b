"""A newcomer's end of a state transfer: what is fetched in which order, until the newest record's state is here.

    Fetch -> StateChain -> transfer of the whole state -> transfers of averages -> ... -> compared with each record

Nobody waits for it, and it gives up only when it is cancelled: as long as nobody holds the bytes it waits, and says so.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass

import anyio.to_thread

from shoal.averaging.content_fetch import ContentFetch
from shoal.averaging.contents import Contents
from shoal.averaging.replica_state import Contribution, OuterState
from shoal.averaging.state_donor import content_of
from shoal.errors import StateMismatch
from shoal.events.base import emit
from shoal.events.state import StateDonorDistrusted, StateFetched, StateFetching, StateLate, StateNobody, StateOvertaken
from shoal.ids import PeerId
from shoal.optim.fragments import Fragment
from shoal.swarm.content_transfer import Distrust, Late, Nobody, TransferSettings
from shoal.swarm.round_effects import Fetch
from shoal.swarm.state_chain import Piece, StateChain
from shoal.swarm.state_keeping import is_too_slow
from shoal.swarm.view import SwarmView
from shoal.wire.messages import Hop
from shoal.wire.messages.round import StageHashes

logger = logging.getLogger(__name__)

Successor = Callable[[OuterState, Contribution, Fragment], Awaitable[OuterState]]
"""The outer step: the state that follows from one and the averages of the round after it, which has this fragment."""

TakeState = Callable[[OuterState, StageHashes], Awaitable[None]]
"""Given a state that is complete, with its hashes."""


def donors(view: SwarmView, stage: int, me: PeerId) -> dict[PeerId, Hop]:
    """Return who may have the state of a stage, but for the peer that asks: its replicas, a client that keeps it since
    its last server has left, and mirrors, which keep that of every stage."""
    holders = (*view.by_stage(stage), *view.clients, *view.mirrors)
    return {holder.peer: holder.hop for holder in holders if holder.peer != me}


class _PieceFetch(ContentFetch):
    """A piece of the way to the newest record.

    Args:
        base: the state that an average leads on from; None: the piece is a whole state.

    Attributes:
        state: that the piece leads to, once all of it has come; not the record's if the transfer is given up then.
    """

    def __init__(
        self,
        sync: StateSync,
        chain: StateChain,
        piece: Piece,
        template: OuterState,
        base: OuterState | None,
        successor: Successor,
    ) -> None:
        self._fragment = sync.fragment(piece.order.record.round)
        like = template if base is None else template.averages_like(self._fragment)
        contents = sync.contents
        name = content_of(sync.stage, piece.order.record_hash, piece.is_average)
        self._vectors = tuple(contents.memory.empty(vector.numel(), vector.dtype) for vector in like)
        ends = (contents.endpoint, contents.clock)
        super().__init__(*ends, name, self._vectors, sync.settings, contents.chunk_bytes)
        self.state: OuterState | None = None
        self._sync = sync
        self._chain = chain
        self._piece = piece
        self._round = piece.order.record.round
        self._base = base
        self._successor = successor

    @property
    def leads_elsewhere(self) -> bool:
        """Whether averages have come that do not lead to the record.

        Where the state before is not what the round began from, that is nobody's lie.
        """
        return self._piece.is_average and self.state is not None

    def peers(self) -> Mapping[PeerId, Hop]:
        return donors(self._sync.view(), self._sync.stage, self._sync.contents.endpoint.peer_id)

    async def is_right(self) -> bool:
        """Compare the state that follows with the record."""
        if self._base is None:
            self.state = OuterState(*self._vectors)
        else:
            self.state = await self._successor(self._base, Contribution(*self._vectors), self._fragment)
        return await anyio.to_thread.run_sync(self.state.hashes) == self._piece.order.hashes

    def is_lost(self, is_offered: bool, base_round: int) -> bool:
        """The whole state of the newest record is waited for, and who gives it wrong is asked for nothing more."""
        return self.leads_elsewhere or self._chain.is_lost(is_offered, is_gone=base_round >= self._round)

    def report(self, effect: Distrust | Nobody | Late) -> None:
        """Say what goes wrong."""
        stage, round = self._sync.stage, self._round
        match effect:
            case Distrust(peer, reason):
                error = StateMismatch(f"peer {peer} does not give the state of record {round}: {reason}")
                emit(logger, StateDonorDistrusted(peer, stage, str(error)))
            case Nobody():
                reason = f"stage {stage}: nobody holds record {round}; waiting for a server that does"
                emit(logger, StateNobody(stage, round, reason))
            case Late(num_missing, num_chunks):
                reason = f"{num_missing} of {num_chunks} chunks are missing; everybody is asked again"
                emit(logger, StateLate(stage, round, reason))


@dataclass(eq=False, repr=False)
class StateSync:
    """Fetches states of one stage.

    Attributes:
        view: Returns the swarm as it is now, to find the holders.
        num_fragments: Of the parameters, one of which each round averages.
    """

    contents: Contents
    stage: int
    _: KW_ONLY
    view: Callable[[], SwarmView]
    settings: TransferSettings
    num_fragments: int = 1

    def __post_init__(self) -> None:
        self._chain: StateChain | None = None
        self._fetch: _PieceFetch | None = None

    def fragment(self, round: int) -> Fragment:
        """What a round averages."""
        return Fragment.of_round(round, self.num_fragments)

    @property
    def distrusted(self) -> frozenset[PeerId]:
        """Who has given wrong bytes of what is being fetched; see `ContentTransfer.distrusted`."""
        return frozenset() if self._fetch is None else self._fetch.machine.distrusted

    def follow(self, order: Fetch) -> bool:
        """A newer record is committed; returns whether what is being fetched leads to it, and `fetch` goes on to it."""
        if self._chain is None or not self._chain.follow(order):
            return False
        if self._fetch is not None:
            self._fetch.wake()
        return True

    async def fetch(
        self,
        order: Fetch,
        template: OuterState,
        base: tuple[OuterState, StageHashes] | None,
        successor: Successor,
        take: TakeState,
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
                    fetch = _PieceFetch(self, chain, piece, template, base_state, successor)
                    if await self._get(piece, fetch):
                        state = fetch.state
                        chain.reached()
                    else:
                        averages = template.averages_like(self.fragment(chain.newest.record.round))
                        _say_lost(self.stage, piece, chain.newest, averages, fetch.leads_elsewhere, self.num_fragments)
                        chain.restart()
                newest = chain.newest
                if state is not None:
                    await take(state, newest.hashes)
                if chain.newest is newest:
                    return newest
        finally:
            if self._chain is chain:
                self._chain = self._fetch = None

    async def _get(self, piece: Piece, fetch: _PieceFetch) -> bool:
        """Get one piece; returns whether it is here, or was given up.

        That is when nobody keeps it, or averages lead to something else than the record.
        """
        clock = self.contents.clock
        begun_s = clock.now_s()
        self._fetch = fetch
        what = (self.stage, piece.order.record.round, piece.is_average)
        emit(logger, StateFetching(*what, fetch.num_chunks))
        if not await self.contents.fetch(fetch):
            return False
        took_s = round(clock.now_s() - begun_s, 3)
        emit(logger, StateFetched(*what, took_s, dict(fetch.machine.sources)))
        return True


def _say_lost(
    stage: int, piece: Piece, newest: Fetch, averages: Contribution, is_wrong: bool, num_fragments: int
) -> None:
    round, newest_round = piece.order.record.round, newest.record.round
    average_bytes = sum(vector.nbytes for vector in averages)
    if is_wrong:
        cause = f"The averages of record {round} have not led to the state that it names"
    elif is_too_slow(piece.is_average, round, newest_round, num_fragments):
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
    emit(logger, StateOvertaken(stage, round, reason))
