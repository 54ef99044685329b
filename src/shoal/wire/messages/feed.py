"""Between the data server, the trainers of its host, and the client that plans rounds.

Batches lie in one shared-memory pool; messages carry where, never the bytes. A batch in deterministic runs is a pure
function of (round plan, trainer slot, step of the round): number `base_batch + step * num_slots + slot` of the stream.
In others its size follows the speed of its trainer.
"""

from __future__ import annotations

from shoal.ids import PeerId, StepKey
from shoal.wire.messages.base import SampleRange, StepRange, Struct, WindowMarks


class TensorPlace(Struct, frozen=True):
    """A tensor inside the pool: dtype, shape (batch first), byte offset from the pool's start."""

    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int


class PlanRound(Struct, frozen=True, tag="plan_round"):
    """The client opens round `round` for `num_slots` trainers, each of which trains `steps`. `speeds`: samples per
    second of each slot's pipeline, as measured so far; 0: not known; empty: of none."""

    round: int
    num_slots: int
    steps: StepRange
    speeds: tuple[float, ...] = ()


class ResumeRound(Struct, frozen=True, tag="resume_round"):
    """Instead of PlanRound, where client or data server was started again in the middle of a round. To a data server
    that knows nothing of the round: nothing is leased before `trainers` (slot -> generation) have said hello.
    `complete`: nobody else has leased anything in this round."""

    round: int
    num_slots: int
    steps: StepRange
    trainers: dict[int, int]
    complete: bool
    speeds: tuple[float, ...] = ()


class PauseLeases(Struct, frozen=True, tag="pause_leases"):
    """The client: nothing is leased from now on, and who asks waits (`paused`); or there are leases again. What is
    leased already is not touched. A data server that was just started does not know of a pause until it is told."""

    paused: bool


class RecordSamples(Struct, frozen=True, tag="record_samples"):
    """D_round is committed and contains these samples, those of skipped steps included; whatever else was leased in the
    round is free again. With another `chain` than before the run goes on from other records than this host knew: these
    are all samples that are used, and what else was recorded or leased is free again, whatever its round. `marks` are
    those of the records: the windows of a stream that are read here have to be the same; empty: as told before."""

    round: int
    samples: tuple[SampleRange, ...]
    chain: str = ""
    marks: WindowMarks = b""


class ReleaseTrainer(Struct, frozen=True, tag="release_trainer"):
    """What is known of a dead trainer's steps (`swarm.takeover.Settled`): its leases that are surely trained by nobody
    are free, the others wait for the record."""

    trainer: int
    generation: int
    round: int
    committed: tuple[StepKey, ...]
    in_doubt: tuple[StepKey, ...]
    witnesses: dict[PeerId, StepKey]
    complete: bool


class Released(Struct, frozen=True, tag="released"):
    """Answer to ReleaseTrainer: what comes after it is leased without the dead trainer's claims.

    `next_step` is the number of the slot's first one in the round without a lease that waits for the record.
    `is_known`: the data server knows all that was leased in the round; otherwise there may be more.
    """

    trainer: int
    generation: int
    next_step: int
    is_known: bool


class Lease(Struct, frozen=True, tag="lease"):
    """Trainer `trainer` asks for the batch of the step with this number. A round that is not planned yet is waited
    for."""

    request: int
    trainer: int
    generation: int
    round: int
    step: int


class ReadTrain(Struct, frozen=True, tag="read_train"):
    """Read batch `batch` of the training stream without a lease (the baseline does)."""

    request: int
    batch: int


class ReadHoldout(Struct, frozen=True, tag="read_holdout"):
    """Read samples [start, stop) of the held-out set, in order."""

    request: int
    start: int
    stop: int


class BatchReady(Struct, frozen=True, tag="batch_ready"):
    """Answer to Lease and Read*: the batch lies in the pool until it is acknowledged or given back. `samples` is empty
    for held-out data; `ticket` names this hand-over in later messages and is never used again. `context`: what every
    stage gets, by name, in the order in which it travels."""

    request: int
    pool: str
    pool_bytes: int
    ticket: int
    inputs: TensorPlace
    labels: TensorPlace
    samples: tuple[SampleRange, ...]
    num_samples: int
    context: dict[str, TensorPlace]


class NoBatch(Struct, frozen=True, tag="no_batch"):
    """Answer to Lease and Read*: there is none, and why (end of the round's plan, stale generation, out of range)."""

    request: int
    reason: str


class NoteAttempt(Struct, frozen=True, tag="note_attempt"):
    """Before Open: which attempt will train the leased batch, and over which replicas."""

    key: StepKey
    path: tuple[PeerId, ...]
    ticket: int


class Acknowledge(Struct, frozen=True, tag="acknowledge"):
    """The leased batch is trained (`committed`), or its fate is left to the round record; its memory is free."""

    key: StepKey
    ticket: int
    committed: bool


class GiveBack(Struct, frozen=True, tag="give_back"):
    """A batch that was only read, or a lease that was not used, is not needed any more. If an attempt was noted, the
    memory is free and the fate of the lease is left to the round record."""

    ticket: int


class HoldoutInfo(Struct, frozen=True, tag="holdout_info"):
    """Sent by the data server to every peer that says DataHello: sizes of the two sets, and the most samples that one
    ReadHoldout may ask for."""

    num_train: int
    num_holdout: int
    max_read_samples: int


class BatchesAwaited(Struct, frozen=True, tag="batches_awaited"):
    """Sent by the data server to the client: who asks for a batch has waited for a while, and nobody has one
    (`awaited`); or somebody has got one, or nobody waits any more."""

    awaited: bool


class WindowsRead(Struct, frozen=True, tag="windows_read"):
    """Sent by the data server to the client, in each round and before it hands out a batch of a window that is new: the
    marks of the stream and of all its windows that were read here."""

    marks: WindowMarks


class Attempt(Struct, frozen=True):
    """A noted attempt, as in NoteAttempt."""

    key: StepKey
    path: tuple[PeerId, ...]


class HeldBatch(Struct, frozen=True):
    """A lease that a trainer got in its round: the attempts noted for it, whether one of them is committed (`done`; the
    paths are of no interest then), and whether its fate is left to the record."""

    ticket: int
    samples: tuple[SampleRange, ...]
    attempts: tuple[Attempt, ...] = ()
    done: bool = False
    left: bool = False


class DataHello(Struct, frozen=True, tag="data_hello"):
    """First message to the data server, again whenever it has been dialled anew; answered with HoldoutInfo. A data
    server that was started again learns from it what the trainer has leased in `round`."""

    trainer: int
    generation: int = 0
    round: int = 0
    held: tuple[HeldBatch, ...] = ()


GATHERED = frozenset({Lease, BatchReady, Acknowledge, GiveBack})
"""What leaves at the end of the turn of the sender's event loop, together with others: a sender that dies in between
has died before it said so. NoteAttempt is none of them: it has left before the Open that follows it."""

FeedMessage = (
    PlanRound
    | ResumeRound
    | PauseLeases
    | RecordSamples
    | ReleaseTrainer
    | Released
    | Lease
    | ReadTrain
    | ReadHoldout
    | BatchReady
    | NoBatch
    | NoteAttempt
    | Acknowledge
    | GiveBack
    | HoldoutInfo
    | BatchesAwaited
    | WindowsRead
    | DataHello
)
