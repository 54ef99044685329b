"""What the two machines of the outer round ask their drivers to do.

Both machines take messages, losses and the time, and return a list of these. A driver carries them out in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.records import Logs, Tip
from shoal.wire.messages.base import Hop
from shoal.wire.messages.mirror import MirrorMessage
from shoal.wire.messages.round import Basis, Propose, Record, Resolve, RoundMessage, SignedRecord, StageHashes


@dataclass(frozen=True, slots=True)
class Send:
    """Post a message to a peer."""

    peer: PeerId
    message: RoundMessage | MirrorMessage


@dataclass(frozen=True, slots=True)
class Introduce:
    """Remember where a peer can be dialled."""

    hop: Hop


@dataclass(frozen=True, slots=True)
class ReplicaOut:
    """A replica takes no part until it has been given the state of the newest record.

    Reported by the coordinator about a replica, and by a member about itself.
    """

    peer: PeerId
    reason: str


# -- of the coordinator


@dataclass(frozen=True, slots=True)
class ReplicaIn:
    """A replica that was out, or new, holds the tip since: it may be used in the round that is being trained."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Journal:
    """Write these step logs down so that they survive this process, then report `journaled`.

    Whoever has prepared the record may have it committed, even after this client's death; its steps must be known then.

    Attributes:
        record: the one that is about to be prepared.
        logs: the step logs of the record's members.
    """

    record: Record
    digest: str
    logs: Logs


@dataclass(frozen=True, slots=True)
class RecordCommitted:
    """D_round is committed; `signed` is the same record as it travels."""

    record: Record
    signed: SignedRecord


@dataclass(frozen=True, slots=True)
class RoundReady:
    """Every reachable replica that could has swapped to the tip: the next round may be trained.

    Attributes:
        holders: the replicas that hold it, with their stages.
        sent_bytes: sent in the tip's round by the replicas that swapped under this coordinator, by kind of traffic.
    """

    tip: Tip
    holders: Mapping[PeerId, int]
    sent_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stuck:
    """The run cannot go on: these stages have no replica that takes part. None, once it can again."""

    stages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """Nobody holds the bytes of record `round` of a stage: it goes on from these.

    What it had learnt in the rounds after that of `basis` is lost. Without a basis: a replica with the record's bytes
    has come back, and they stand.
    """

    stage: int
    round: int
    basis: Basis | None


@dataclass(frozen=True, slots=True)
class ChainLeft:
    """Two chains of records have met, and the run goes on with one. What the other one has trained is lost.

    Attributes:
        left: the newest record of the lost chain.
        common_round: the last round that both chains share; 0 for D_0.
        num_samples: how many the lost chain has recorded, including those of the common rounds.
        num_freed: how many of them only the lost chain has recorded; they are trained again.
    """

    left: Tip
    kept: Tip
    common_round: int
    num_samples: int
    num_freed: int


@dataclass(frozen=True, slots=True)
class Overtaken:
    """Another record stands than the one on which this client trains, and it has not committed it; or another client
    has led meanwhile, and may have trained on the same one. What the client knows of the run is void. `RoundReady`
    follows."""

    tip: Tip


@dataclass(frozen=True, slots=True)
class Deposed:
    """Another client coordinates, under a higher ballot."""

    highest: Ballot


@dataclass(frozen=True, slots=True)
class TrainedTwice:
    """Two steps that replicas have joined with share samples. This must never happen: see `trained_twice`.

    Attributes:
        out: the replicas that the round leaves out for it; empty if a stage would then have none.
    """

    first: StepKey
    second: StepKey
    out: tuple[PeerId, ...]


CoordinatorEffect = (
    Send
    | Introduce
    | ReplicaOut
    | ReplicaIn
    | Journal
    | RecordCommitted
    | RoundReady
    | Stuck
    | Restored
    | ChainLeft
    | Overtaken
    | Deposed
    | TrainedTwice
)


# -- of a member


@dataclass(frozen=True, slots=True)
class CloseSteps:
    """Refuse new steps of the round, finish those that have begun, then report `steps_closed`."""

    round: int


@dataclass(frozen=True, slots=True)
class ResolveStep:
    """Carry out the fate of a step in doubt, then report `steps_closed` again."""

    fate: Resolve


@dataclass(frozen=True, slots=True)
class RunRing:
    """Average with the members of this quorum and stage the outer step, then report `ring_done` (or `state_broken`).

    Ends the ring before it. From epoch 1 on the state is checked against the record first.
    """

    quorum: Propose


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep the staged bytes with these hashes, whatever is staged later: a prepared record names them.

    Otherwise a driver keeps what was staged last and drops what was staged before.
    """

    hashes: StageHashes


@dataclass(frozen=True, slots=True)
class Swap:
    """Make the staged bytes with these hashes the replica's state, then report `swapped` (or `state_broken`).

    They are those that it holds already where its stage is restored; then they are not to be given as the record's.
    With `leaves_chain` the record that was held is none of those before this one: what the optimizer has learnt since
    the two chains have parted goes with it, so it begins anew.

    With `keeps_rest` the replica has had its part in them: of its local parameters only what the round has averaged
    becomes equal to the state. Else all do, and what had not been averaged yet is lost.

    Steps that are still open, which only a replica that was left out can have, are dropped before.
    """

    record: Record
    hashes: StageHashes
    leaves_chain: bool = False
    keeps_rest: bool = False


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the bytes with these hashes from the holders of the record, stage them, then report `fetched`.

    Replaces the one before it as the aim; a swap ends it. With `follows_base` it is the next record after the committed
    one that the replica holds. With `starts_anew` the stage was restored: its state does not follow from that of the
    record before.
    """

    record: Record
    record_hash: str
    hashes: StageHashes
    follows_base: bool = False
    starts_anew: bool = False


@dataclass(frozen=True, slots=True)
class Relocate:
    """Ask the server to serve another stage. Nothing changes until it does, or answers that it cannot (`stay`).

    Attributes:
        urgent: do not wait for the round's end.
    """

    stage: int
    urgent: bool


MemberEffect = Send | Introduce | ReplicaOut | CloseSteps | ResolveStep | RunRing | Pin | Swap | Fetch | Relocate
