"""The record on which a round is to end, from its proposal until every member holds it.

proposed --(step logs are journaled)--> Hold to all members --(Held from each)--> complete
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from shoal.ids import Ballot, PeerId
from shoal.swarm.records import Tip, record_hash
from shoal.swarm.round_effects import Journal, Send
from shoal.wire.messages.round import Held, Hold, Join, Record, SignedRecord


class HeldRecord:
    """At most one record at a time; a new epoch of any stage makes another one necessary.

    Attributes:
        tip: What stands once it is decided; None while nothing is proposed.
    """

    def __init__(self) -> None:
        self.tip: Tip | None = None
        self._holders: set[PeerId] = set()

    def clear(self) -> None:
        """Nothing is proposed any more."""
        self.tip = None

    def propose(
        self, record: Record, signed: SignedRecord, members: Collection[PeerId], joins: Mapping[PeerId, Join]
    ) -> Journal:
        """Take a record; what its members have joined with is journaled before anybody holds it."""
        self.tip = Tip(record.round, record_hash(signed), signed)
        self._holders.clear()
        logs = {peer: (joins[peer].stage, joins[peer].log) for peer in sorted(members)}
        return Journal(record, self.tip.hash, logs)

    def journaled(self, digest: str, ballot: Ballot, members: Iterable[PeerId]) -> list[Send]:
        """Have the members hold the record, if it is this one that has been journaled."""
        if self.tip is None or self.tip.signed is None or self.tip.hash != digest:
            return []
        return [Send(peer, Hold(ballot, self.tip.signed)) for peer in sorted(members)]

    def note(self, peer: PeerId, message: Held) -> None:
        """A member holds a record; of another one it says nothing about this one."""
        if self.tip is not None and message.record_hash == self.tip.hash:
            self._holders.add(peer)

    def is_held_by(self, members: Collection[PeerId]) -> bool:
        """Whether all of them hold it."""
        return self.tip is not None and self._holders >= set(members)
