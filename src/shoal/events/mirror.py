"""A mirror: what it holds, and why it holds nothing."""

from __future__ import annotations

from logging import WARNING

from shoal.events.base import Event
from shoal.ids import PeerId


class MirrorServes(Event, frozen=True, tag="mirror.serves"):
    """A host that was started as a mirror follows the run."""

    says = "{role} follows run {run}: it takes the state of every stage, record by record, and gives it to newcomers"
    role: str
    run: str


class MirrorHolds(Event, frozen=True, tag="mirror.holds"):
    """This mirror holds the state of a stage as a record names it, and gives it to whoever asks."""

    stage: int
    round: int
    record: str


class MirrorTooSmall(Event, frozen=True, tag="mirror.too_small"):
    """This host has not the memory for the states of all stages: the mirror takes no state until it has."""

    level = WARNING
    why = "a mirror holds parameters, momentum and buffers of all stages, and has to have room for one that arrives"
    do = "free memory here, or run `shoal mirror` on a host that has it; --no-param-mirror-enable starts none here"
    says = (
        "the mirror takes no state: it needs {needed_mb:,.0f} MB more, and {free_mb:,.0f} MB are free on its host; the "
        "run goes on without it"
    )
    needed_mb: float
    free_mb: float


class MirrorsBehind(Event, frozen=True, tag="mirrors.behind"):
    """The run ends, and mirrors that can be reached have not the newest state of every stage."""

    level = WARNING
    why = "the run waits for mirrors only as long as they get further; theirs is a slow link, or a host without memory"
    do = "the model of the last round is in the log folder all the same"
    says = "{count} of the run's mirrors have not all of round {round} after {waited_s:.0f} s: they keep an older one"
    round: int
    count: int
    waited_s: float


class CheckpointWritten(Event, frozen=True, tag="checkpoint.written"):
    """A checkpoint is on the disk, read back, and in its place.

    Attributes:
        removed: rounds whose checkpoints are not kept any more, and are gone.
    """

    round: int
    location: str
    num_bytes: int
    took_s: float
    removed: tuple[int, ...]


class CheckpointFailed(Event, frozen=True, tag="checkpoint.failed"):
    """A checkpoint could not be written. The next one is tried when it is due; that it fails as well is not said."""

    level = WARNING
    why = "the disk is full or fails, or the object store does not answer; the checkpoints before are as they were"
    do = "give the next start another --checkpoint-dir if need be; --resume goes on from the last good one"
    says = "no checkpoint of round {round}: {reason}"
    round: int
    reason: str


class CheckpointPlaceTaken(Event, frozen=True, tag="checkpoint.place_taken"):
    """Another mirror was writing to the folder when a checkpoint was due. The next one is tried when it is due; that
    the folder is taken then as well is not said.

    Attributes:
        holder: the process that writes there, and its host.
    """

    level = WARNING
    why = "two mirrors of the run keep their checkpoints in one folder, to which one at a time writes"
    do = "end one of them, or start it with another --checkpoint-dir; what the other one writes is whole"
    says = "no checkpoint of round {round} by this mirror: {holder} writes to {location} now"
    round: int
    location: str
    holder: str


class CheckpointStalled(Event, frozen=True, tag="checkpoint.stalled"):
    """A checkpoint is being written, and its disk takes nothing. At the end of a run it is waited for no longer."""

    level = WARNING
    why = "the disk, or the network that it is behind, does not answer"
    do = "look after the disk; the run trains on, and --checkpoint-dir gives its next start another one"
    says = "no checkpoint is written: the disk of {location} has taken nothing for {waited_s:.0f} s"
    location: str
    waited_s: float


class LastCheckpointAwaited(Event, frozen=True, tag="checkpoint.last_awaited"):
    """The run ends, and mirrors are still writing the checkpoint of its last record."""

    says = (
        "the checkpoint of round {round} is being written, with what inner optimizers know; Ctrl-C again does without"
    )
    round: int


class LastCheckpointLacks(Event, frozen=True, tag="checkpoint.last_lacks"):
    """The run has ended, and the checkpoint of its last record is not what was wanted, or is not there."""

    level = WARNING
    why = "a server or the mirror was lost, or the disk takes nothing: the run does not wait for them for ever"
    do = "--resume goes on from the newest checkpoint that is whole; `shoal checkpoints` lists them"
    says = "the checkpoint of round {round}: {lacks}"
    round: int
    lacks: str


class CheckpointsLeft(Event, frozen=True, tag="checkpoint.not_removed"):
    """A checkpoint is written, and older ones that are not to be kept are still there."""

    level = WARNING
    why = "the disk or the object store does not let them be removed"
    says = "the checkpoint is written, but {reason}"
    reason: str


class InnerMissing(Event, frozen=True, tag="inner.missing"):
    """A member of a record does not give what its inner optimizer knew: in a run that is resumed from the checkpoint,
    its place begins anew, or copies another one."""

    level = WARNING
    round: int
    stage: int
    peer: PeerId
