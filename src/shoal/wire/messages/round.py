"""The outer round between the coordinator (a client) and the replicas (docs/protocol.md, "The outer round").

coordinator                          member
  | -- AskRound -------------------->  |   a new ballot: who holds what; asking is a promise
  | <- RoundState / StaleBallot        |
  | -- Close ----------------------->  |   at the boundary, repeated until answered
  | <- Join                            |
  | -- Resolve --------------------->  |   steps in doubt
  | -- Propose (quorum) ------------>  |   members reduce with each other (`collective`)
  | <- Staged / MemberLost             |
  | -- PrepareRecord --------------->  |   as what differs from the record that the member holds
  | <- RecordPrepared                  |
  | -- CommitRecord ---------------->  |   by its hash; only now does anyone swap
  | <- Swapped                         |

If nobody holds the record's bytes of a stage any more, its replicas go on from the newest that one of them holds:

coordinator                          replica of that stage
  | -- Restore (record, basis) ---->  |
  | <- Swapped                         |

A replica that is told of a record whose bytes it has not staged gets them from those that hold it (`transfer`).

A server is sent to another stage:

coordinator                          server
  | -- Move ------------------------>  |   repeated until answered
  | <- Moving                          |   on its way, or why not; then all its connections end, and it is a newcomer
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.errors import MALFORMED, RemoteProtocolError
from shoal.ids import Ballot, Ordinal, PeerId, Slot, Stage, StepKey
from shoal.wire.messages.base import (
    ContentBytes,
    Count,
    Era,
    Finite,
    HeldRound,
    Hop,
    SampleRange,
    Sent,
    Struct,
    Warrant,
    WindowMarks,
)
from shoal.wire.messages.step import Earlier, StepEntry


class StageHashes(Struct, frozen=True):
    """SHA-256 (hex) of one stage's outer parameters, outer momentum and buffers."""

    parameters: str
    momentum: str
    buffers: str


class Basis(Struct, frozen=True):
    """The bytes of a stage that a replica trains from: those that record `round` named; with 0 the initial ones."""

    round: HeldRound
    hashes: StageHashes


class Payload(Struct, frozen=True):
    """The bytes that a pseudo-gradient is encoded as, where each member's is gathered whole: their SHA-256 (hex), and
    how many."""

    digest: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z", max_length=64)]
    num_bytes: ContentBytes


class StageOutcome(Struct, frozen=True):
    """What a round committed for one stage: the final quorum and the bytes that everyone now holds. `steps_lost` are
    steps of this round. `restored` says that nobody held the bytes of the record before: the stage was trained from
    these instead, and what it had learnt in the rounds after `restored.round` and before this one is lost. `scales` is
    what each member's pseudo-gradient was multiplied by, empty if nobody's was changed: below 1 it was clipped, with 0
    it was not finite and did not count. `differed` are replicas whose bytes were not those of the others at some time
    in the round; who is no member in the end was left out for it. `payloads` is what was averaged, by member, where it
    was encoded as a whole: None of one that had not trained or was not finite; empty where sums are formed on their
    way."""

    stage: Stage
    epoch: Ordinal
    members: tuple[PeerId, ...]
    weights: tuple[Ordinal, ...]
    hashes: StageHashes
    steps_lost: Count
    restored: Basis | None = None
    scales: tuple[Finite, ...] = ()
    differed: tuple[PeerId, ...] = ()
    payloads: tuple[Payload | None, ...] = ()


class Origin(Struct, frozen=True):
    """Where a fork begins: the record of another run, by its SHA-256 (hex)."""

    run_id: str
    record: str


MAX_ROUND_RANGES = 1 << 16
"""Of samples that a round has trained, or skipped: batches follow each other, but for what was put back."""
MAX_RECORDED = 1 << 17
"""Ranges of all samples that are used: at least one for each pass, and few more but where a peer makes samples up."""
MAX_RECORD_BYTES = 7 << 20
"""Of an encoded record: a message that has two of them can be sent."""


class Record(Struct, frozen=True):
    """D_r: one record for the whole run. `previous` is the SHA-256 (hex) of the encoded D_{r-1}; `samples` are the
    ranges trained in this round, `skipped` those of steps that were not finite; `generations` fence restarted
    trainers. `recorded` are the samples of all earlier records, merged: whoever holds the newest record alone knows
    which samples are used. `eras` tell which records came before it: that of round q is one of them if it is of the
    ballot that they name for q. With `keep` a checkpoint of it is wanted: its members copy what their inner optimizers
    know when they swap to it (`wire.messages.inner`). `codec` is as what pseudo-gradients of the round after it travel,
    where the run leaves that open; empty: as the configuration says. `origin` has the first record of a fork alone, its
    *rebase record*: of the origin's round, on top of D_0, without members; it names the origin's state by the stages of
    this run. `marks` are of the windows of a stream of which this record or one before has samples: who reads the
    stream anew has to get the same; of the last one or two they may lack those that the client had not heard of yet."""

    run_id: str
    round: Ordinal
    ballot: Ballot
    previous: str
    stages: tuple[StageOutcome, ...]
    samples: Annotated[tuple[SampleRange, ...], msgspec.Meta(max_length=MAX_ROUND_RANGES)]
    skipped: Annotated[tuple[SampleRange, ...], msgspec.Meta(max_length=MAX_ROUND_RANGES)]
    generations: dict[Slot, Ordinal]
    recorded: Annotated[tuple[SampleRange, ...], msgspec.Meta(max_length=MAX_RECORDED)] = ()
    eras: tuple[Era, ...] = ()
    keep: bool = False
    origin: Origin | None = None
    codec: str = ""
    marks: WindowMarks = b""


class SignedRecord(Struct, frozen=True):
    """An encoded record and the Ed25519 signature over it; `warrant` says that the signer may sign (`signing.py`)."""

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
    signer: Annotated[PeerId, msgspec.Meta(max_length=128)]
    signature: Annotated[bytes, msgspec.Meta(max_length=64)]
    warrant: Warrant = b""


class RecordName(Struct, frozen=True):
    """A record that the receiver has: its round, and the SHA-256 (hex) of the encoded record."""

    round: Ordinal
    record_hash: Annotated[str, msgspec.Meta(max_length=64)]


RecordOffset = Annotated[int, msgspec.Meta(ge=0, le=MAX_RECORD_BYTES)]


class Copied(Struct, frozen=True):
    """A part of an encoded record that is also in another one: after `fresh` bytes more that are not, the `length`
    bytes that begin at `start` there."""

    fresh: RecordOffset
    start: RecordOffset
    length: RecordOffset


MAX_COPIED = 1 << 16
"""Parts that two records share: at least two hashes for each stage lie between them."""


class AskRound(Struct, frozen=True, tag="ask_round"):
    """A client takes `ballot`; answering promises not to follow lower ones."""

    ballot: Ballot


class RoundState(Struct, frozen=True, tag="round_state"):
    """What a replica holds: its stage, its record (none before D_1), and a record it has prepared.
    `refused` is why it could not do what the coordinator has just asked, empty in an answer to AskRound. `base_round`
    is -1 for one that has the state of D_0 and has reason to believe that the run is further. `basis` are the bytes it
    has: not those of its record if its stage was restored."""

    ballot: Ballot
    stage: Stage
    base_round: HeldRound
    record: SignedRecord | None
    prepared: SignedRecord | None
    hop: Hop
    refused: str
    basis: Basis


class StaleBallot(Struct, frozen=True, tag="stale_ballot"):
    """Refusal of a ballot below the highest one seen."""

    highest: Ballot


class Close(Struct, frozen=True, tag="close"):
    """Stop opening steps of `round`, finish what has begun, then join."""

    ballot: Ballot
    round: Ordinal


class LinkReport(Struct, frozen=True):
    """What a replica has measured of its link to another one; `is_local`: they share a host, and memory."""

    peer: PeerId
    round_trip_ms: Finite
    bandwidth_mbit: Finite
    is_local: bool = False


MAX_LINK_REPORTS = 256
"""Of one replica; a stage has fewer replicas."""


class Join(Struct, frozen=True, tag="join"):
    """The replica has nothing open but `in_doubt`. `aborted` are the steps that a Resolve of this round has aborted
    here, `links` its links to others of its stage, if it has measured any. `gradient_norm` is the length of its
    pseudo-gradient; NaN or infinite if that, or one of its buffers, is not finite. `payload` is what that is encoded
    as, the same in every quorum, if it is encoded as a whole. `earlier` is what the replica has trained in earlier
    rounds since it took part in averaging the fragment of this one: that counts with this round's steps."""

    ballot: Ballot
    round: Ordinal
    stage: Stage
    num_samples: Ordinal
    in_doubt: tuple[StepKey, ...]
    log: tuple[StepEntry, ...]
    aborted: tuple[StepKey, ...]
    links: Annotated[tuple[LinkReport, ...], msgspec.Meta(max_length=MAX_LINK_REPORTS)] = ()
    gradient_norm: float = 0.0
    payload: Payload | None = None
    earlier: Earlier = ()


class PayloadReady(Struct, frozen=True, tag="payload_ready"):
    """To the others of the stage: what the sender's pseudo-gradient of this round, which is trained on this record, is
    encoded as. It may be fetched (`wire.messages.transfer`) before the round is closed. `num_targets`: what it has
    trained for it, as far as it knows by now; its join says what counts."""

    round: Ordinal
    record_hash: Annotated[str, msgspec.Meta(max_length=64)]
    stage: Stage
    payload: Payload
    num_targets: Count = 0


class Resolve(Struct, frozen=True, tag="resolve"):
    """The fate of a step in doubt, settled from all joins; with `commit`, by the numbers of the entry that holds it."""

    ballot: Ballot
    round: Ordinal
    key: StepKey
    commit: bool
    scale: Finite = 0.0
    lr: Finite = 0.0
    skipped: bool = False


class Propose(Struct, frozen=True, tag="propose"):
    """A quorum of one stage: members in ring order with their weights (samples), and what each multiplies its
    pseudo-gradient by (`scales`; empty: nobody's is changed). `payloads` are those of their joins, None for one without
    weight; empty where sums are formed on their way.

    With `base`, the tag of the quorum that the receiver was in last, `members` are only those that are not in it as
    they are now, and `order` has for each place of the ring which of that quorum's members stands there, counted on
    into `members`."""

    ballot: Ballot
    round: Ordinal
    epoch: Ordinal
    stage: Stage
    members: tuple[Hop, ...]
    weights: tuple[Ordinal, ...]
    scales: tuple[Finite, ...] = ()
    payloads: tuple[Payload | None, ...] = ()
    base: QuorumTag | None = None
    order: tuple[Ordinal, ...] = ()


class QuorumTag(Struct, frozen=True, order=True):
    """The tag of the collective operations of a quorum (`wire.messages.collective`). Compared field by field, the
    highest is the newest."""

    round: Ordinal
    ballot: Ballot
    epoch: Ordinal
    stage: Stage

    @classmethod
    def of(cls, quorum: Propose) -> QuorumTag:
        """The tag of a quorum."""
        return cls(quorum.round, quorum.ballot, quorum.epoch, quorum.stage)

    def encoded(self) -> bytes:
        """As it travels."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decoded(cls, tag: bytes) -> QuorumTag:
        """Read a tag that has travelled.

        Raises:
            RemoteProtocolError: The bytes are none.
        """
        try:
            return msgspec.msgpack.decode(tag, type=cls)
        except MALFORMED as error:
            raise RemoteProtocolError(f"{tag.hex()[:32]} is no tag of a quorum: {error}") from error


class Staged(Struct, frozen=True, tag="staged"):
    """The member has computed the outer step into its staging buffer."""

    ballot: Ballot
    round: Ordinal
    epoch: Ordinal
    stage: Stage
    hashes: StageHashes


class MemberLost(Struct, frozen=True, tag="member_lost"):
    """The sender cannot reach a member of its ring."""

    ballot: Ballot
    round: Ordinal
    epoch: Ordinal
    stage: Stage
    peer: PeerId


class PrepareRecord(Struct, frozen=True, tag="prepare_record"):
    """Keep this record and the staged bytes; do not swap yet. With `base`, the record that the receiver holds, the
    record's body has only what is not in that one's, between the parts that are (`copied`)."""

    ballot: Ballot
    record: SignedRecord
    base: RecordName | None = None
    copied: Annotated[tuple[Copied, ...], msgspec.Meta(max_length=MAX_COPIED)] = ()


class RecordPrepared(Struct, frozen=True, tag="record_prepared"):
    """Answer to PrepareRecord."""

    ballot: Ballot
    round: Ordinal
    record_hash: str


class CommitRecord(Struct, frozen=True, tag="commit_record"):
    """The record is committed: swap what is staged, if its hashes are the record's. `instead_of` is the hash of the
    receiver's own record if that is of another chain, which was not chosen: then it is left for this one, however new
    it is. Who has said that it has the record is told its name alone (`known`, without `record`); should it have it no
    more, it answers with its RoundState, and is told all of it."""

    ballot: Ballot
    record: SignedRecord | None
    instead_of: str = ""
    known: RecordName | None = None


class Restore(Struct, frozen=True, tag="restore"):
    """Your stage goes on from `record`, which is committed, with the bytes of `basis`: whoever has these takes them for
    the record's. They are the record's own where a stage need not be restored any more: whoever lacks them fetches
    them. `instead_of` as in CommitRecord."""

    ballot: Ballot
    record: SignedRecord
    stage: Stage
    basis: Basis
    instead_of: str = ""


class OrderNamed(Struct, frozen=True, tag="order_named"):
    """Do the order with this SHA-256, a `Propose` or `PrepareRecord` of this ballot, when it comes (`OrderPassed`), and
    pass it on. It counts until another one is named or told."""

    ballot: Ballot
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


MAX_ORDER_BYTES = 12 << 20
"""Of an encoded order that is passed on: a record and more parts of another one than there are."""


class OrderPassed(Struct, frozen=True, tag="order_passed"):
    """An encoded order of the coordinator, from it or from a neighbour in the ring. It is for who has been told its
    name, and says nothing to anybody else."""

    order: Annotated[bytes, msgspec.Meta(max_length=MAX_ORDER_BYTES)]


class Swapped(Struct, frozen=True, tag="swapped"):
    """The replica now holds D_round, with bytes of these hashes. `sent_bytes` counts what it sent since it held the
    record before, by traffic."""

    round: Ordinal
    stage: Stage
    record_hash: str
    hashes: StageHashes
    sent_bytes: Sent


class Move(Struct, frozen=True, tag="move"):
    """Serve `stage` from now on, in the same process. `urgent`: it has no replica, so no round's end is waited for."""

    ballot: Ballot
    round: Ordinal
    stage: Stage
    urgent: bool


class Moving(Struct, frozen=True, tag="moving"):
    """Answer to Move, and while the server is on its way to every AskRound: it goes to `stage`, or, if `refused` is not
    empty, why it does not. Said once more, with a RoundState, by the replica of the new stage when it begins."""

    ballot: Ballot
    stage: Stage
    refused: str


RoundMessage = (
    AskRound
    | RoundState
    | StaleBallot
    | Close
    | Join
    | PayloadReady
    | Resolve
    | Propose
    | Staged
    | MemberLost
    | PrepareRecord
    | RecordPrepared
    | CommitRecord
    | Restore
    | OrderNamed
    | OrderPassed
    | Swapped
    | Move
    | Moving
)
