"""The record on which a round is to end, from its proposal until every member has prepared it.

proposed --(step logs are journaled)--> PrepareRecord to all members --(RecordPrepared from each)--> complete

In large rings members pass it on (`passed_orders`). To whom it has not come in good time the coordinator tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from shoal.ids import Ballot, PeerId
from shoal.swarm.passed_orders import spread
from shoal.swarm.record_changes import changes
from shoal.swarm.records import Tip, build_record, record_hash
from shoal.swarm.round_effects import Journal, Send
from shoal.swarm.round_quorums import RoundQuorums
from shoal.swarm.round_settings import CloseRequest, RoundSettings
from shoal.swarm.sample_ranges import Ranges
from shoal.swarm.window_marks import longer
from shoal.wire.messages.round import Basis, Join, PrepareRecord, Record, RecordName, RecordPrepared, SignedRecord


class RecordPreparation:
    """At most one record. A new epoch of any stage needs a new record.

    Attributes:
        tip: stands once it is committed; None while no record is proposed.
    """

    def __init__(
        self,
        settings: RoundSettings,
        seal: Callable[[Record], SignedRecord],
        unseal: Callable[[SignedRecord], Record],
    ) -> None:
        self._run_id, self._codecs, self._passing = settings.run_id, settings.codecs, settings.passing
        self._seal, self._unseal = seal, unseal
        self.tip: Tip | None = None
        self._previous: Tip | None = None
        self._prepared: set[PeerId] = set()
        self._is_passed_on = False
        self._told_s: float | None = None  # when it was first looked whether the record has come to all

    def clear(self) -> None:
        """Nothing is proposed any more."""
        self.tip = None
        self._is_passed_on = False

    def propose(
        self,
        previous: Tip,
        ballot: Ballot,
        quorums: RoundQuorums,
        joins: Mapping[PeerId, Join],
        recorded: Ranges,
        restored: Mapping[int, Basis],
        request: CloseRequest,
    ) -> Journal:
        """Build the record (see `build_record`); what its members have joined with is journaled before anybody
        prepares it."""
        before = None if previous.signed is None else self._unseal(previous.signed)
        codec = ""
        if self._codecs is not None:
            members = {peer: joins[peer] for peer in quorums.members}
            codec = self._codecs.chosen("" if before is None else before.codec, members, request.trained_s)
        record = build_record(
            run_id=self._run_id,
            previous=previous,
            ballot=ballot,
            quorums=[quorum.final() for quorum in quorums.values()],
            joins=joins,
            recorded=recorded,
            generations=request.generations,
            restored=restored,
            eras=() if before is None else before.eras,
            keep=request.keep,
            codec=codec,
            marks=longer(b"" if before is None else before.marks, request.marks),
        )
        signed = self._seal(record)
        self.tip, self._previous = Tip(record.round, record_hash(signed), signed), previous
        self._prepared.clear()
        self._is_passed_on = False
        logs = {peer: (joins[peer].stage, joins[peer].log) for peer in sorted(quorums.members)}
        return Journal(record, self.tip.hash, logs)

    def journaled(self, digest: str, ballot: Ballot, rings: Iterable[Sequence[PeerId]]) -> list[Send]:
        """Have the members of these rings prepare the record, if it is this one that has been journaled."""
        if self.tip is None or self.tip.signed is None or self.tip.hash != digest:
            return []
        order = self._order(ballot, self.tip.signed)
        told = [send for ring in rings for send in spread([Send(peer, order) for peer in ring], ballot, self._passing)]
        self._is_passed_on, self._told_s = any(send.message is not order for send in told), None
        return told

    def repeat(self, ballot: Ballot, members: Collection[PeerId], now_s: float) -> list[Send]:
        """Tell the record itself to the members that have not prepared it for long: who should have passed it on to
        them may not have done it."""
        if not self._is_passed_on or self.tip is None or self.tip.signed is None:
            return []
        told_s = now_s if self._told_s is None else self._told_s
        is_late = now_s - told_s >= self._passing.patience_s
        self._told_s = now_s if is_late else told_s
        order = self._order(ballot, self.tip.signed) if is_late else None
        return [Send(peer, order) for peer in sorted(set(members) - self._prepared) if order is not None]

    def _order(self, ballot: Ballot, signed: SignedRecord) -> PrepareRecord:
        """All members hold the record before, as they have joined on top of it: they are told what differs."""
        if self._previous is None or self._previous.signed is None:
            return PrepareRecord(ballot, signed)
        fresh, copied = changes(signed.body, self._previous.signed.body)
        base = RecordName(self._previous.round, self._previous.hash)
        return PrepareRecord(ballot, msgspec.structs.replace(signed, body=fresh), base, copied)

    def note(self, peer: PeerId, message: RecordPrepared) -> None:
        """A member has prepared a record; of another one it says nothing about this one."""
        if self.tip is not None and message.record_hash == self.tip.hash:
            self._prepared.add(peer)

    def is_prepared_by(self, members: Collection[PeerId]) -> bool:
        """Whether all of them have prepared it."""
        return self.tip is not None and self._prepared >= set(members)
