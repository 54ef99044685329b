"""What a holder of a stage's state gives to others: the state of its record, and what newcomers need beside it.

A replica that was left behind often hears of a record before this one has swapped to it; `Contents` remembers that it
has asked.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from shoal.averaging.contents import Contents, Offered, Request
from shoal.averaging.replica_state import Contribution, OuterState
from shoal.events.base import emit
from shoal.events.state import StateOffered
from shoal.ids import PeerId
from shoal.swarm.state_keeping import PieceKey, StateKeeping
from shoal.wire.messages.transfer import ContentKind, ContentName, Want

logger = logging.getLogger(__name__)


def content_of(stage: int, record_hash: str, is_average: bool = False) -> ContentName:
    """Return the name of the state that a record names for a stage, or of the averages of its round."""
    return ContentName(ContentKind.AVERAGE if is_average else ContentKind.STATE, stage, record_hash)


class StateDonor:
    """Offers the state of one stage.

    Args:
        num_fragments: Of the parameters, one of which each round averages.
    """

    def __init__(self, contents: Contents, stage: int, num_fragments: int = 1) -> None:
        self._contents = contents
        self._stage = stage
        self._num_fragments = num_fragments
        self._keeping = StateKeeping(num_fragments)

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
            self._contents.drop(content_of(self._stage, *key))
        self._contents.base_rounds[self._stage] = round
        self._offer(PieceKey(record_hash, False), state)
        if average is not None and self._keeping.keeps(PieceKey(record_hash, True)):
            self._offer(PieceKey(record_hash, True), average)

    def release(self) -> None:
        """Offer nothing any more: this machine's memory is not to be trusted."""
        for key in self._keeping.pieces:
            self._contents.drop(content_of(self._stage, *key))
        self._keeping = StateKeeping(self._num_fragments)
        self._contents.base_rounds.pop(self._stage, None)

    def _offer(self, key: PieceKey, vectors: Sequence[Tensor]) -> None:
        chunk_bytes, memory = self._contents.chunk_bytes, self._contents.memory
        offered = Offered(vectors, chunk_bytes, partial(self._asked, key), memory=memory)
        self._contents.offer(content_of(self._stage, *key), offered)

    def _asked(self, key: PieceKey, peer: PeerId, request: Request, num_chunks: int) -> None:
        self._keeping.asked(key, peer)
        if isinstance(request, Want):
            emit(logger, StateOffered(peer, key.record_hash, key.is_average, num_chunks))
