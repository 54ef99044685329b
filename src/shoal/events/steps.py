"""Training steps: what trainers and replicas say of them, and of evaluations."""

from __future__ import annotations

from logging import DEBUG, ERROR, WARNING

from shoal.events.base import Event
from shoal.ids import PeerId, StepKey


class StepCommitted(Event, frozen=True, tag="step.committed"):
    """A step was committed on all replicas of its path."""

    level = DEBUG
    round: int
    key: StepKey
    path: tuple[PeerId, ...]
    samples: int


class StepSetback(Event, frozen=True, tag="step.setback"):
    """A replica has refused, broken off or lost a step of this trainer."""

    peer: PeerId
    answer: str


class StepReplayed(Event, frozen=True, tag="step.replayed"):
    """A step is tried again, on this replica among others."""

    key: str
    peer: PeerId


class StepTensorRefused(Event, frozen=True, tag="step.tensor_refused"):
    """A tensor of a step does not fit the stage; the attempt has failed."""

    level = WARNING
    key: str
    peer: PeerId
    reason: str


class StepFailed(Event, frozen=True, tag="step.failed"):
    """The device could not carry out an operation of a step; the attempt has failed, the traceback follows."""

    level = ERROR
    key: str
    operation: str


class StepCapLowered(Event, frozen=True, tag="step.cap_lowered"):
    """Microbatches of this size did not fit into the device's memory; the replica takes smaller ones from now on."""

    level = WARNING
    samples: int
    cap: int


class StepDoesNotFit(Event, frozen=True, tag="step.does_not_fit"):
    """Not even one sample fits into the device's memory."""

    level = ERROR
    do = "use a device with more memory, or cut the model into more stages"
    samples: int


class StepNotSplit(Event, frozen=True, tag="step.not_split"):
    """The backward of a stage cannot be split exactly, so that this replica computes it as a whole."""

    level = WARNING
    stage: int


class StageCompiled(Event, frozen=True, tag="stage.compiled"):
    """A stage was compiled for these sizes of microbatches."""

    stage: int
    sizes: list[int]
    took_s: float


class StageCompiledInVain(Event, frozen=True, tag="stage.compiled_in_vain"):
    """The memory of this server has room for smaller microbatches only than its stage was compiled for, so that it
    trains as without `model_pipeline.compile`."""

    level = WARNING
    do = "raise `model_pipeline.microbatches` so that a microbatch has at most `cap` samples, or give the server memory"
    stage: int
    cap: int
    sizes: list[int]


class ReplicaLogEnded(Event, frozen=True, tag="replica_log.ended"):
    """The log from which a replica's work can be replayed could not be written."""

    level = WARNING
    do = "see to that disk before the next run"
    reason: str
    effect: str


class RoundWasClosed(Event, frozen=True, tag="round.closed"):
    """The round was closed while this trainer had a step under way, which is given back."""

    round: int
    step: int
    reason: str


class StepIsStuck(Event, frozen=True, tag="step.stuck"):
    """A trainer has no path for its step, because stages are without a replica; it waits."""

    level = WARNING
    round: int
    step: int
    reason: str


class ClientDialledAgain(Event, frozen=True, tag="client.dialled_again"):
    """A trainer dials its lost client, and says again what that may not have counted."""

    reports: int


class EvaluationRepeated(Event, frozen=True, tag="evaluation.repeated"):
    """A batch of an evaluation is evaluated again over another path."""

    base_round: int
    reason: str


class EvaluationFailed(Event, frozen=True, tag="evaluation.failed"):
    """A trainer gives its part of an evaluation up, or a replica could not evaluate a batch: the traceback follows."""

    level = WARNING
    base_round: int | None = None
    reason: str | None = None
