"""What a holder keeps for newcomers whose transfer takes longer than a round: a pure rule, no memory of its own.

Held is the state of the newest record. A newcomer reads one piece after the other (see `swarm.state_chain`), so what it
has asked for last says what it needs: that piece, and the averages of all rounds since. What no newcomer needs is
dropped, and there is room for no more than two older states would take. Where that is not enough for all, they are
served in the order of what they read, the oldest first. So who has come furthest goes on until he arrives, and then it
is the next one's turn; till then that one begins again with a newer state. As nobody says when he has finished, he
counts for two records more.

Where a round averages a fragment of the parameters, averages are as many times smaller as there are fragments, and the
rounds as many times shorter: a state is worth so many more averages, and all that is counted in rounds goes with them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from shoal.ids import PeerId

GRACE_ROUNDS = 2
"""Who has asked for nothing since so many records needs nothing any more, where a round averages all parameters."""
MAX_AVERAGES = 4
"""So many, of all parameters, are kept beside the state that is held."""
_STATE_AVERAGES = 2
"""An older state is about twice as large as averages of all parameters, and counts as two."""


class PieceKey(NamedTuple):
    """Names a piece: the whole state of a record, or the averages of its round."""

    record_hash: str
    is_average: bool


class _Reader(NamedTuple):
    """What a newcomer has asked for last, and which record was held then."""

    key: PieceKey
    asked_in_round: int


class StateKeeping:
    """The pieces of one holder, and who reads them."""

    def __init__(self, num_fragments: int = 1) -> None:
        """Hold nothing yet.

        Args:
            num_fragments: of the parameters, one of which each round averages.
        """
        self._num_fragments = num_fragments
        self._round = 0
        self._pieces: dict[PieceKey, int] = {}  # with the rounds of their records
        self._readers: dict[PeerId, _Reader] = {}

    @property
    def is_followed(self) -> bool:
        """Whether some newcomer is on its way: then the averages of the next round may be needed."""
        return bool(self._reading(self._round + 1))

    @property
    def pieces(self) -> Collection[PieceKey]:
        """All that is held or kept."""
        return self._pieces.keys()

    def keeps(self, key: PieceKey) -> bool:
        """Whether a piece is held or kept."""
        return key in self._pieces

    def asked(self, key: PieceKey, reader: PeerId) -> None:
        """A newcomer has asked for a piece that is held or kept, or for a part of it."""
        self._readers[reader] = _Reader(key, self._round)

    def swapped(self, record_hash: str, round: int, has_average: bool) -> list[PieceKey]:
        """The holder has the state of a newer record; returns what it is to drop.

        Args:
            has_average: the averages that led to the record are at hand.
        """
        old = self._pieces
        here = dict(old)
        if has_average:
            here[PieceKey(record_hash, is_average=True)] = round
        self._readers = self._reading(round)
        kept = self._needed(here)
        self._round = round
        self._pieces = {key: here[key] for key in here if key in kept}
        self._pieces[PieceKey(record_hash, is_average=False)] = round
        return [key for key in old if key not in self._pieces]

    def _reading(self, round: int) -> dict[PeerId, _Reader]:
        """Those who still read something when the record of `round` is there."""
        recent = round - GRACE_ROUNDS * self._num_fragments
        return {peer: reader for peer, reader in self._readers.items() if reader.asked_in_round >= recent}

    def _needed(self, here: dict[PieceKey, int]) -> set[PieceKey]:
        """What to keep of the pieces that are here: what readers need, the oldest first, as far as there is room."""
        keys = {reader.key for reader in self._readers.values() if reader.key in here}
        kept: set[PieceKey] = set()
        # Of one round averages come before the state: who reads them has a state already. Then nobody who comes later
        # takes from those before him: all averages that he needs are of later rounds.
        for key in sorted(keys, key=lambda key: (here[key], not key.is_average)):
            since = {other for other, round in here.items() if other.is_average and round > here[key]}
            # A part of it is of no use: the chain of averages would have a gap, and all would be fetched again.
            together = kept | {key} | since
            size = sum(_size(other.is_average, self._num_fragments) for other in together)
            if size <= MAX_AVERAGES * self._num_fragments:
                kept = together
        return kept


def _size(is_average: bool, num_fragments: int) -> int:
    """Of a piece, in averages of one round."""
    return 1 if is_average else _STATE_AVERAGES * num_fragments


def is_too_slow(is_average: bool, round: int, newest_round: int, num_fragments: int = 1) -> bool:
    """Whether a reader of this piece has not got it in the time for which it is kept, if he is the only one."""
    num_since = newest_round - round
    return _size(is_average, num_fragments) + num_since > MAX_AVERAGES * num_fragments
