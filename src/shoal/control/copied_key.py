"""Notices that another process has this peer's key: its machine was cloned, or its files were copied. No I/O.

a record of mine that I did not sign -> signed once more: who signs lives -> the younger of both yields
"""

from __future__ import annotations

from typing import Final

from shoal.control.membership import sequence_at
from shoal.control.records import TTL_S, Record, VerifiedRecord
from shoal.ids import PeerId

_SET_BACK_S: Final = 5.0
"""So far may the clock have been set back since an earlier process of this peer has signed its last record."""
_YIELD_S: Final = TTL_S
"""Where two processes are one peer the younger one takes another identity, if it sees the other one in time."""


class CopyWatch:
    """Looks at the records that the swarm has of one peer."""

    def __init__(self, peer: PeerId) -> None:
        self._peer = peer
        self._first_seen = 0
        self._is_copied = self._yields = False

    def look(self, opened: VerifiedRecord, own: Record | None) -> bool | None:
        """Return whether this process is to be somebody else, when that is new; None: there is nothing new.

        Nobody else can sign, and an earlier process of this host has signed nothing since this one began.

        Args:
            opened: a record of any peer.
            own: what this process has announced of that kind.
        """
        theirs, ours = (getattr(record, "join_unix_s", None) for record in (opened.record, own))
        if opened.peer != self._peer or theirs is None or ours is None or theirs == ours or self._yields:
            return None
        if opened.sequence < sequence_at(ours + _SET_BACK_S):
            return None
        self._first_seen = self._first_seen or opened.sequence
        if opened.sequence == self._first_seen:
            return None  # it is once more that one has signed which lives
        was_copied, self._is_copied = self._is_copied, True
        # Of two the one that announces itself less often, or whose clock is behind, may see the other one alone.
        self._yields = theirs < ours or opened.sequence > self._first_seen + sequence_at(_YIELD_S)
        return self._yields if self._yields or not was_copied else None
