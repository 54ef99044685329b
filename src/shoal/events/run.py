"""How a run goes, as its client sees it: what its totals are made of (`client.totals`), and the course of its rounds.

Times are monotonic seconds of the client's host. What comes with every step, or every few seconds, is for DEBUG.
"""

from __future__ import annotations

from logging import DEBUG, ERROR, WARNING
from typing import NamedTuple

import msgspec

from shoal.events.base import Event
from shoal.ids import PeerId

# -- what is counted in a round


class RunLaunched(Event, frozen=True, tag="run.launched"):
    """The run was launched on this host, or a client of this host was to continue it."""

    brief = "the run begins"
    at_s: float


class ClientStarted(Event, frozen=True, tag="client.started"):
    """A client has read what an earlier start of it has left, and goes on from there."""


class StepReported(Event, frozen=True, tag="step.reported"):
    """A trainer has committed a step, or skipped it because its loss or gradient was not finite.

    Attributes:
        number: counted over the whole run.
        attempt: how often it was begun before.
        num_targets: labels that the loss counts.
        loss: mean over the targets, in nats.
        router_losses: of each layer with experts, in order; 1 where its experts get as many tokens.
        router_load_cvs: of each of those, the standard deviation of the experts' numbers of tokens over their mean.
        figures: what the model's family reports beside the loss, by name.
    """

    level = DEBUG
    slot: int
    number: int
    attempt: int
    num_samples: int
    num_targets: int
    loss: float
    skipped: bool
    duration_s: float
    at_s: float
    router_losses: tuple[float, ...] = ()
    router_load_cvs: tuple[float, ...] = ()
    figures: dict[str, float] = msgspec.field(default_factory=dict[str, float])


class ShareEvaluated(Event, frozen=True, tag="evaluation.share"):
    """A trainer has evaluated its share of the held-out set.

    Attributes:
        base_round: of the record that is evaluated.
        loss_sum: over the targets of the share, in nats.
    """

    level = DEBUG
    slot: int
    base_round: int
    loss_sum: float
    num_samples: int
    num_targets: int


class TrainerFinished(Event, frozen=True, tag="trainer.done"):
    """A trainer has done its steps of a round.

    Attributes:
        sent_bytes: since its start, by kind of traffic.
    """

    level = DEBUG
    slot: int
    generation: int
    round: int
    sent_bytes: dict[str, int]


class RoleCounted(Event, frozen=True, tag="role.counted"):
    """What a process has counted since it was started has changed.

    Attributes:
        peer: empty for the client itself.
        started_unix_s: when the process was started, by its own clock; 0: it has not said.
    """

    level = DEBUG
    peer: PeerId
    counts: dict[str, int]
    started_unix_s: float = 0.0


# -- the course of the run


class ClientResumed(Event, frozen=True, tag="client.resumed"):
    """A client that was started again knows what its earlier start knew.

    Attributes:
        generation: which start it is, counted from 1.
        round: in which the earlier start was; 0: in none.
        events: how many things had been counted in it, this start included.
    """

    generation: int
    round: int
    events: int


class DataSized(Event, frozen=True, tag="data.sized"):
    """The data server has said how many samples there are to train on and to evaluate with."""

    num_train: int
    num_holdout: int


class RoundBegun(Event, frozen=True, tag="round.begun"):
    """The trainers are about to be told of a round; after the last one, of the evaluation at the end.

    Attributes:
        steps: of each trainer; 0 in that evaluation.
        replicas: that hold the record before, all stages together.
    """

    round: int
    steps: int
    pipelines: int
    trainers: int
    replicas: int


class RoundTakenUp(Event, frozen=True, tag="round.taken_up"):
    """A client that was started again goes on in the round in which its earlier start was."""

    round: int
    base_round: int


class RoundShared(Event, frozen=True, tag="round.shared"):
    """How a round's work was shared between the pipelines.

    Attributes:
        samples: trained by each slot.
        samples_per_s: of each slot, while it trained.
        waited_s: from the last step of the first trainer that was done to the last step of the last trainer.
    """

    round: int
    samples: dict[int, int]
    samples_per_s: dict[int, float]
    waited_s: float


class LossPart(NamedTuple):
    """The training loss of some steps in a row, of all trainers: the least, the mean over targets, the most (nats)."""

    samples: int
    least: float
    mean: float
    most: float


class RoundRecorded(Event, frozen=True, tag="round.recorded"):
    """The record of a round is committed and on the disk.

    Attributes:
        loss: mean over the samples that its trainers have reported, in nats; None without one.
        hashes: of each stage's outer parameters.
        trained: whether it has any step in it.
        sent_bytes: by its replicas, by kind of traffic.
        duration_s: since the client has begun the round; None if it has not.
        samples_before: of all earlier records of the run.
        curve: of the training loss, in a bounded number of parts in order: samples, least, mean, most (nats).
        averaging_s: of the duration, from the end of the round's steps on; None if this client has not ended them.
    """

    brief = "round {round} is over after {duration_s:.1f} s: loss {loss:.3f}"
    round: int
    loss: float | None
    hashes: dict[int, str]
    trained: bool
    sent_bytes: dict[str, int]
    duration_s: float | None
    samples_before: int = 0
    curve: tuple[LossPart, ...] = ()
    averaging_s: float | None = None


class CodecChosen(Event, frozen=True, tag="round.codec_chosen"):
    """From a round on pseudo-gradients travel as something else.

    With `averaging_compression = auto` the finest codec is taken whose bytes get over the slowest link in a twentieth
    of a round, and while overlapping steps go on.

    Attributes:
        round: the first one.
        before: empty if this client has recorded no round before.
    """

    brief = "from round {round} on pseudo-gradients travel as {codec}"
    round: int
    codec: str
    before: str


class RoundSlow(Event, frozen=True, tag="round.slow"):
    """A round has been ended, and its record is not there yet."""

    level = WARNING
    round: int
    waited_s: float


class RecordAwaited(Event, frozen=True, tag="record.awaited"):
    """A round is averaged, and the next one begins when its record is on the disk, which takes long."""

    level = WARNING
    why = "the disk, or the network that it is behind, does not answer, or is very slow"
    do = "look after the disk; nothing is lost, and training goes on when it has the record"
    says = "the run waits for its disk: record {round} is not in {folder} after {waited_s:g} s"
    round: int
    folder: str
    waited_s: float


class DiskTakesNothing(Event, frozen=True, tag="disk.takes_nothing"):
    """The client cannot write what a run must have on the disk before it goes on; it tries again."""

    level = WARNING
    why = "the disk is full, may not be written, or fails"
    do = "nothing is lost if that is done in time: training then goes on by itself"
    reason: str
    minutes: float

    def say(self) -> str:
        lasting = f"{self.minutes:g} minutes" if self.minutes >= 1 else f"{self.minutes * 60:.0f} s"
        return f"the run waits for its disk: {self.reason}; in {lasting} it ends"


class DiskAwaited(Event, frozen=True, tag="disk.awaited"):
    """A client is started, and the disk with what an earlier one has left does not answer: it begins when it does."""

    level = WARNING
    why = "the file server, or the network before it, is gone"
    do = "look after the disk; trainers train up to the end of their round"
    says = "the client waits for its disk: {folder} does not answer for {waited_s:g} s"
    folder: str
    waited_s: float


class RoundNotWritten(Event, frozen=True, tag="round.not_written"):
    """The client ends, and the disk has not taken the last record in time."""

    level = ERROR
    round: int
    waited_s: float


class RecordRestored(Event, frozen=True, tag="record.restored"):
    """The file of the newest record was no record any more when the client ended, or took the run over: it is written
    again."""

    level = WARNING
    why = "the disk is failing, or somebody has changed the file"
    says = "the record of round {round} was damaged on the disk, and is written again from what the client knows"
    round: int


class EvaluationDone(Event, frozen=True, tag="evaluation.done"):
    """The whole held-out set has been evaluated.

    Attributes:
        base_round: of the record that was evaluated.
        loss: mean over the samples, in nats.
    """

    brief = "eval loss {loss:.3f} after round {base_round}"
    base_round: int
    loss: float


class EvaluationIncomplete(Event, frozen=True, tag="evaluation.incomplete"):
    """Trainers were lost with their shares of the last evaluation, which is done again."""

    level = WARNING
    base_round: int


class TrainingDiverging(Event, frozen=True, tag="training.diverging"):
    """Many steps in a row were skipped, because loss or gradient was not finite."""

    level = WARNING
    why = "mostly a learning rate that is too high for the model, or a loss or samples that are no numbers"
    says = "training may have diverged: {reason}"
    reason: str


class PipelineSkips(Event, frozen=True, tag="pipeline.skips"):
    """Many steps in a row of one pipeline were skipped, because loss or gradient was not finite, while those of others
    were trained."""

    level = WARNING
    why = "the memory, processor or GPU of one of its servers is faulty, or its library is"
    do = "stop these servers one after the other, until steps are trained again"
    says = (
        "pipeline {slot} trains nothing: {steps} steps in a row were skipped, because loss or gradient was not finite, "
        "and those of others were not; one of its servers computes wrongly: {servers}"
    )
    slot: int
    steps: int
    servers: str


class RunTakenOver(Event, frozen=True, tag="run.taken_over"):
    """This client goes on with a run that clients of other hosts have trained until now.

    Attributes:
        base_round: of the record that stands.
        holders: how many replicas hold it.
        hashes: of each stage's outer parameters.
    """

    level = WARNING
    base_round: int
    holders: int
    hashes: dict[int, str]


class ClientWaits(Event, frozen=True, tag="client.waits", rename={"peer": "for"}):
    """The run has a client already: this one goes on with it when that one is lost."""

    says = "run {run_id} has a client, {who}: this one waits, and goes on if it is lost"
    peer: PeerId
    who: str
    run_id: str


class RunEnded(Event, frozen=True, tag="run.ended"):
    """The run of another client has ended while this one has waited."""

    says = "{reason}"
    reason: str


class RunStopped(Event, frozen=True, tag="run.stopped"):
    """A user has told the run to end, by `shoal stop`."""

    says = "stopped by {by}"
    by: str


class RunPaused(Event, frozen=True, tag="run.paused"):
    """A user has paused the run, by `shoal pause`: no step begins until it is resumed."""

    says = "paused by {by}: no step begins until `shoal resume-run`"
    by: str
    at_s: float


class CheckpointAsked(Event, frozen=True, tag="checkpoint.asked"):
    """A user wants a checkpoint of the next record, by `shoal checkpoint`."""

    says = "a checkpoint of the next record is wanted by {by}"
    by: str


class RunResumed(Event, frozen=True, tag="run.resumed"):
    """A user lets a paused run go on, by `shoal resume-run`."""

    says = "resumed by {by}"
    by: str
    at_s: float


class ModelWritten(Event, frozen=True, tag="model.left"):
    """The trained model is on the disk."""

    brief = "the model of round {round} is in {folder}"
    folder: str
    round: int


class ModelMissing(Event, frozen=True, tag="model.not_left"):
    """The run leaves no model. It has ended as well or badly as without that."""

    level = WARNING
    why = "its parameters have not come in time, have no room in memory, or could not be written"
    do = "`shoal export CHECKPOINT --to FOLDER` makes one of the last checkpoint, on any host"
    says = "no model is left: {reason}"
    reason: str


class ModelFetching(Event, frozen=True, tag="model.fetching"):
    """The client fetches the model from the servers, which takes a while."""

    share: float
    num_bytes: int

    def say(self) -> str:
        return f"fetching the model from the servers: {self.share:.0%} of {self.num_bytes / 1e6:,.0f} MB"
