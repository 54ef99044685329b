"""What a newcomer fetches while records go on being committed: a pure plan, records in, pieces out.

    whole state of D_r --> average of round r+1 --> average of round r+2 --> ... --> state of the newest record

The outer step from one record to the next is a function of the state before and of the averages that the ring has made,
so a newcomer that has the state of D_r needs only those of the rounds since. They are half the size of a state. A
newcomer thus converges if its link brings the averages of a round in less time than a round takes; one that is slower
could not take part in the ring either.

A piece that nobody keeps any more is given up, and the whole state of the newest record is fetched instead.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from shoal.swarm.round_effects import Fetch
from shoal.wire.messages.round import StageHashes


class Piece(NamedTuple):
    """What is transferred at a time: the whole state of a record, or the averages that its round's ring has made."""

    order: Fetch
    is_average: bool


class StateChain:
    """The way from nothing, or from the state of the record before, to the newest record.

    Args:
        order: names the record that is wanted.
        base: hashes of the state of the record before it, if that state is here and known to be right.

    Attributes:
        newest: the record at which the chain ends.
    """

    def __init__(self, order: Fetch, base: StageHashes | None = None) -> None:
        self.newest = order
        self._todo = deque([order])
        self._here = base
        self._pass_over()

    @property
    def piece(self) -> Piece | None:
        """What is to be fetched now; None when the state of the newest record is here."""
        return Piece(self._todo[0], self._here is not None) if self._todo else None

    def follow(self, order: Fetch) -> bool:
        """A record is committed; returns whether it is the one after the newest, and is aimed at from now on."""
        if order.starts_anew or order.record.previous != self.newest.record_hash:
            return False
        self.newest = order
        self._todo.append(order)
        self._pass_over()
        return True

    def reached(self) -> None:
        """The present piece is here, and what it leads to is verified."""
        self._here = self._todo.popleft().hashes
        self._pass_over()

    def is_lost(self, is_offered: bool, is_gone: bool) -> bool:
        """Whether the present piece is to be given up.

        Args:
            is_offered: a donor offers the piece now.
            is_gone: a donor has gone past the piece and does not keep it.
        """
        return is_gone and not is_offered and (self._here is not None or len(self._todo) > 1)

    def restart(self) -> None:
        """Give up what is here: the whole state of the newest record is wanted."""
        self._todo = deque([self.newest])
        self._here = None

    def _pass_over(self) -> None:
        """Where nobody of the stage has trained the state has stayed, and there are no averages."""
        while self._todo and self._todo[0].hashes == self._here:
            self._todo.popleft()
