"""What a holder keeps for newcomers whose transfer takes longer than a round: a pure rule, no memory of its own.

Held is the state of the newest record. One older state is kept as long as somebody reads it, and with it the averages
of the rounds since (see `swarm.state_chain`). As nobody says when he has finished, what was not asked for in the last
rounds is dropped; and so is the oldest of what is more than two older states would be: that is enough for every
newcomer that is fast enough to arrive.
"""

from __future__ import annotations

from typing import NamedTuple

GRACE_ROUNDS = 2
"""A piece is dropped after so many records without a request for it."""
MAX_AVERAGES = 4
"""So many are kept beside the state that is held; an older state, which is about twice as large, counts as two."""


class PieceKey(NamedTuple):
    """Names a piece: the whole state of a record, or the averages of its round."""

    record_hash: str
    is_average: bool


class _Kept:
    def __init__(self, round: int) -> None:
        self.round = round
        self.asked_in_round = -GRACE_ROUNDS


class StateKeeping:
    """The pieces of one holder."""

    def __init__(self) -> None:
        self._round = 0
        self._pieces: dict[PieceKey, _Kept] = {}
        self._followed_in_round = -GRACE_ROUNDS

    @property
    def is_followed(self) -> bool:
        """Whether some newcomer is on its way: then the averages of the next round may be needed."""
        return self._followed_in_round > self._round - GRACE_ROUNDS

    def keeps(self, key: PieceKey) -> bool:
        """Whether a piece is held or kept."""
        return key in self._pieces

    def asked(self, key: PieceKey) -> None:
        """Somebody has asked for a piece that is held or kept, or for a part of it."""
        self._followed_in_round = self._round
        self._pieces[key].asked_in_round = self._round

    def swapped(self, record_hash: str, round: int, has_average: bool) -> list[PieceKey]:
        """The holder has the state of a newer record; returns what it is to drop.

        Args:
            record_hash: Of the record.
            round: Its number.
            has_average: The averages that led to it are at hand.
        """
        old, was_followed = self._pieces, self.is_followed
        self._round = round
        self._pieces = {}
        room = MAX_AVERAGES
        if has_average and was_followed:
            self._pieces[PieceKey(record_hash, is_average=True)] = _Kept(round)
            room -= 1
        averages = sorted(((kept.round, key) for key, kept in old.items() if key.is_average), reverse=True)
        for _, key in averages if was_followed else ():
            if room:
                self._pieces[key] = old[key]
                room -= 1
        read = self._read_states(old)
        if read and room > 1:
            self._pieces[read[0]] = old[read[0]]
        self._pieces[PieceKey(record_hash, is_average=False)] = _Kept(round)
        return [key for key in old if key not in self._pieces]

    def _read_states(self, pieces: dict[PieceKey, _Kept]) -> list[PieceKey]:
        """Those that somebody still reads; first the one that was asked for last, of these the oldest."""
        recent = self._round - GRACE_ROUNDS
        found = [(-kept.asked_in_round, kept.round, key) for key, kept in pieces.items() if not key.is_average]
        return [key for asked_in_round, _, key in sorted(found) if -asked_in_round >= recent]
