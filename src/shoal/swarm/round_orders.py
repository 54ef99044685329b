"""What a coordinator orders a replica to do in a round, and what the replica brings to it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.record_chains import Unseal, is_before
from shoal.swarm.record_changes import completed
from shoal.swarm.records import Tip, record_hash
from shoal.swarm.view import NO_BASE
from shoal.wire.messages.round import (
    AskRound,
    Basis,
    Close,
    CommitRecord,
    Join,
    LinkReport,
    Move,
    OrderNamed,
    Payload,
    PrepareRecord,
    Propose,
    QuorumTag,
    Record,
    Resolve,
    Restore,
    SignedRecord,
    StageHashes,
)
from shoal.wire.messages.step import StepEntry, StepsTrained

Order = AskRound | Close | Resolve | Propose | PrepareRecord | CommitRecord | Restore | OrderNamed | Move
"""What only a coordinator sends."""

NO_BYTES = Basis(NO_BASE, StageHashes("", "", ""))
"""What a replica has whose memory does not hold what it should."""


MAX_BALLOTS_AHEAD = 1 << 32
"""By so many are ballots never taken that a peer has not heard of: each is the next one after the highest."""


def check_ballot(sender: PeerId, ballot: Ballot, promised: Ballot) -> None:
    """Check that a coordinator acts under a ballot that it can have taken.

    Raises:
        RemoteProtocolError: It is another peer's, or so high that nobody could lead after it.
    """
    if ballot.peer != sender:
        raise RemoteProtocolError(f"{sender} used the ballot of {ballot.peer}")
    check_number(sender, ballot, promised)


def check_number(sender: PeerId, ballot: Ballot, known: Ballot) -> None:
    """Check that there are ballots enough above one that a peer names.

    Raises:
        RemoteProtocolError: There may be none.
    """
    if ballot.number - known.number > MAX_BALLOTS_AHEAD:
        raise RemoteProtocolError(f"{sender} names ballot {ballot.number}, and {known.number} is the highest until now")


def whole_record(message: PrepareRecord, tip: Tip) -> SignedRecord | None:
    """The record that is to be prepared; None if only what differs from another one is told than the replica holds.

    Raises:
        RemoteProtocolError: What is told is not what differs from that.
    """
    if message.base is None:
        return message.record
    if tip.signed is None or message.base.record_hash != tip.hash:
        return None
    body = completed(message.record.body, message.copied, tip.signed.body)
    return msgspec.structs.replace(message.record, body=body)


def whole_quorum(message: Propose, last: Propose | None) -> Propose | None:
    """The quorum that is proposed; None if only what differs from another one is told than `last`, which the replica
    was in before.

    Raises:
        RemoteProtocolError: Its places are not those of members.
    """
    if message.base is None:
        return message
    if last is None:
        return None
    if QuorumTag.of(last) == QuorumTag.of(message):
        return last  # it is said once more
    if QuorumTag.of(last) != message.base:
        return None
    known = (*last.members, *message.members)
    if len(message.order) > len(known) or max(message.order, default=0) >= len(known):
        raise RemoteProtocolError(f"quorum {message.epoch} of stage {message.stage} has places that nobody has")
    members = tuple(known[place] for place in message.order)
    return msgspec.structs.replace(message, members=members, base=None, order=())


def changed_quorum(quorum: Propose, last: Propose) -> Propose:
    """The same quorum as what differs from the one that its receiver was in before."""
    places = {hop: place for place, hop in enumerate(last.members)}
    fresh = tuple(hop for hop in quorum.members if hop not in places)
    places |= {hop: len(last.members) + number for number, hop in enumerate(fresh)}
    order = tuple(places[hop] for hop in quorum.members)
    return msgspec.structs.replace(quorum, members=fresh, base=QuorumTag.of(last), order=order)


def fits(signed: SignedRecord, record: Record, instead_of: str, tip: Tip, unseal: Unseal) -> bool:
    """Whether a committed record follows what the replica holds, or was chosen in place of that. If not, the
    coordinator believes that the replica holds something else."""
    digest = record_hash(signed)
    is_meant = tip.hash in (digest, instead_of)
    return is_meant or is_before(tip, Tip(record.round, digest, signed), unseal)


def why_fetched(instead_of: str, record: Record, tip: Tip) -> str:
    """Why a replica cannot swap to a committed record at once."""
    if instead_of == tip.hash:
        return f"record {record.round}, of another chain, was chosen over the record {tip.round} that it holds"
    if record.round == tip.round + 1 and record.previous != tip.hash:
        return f"record {record.round} does not follow the record {tip.round} that it holds"
    return f"it holds record {tip.round} and has not staged the bytes of record {record.round}"


def move_refusal(message: Move, stage: int, round: int) -> str | None:
    """Why a server in this round cannot go where it is sent; empty if it is there already, None if it can go."""
    if message.stage == stage:
        return ""
    return f"it is in round {round}, not in round {message.round}" if message.round > round else None


@dataclass(frozen=True, slots=True)
class StepsClosed:
    """What the replica has committed in the round, in apply order, what it cannot decide alone, its links, the length
    of its pseudo-gradient, what that is encoded as, and what it has trained earlier (see `Join`)."""

    num_samples: int
    in_doubt: tuple[StepKey, ...]
    log: tuple[StepEntry, ...]
    links: tuple[LinkReport, ...] = ()
    gradient_norm: float = 0.0
    payload: Payload | None = None
    earlier: tuple[StepsTrained, ...] = ()

    def join(self, ballot: Ballot, round: int, stage: int, aborted: tuple[StepKey, ...]) -> Join:
        """What the replica joins with; `aborted` are the steps that a Resolve has aborted here."""
        known = self.num_samples, self.in_doubt, self.log, aborted, self.links, self.gradient_norm, self.payload
        return Join(ballot, round, stage, *known, self.earlier)


def check_quorum(quorum: Propose, stage: int, me: PeerId) -> None:
    """Check that a proposed quorum is one for this replica.

    Raises:
        RemoteProtocolError: It is not, or it contradicts itself.
    """
    peers = [hop.peer for hop in quorum.members]
    is_sound = len(set(peers)) == len(peers) == len(quorum.weights) and min(quorum.weights, default=-1) >= 0
    is_sound = is_sound and len(quorum.scales) in (0, len(peers)) and all(0 <= scale <= 1 for scale in quorum.scales)
    is_sound = is_sound and len(quorum.payloads) in (0, len(peers))
    if quorum.stage != stage or me not in peers or not is_sound:
        raise RemoteProtocolError(f"quorum {quorum.epoch} of stage {quorum.stage} is none for {me}")
