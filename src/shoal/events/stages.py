"""What becomes of the stages of a run, of the servers between them, and of chains of records that meet."""

from __future__ import annotations

from collections.abc import Sequence
from logging import WARNING

from shoal.events.base import Event
from shoal.ids import PeerId

# -- stages without a server


class TrainingStopped(Event, frozen=True, tag="training.stopped"):
    """A stage has no server that takes part, so nothing can be trained."""

    level = WARNING
    do = "start servers on any machine of the swarm: they take the stage that has none"
    stages: tuple[int, ...]

    def say(self) -> str:
        return f"training has stopped: no server serves {stages_named(self.stages)}; it waits for servers"


class TrainingWaits(Event, frozen=True, tag="training.waits"):
    """Training stands still as before; the stages without a server are others now."""

    stages: tuple[int, ...]

    def say(self) -> str:
        return f"training waits for servers of {stages_named(self.stages)} now"


class TrainingStands(Event, frozen=True, tag="training.stands"):
    """Training has stood still for a while; said again and again."""

    stages: tuple[int, ...]
    waited_s: int

    def say(self) -> str:
        return f"training has stood still for {self.waited_s} s: no server for {stages_named(self.stages)}"


class TrainingResumed(Event, frozen=True, tag="training.resumed"):
    """Every stage has a server again."""

    stages: tuple[int, ...]

    def say(self) -> str:
        return f"{stages_named(self.stages)} {'are' if len(self.stages) > 1 else 'is'} served again: training goes on"


class StageBeganAnew(Event, frozen=True, tag="stage.began_anew"):
    """No server held the state of a stage any more, so the stage starts again from an older one.

    Attributes:
        in_round: the round in which it starts again.
        base_round: after which it had the state from which it starts; 0: the initial parameters.
        parameters: their hash.
    """

    level = WARNING
    why = "all servers that held it have ended, or have stayed away for too long"
    stage: int
    in_round: int
    base_round: int
    parameters: str

    def say(self) -> str:
        lost = _rounds(self.base_round + 1, self.in_round - 1)
        origin = "its initial parameters (seed, configuration)"
        if self.base_round:
            origin = f"its state after round {self.base_round}"
        return (
            f"the state of stage {self.stage} is lost: no server holds it any more; what it learnt in {lost} is gone, "
            f"and it starts again from {origin}"
        )


class StageStands(Event, frozen=True, tag="stage.stands"):
    """A server has come back with the state that had been given up for lost, before another one was built on."""

    says = "a server has come back with the state of stage {stage}: it stands, nothing of it is lost"
    stage: int
    in_round: int


class StageKept(Event, frozen=True, tag="stage.kept"):
    """The last servers of a stage leave, and the client keeps its state for the next one."""

    says = (
        "the last servers of stage {stage} leave: its state after round {round} is kept here, and given to the next "
        "server of this stage"
    )
    stage: int
    round: int
    record: str


class StageRead(Event, frozen=True, tag="stage.read"):
    """The client has read the state of a stage from the checkpoint from which the run was resumed, and gives it to
    servers."""

    stage: int
    round: int
    record: str


class StagesGiven(Event, frozen=True, tag="stages.given"):
    """A run is resumed, and its servers take the state of these stages from the checkpoint."""

    stages: tuple[int, ...]

    def say(self) -> str:
        return f"servers take the state of {stages_named(self.stages)} from the checkpoint"


class InnerGiven(Event, frozen=True, tag="inner.given"):
    """A run is resumed, and inner optimizers go on from what they knew at the checkpoint."""

    round: int
    taken: int
    replicas: int

    def say(self) -> str:
        of = "all" if self.taken == self.replicas else f"{self.taken} of {self.replicas}"
        return f"the inner optimizers of {of} servers go on from where they were after round {self.round}"


class InnerAnew(Event, frozen=True, tag="inner.anew"):
    """A run is resumed, and some inner optimizers begin as if they had done no step.

    Attributes:
        why_of: by server.
    """

    level = WARNING
    why = (
        "the mirror could not get them when it wrote the checkpoint, or param_mirror.inner is none, or a server could "
        "not take them; parameters and momentum are those of the record all the same"
    )
    round: int
    why_of: dict[PeerId, str]

    def say(self) -> str:
        reasons = "; ".join(sorted(set(self.why_of.values())))
        if len(self.why_of) == 1:
            return f"the inner optimizer of a server begins anew ({reasons})"
        return f"the inner optimizers of {len(self.why_of)} servers begin anew ({reasons})"


class StageNotKept(Event, frozen=True, tag="stage.not_kept"):
    """The last servers of a stage leave, and the client cannot keep its state."""

    level = WARNING
    stage: int
    round: int
    reason: str


class StageReleased(Event, frozen=True, tag="stage.released"):
    """A stage whose state the client has kept has servers again, which hold a newer one."""

    stage: int
    round: int


class ServersFewer(Event, frozen=True, tag="servers.fewer"):
    """Some servers that were started with the run have not come in time: it begins without them."""

    level = WARNING
    expected: int
    found: int


class StagesMissing(Event, frozen=True, tag="stages.missing"):
    """Enough servers have come for all stages, but some stages have none."""

    level = WARNING
    stages: tuple[int, ...]


# -- servers between stages


class MoveOrdered(Event, frozen=True, tag="move.ordered"):
    """The client sends a server to another stage.

    Attributes:
        urgent: that stage has none.
    """

    says = "{who} moves from stage {from_stage} to stage {to_stage}: {reason}"
    peer: PeerId
    who: str
    from_stage: int
    to_stage: int
    urgent: bool
    reason: str


class MoveEnded(Event, frozen=True, tag="move.ended"):
    """A server that was sent to another stage serves it."""

    says = "{who} serves stage {to_stage}"
    peer: PeerId
    who: str
    from_stage: int
    to_stage: int


class MoveFailed(Event, frozen=True, tag="move.failed"):
    """A server that was sent to another stage does not come to it.

    Attributes:
        reason: what the server has said; empty: nothing.
    """

    level = WARNING
    why = "its stage cannot spare it, or it has ended on the way"
    peer: PeerId
    who: str
    from_stage: int
    to_stage: int
    how: str
    reason: str

    def say(self) -> str:
        return f"{self.who} does not move to stage {self.to_stage}: {self.reason or self.how}"


# -- chains of records


class ChainLost(Event, frozen=True, tag="chain.lost"):
    """Two sides of the swarm that had gone on apart have met, and the run goes on with one of them.

    Attributes:
        base_round: of the newest record of the side that is lost.
        record: the hash of that record.
        common_round: the last round that both sides share.
        samples: how many the lost side has recorded, including those of the common rounds.
        samples_freed: how many of them only the lost side has recorded; they are trained on again.
        kept_round: of the newest record of the side that stands.
        kept_record: the hash of that record.
    """

    why = "the network between the two sides was cut for longer than a round takes"
    base_round: int
    record: str
    common_round: int
    samples: int
    samples_freed: int
    kept_round: int
    kept_record: str
    at_s: float = 0.0

    def told(self) -> str:
        lost = _rounds(self.common_round + 1, self.base_round)
        return (
            f"two sides of the swarm, which have gone on apart after round {self.common_round}, have met: the run goes "
            f"on from record {self.kept_round} ({self.kept_record[:8]}); what the other side trained in {lost} is lost "
            f"({self.record[:8]}), and {self.samples_freed} samples that it alone has used are trained on again"
        )


def _rounds(first: int, last: int) -> str:
    return f"round {last}" if first == last else f"rounds {first} to {last}"


def stages_named(stages: Sequence[int]) -> str:
    """Name one stage or several in a sentence."""
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
