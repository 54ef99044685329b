"""What a client's run is made of, for the machine that decides about it and for who carries that out.

rules, facts --> `swarm.run_client` --> effects
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from shoal.errors import ShoalError
from shoal.events.base import Event
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import StartTrainer
from shoal.swarm.client_turn import AskClient, TakeTurn
from shoal.swarm.round_effects import RoundReady
from shoal.swarm.routing import Pipeline
from shoal.swarm.view import SwarmView
from shoal.wire.messages.base import StepRange


@dataclass(frozen=True)
class RoundPlan:
    """A round as it was given to the trainers.

    Attributes:
        round: 1-based; the evaluation at the end of the run has the number after the last round.
        steps: of each slot; none in that evaluation.
        pipelines: the home of each slot.
        generations: of the slots' trainers when the round began.
        begun_s: in the time of the run (`swarm.round_boundary`).
        speeds: samples per second of the pipelines, 0 where not known; empty where shares are fixed.
    """

    round: int
    steps: StepRange
    pipelines: tuple[Pipeline, ...]
    generations: dict[int, int]
    begun_s: float
    speeds: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRules:
    """What a run is, for who leads it.

    Attributes:
        total_steps: of each slot, in all rounds.
        steps_of: the numbers of those of a round.
        expected_servers: are waited for before the first round; 0: unknown, so one complete pipeline is.
        averaging_timeout_s: after which it is said that a round is slow.
        first_deadline_s: of a round while it is not known how long one takes; infinite: as long as it takes, always.
        evaluates: whether a round begins with an evaluation of the record before.
        succeeds: clients of other hosts have begun the run.
        patient: wait without a limit for servers.
    """

    num_stages: int
    num_rounds: int
    total_steps: int
    steps_of: Callable[[int], StepRange]
    expected_servers: int
    servers_timeout_s: float
    averaging_timeout_s: float
    first_deadline_s: float
    evaluates: Callable[[int], bool] = lambda _: True
    succeeds: bool = False
    patient: bool = False


class RunFacts(Protocol):
    """What a client knows of its swarm now.

    Attributes:
        view: who is there, as announced.
        leads: whether it coordinates the rounds, or tries to.
        ready: from which record to go on; None while that is not known.
        holders: the replicas that hold it, with their stages; None while that is not known.
        committed_round: of the record that this client has committed last.
        is_placing: whether servers are being sent to the stages where they should stand at first.
        is_handing_over: whether the last state of a stage is being fetched from a server that leaves.
        is_letting_go: whether a server that may leave has not ended yet.
        stuck: stages that have no replica which takes part.
        is_unfed: whether nobody gets samples, since the data server is lost or has none.
        is_refused: whether all trainers that have something left wait: servers refuse their steps, or they reach none.
        unmirrored: mirrors that can be reached, each with every stage that it lacks of the record that stands.
    """

    @property
    def view(self) -> SwarmView: ...
    @property
    def leads(self) -> bool: ...
    @property
    def ready(self) -> RoundReady | None: ...
    @property
    def holders(self) -> Mapping[PeerId, int] | None: ...
    @property
    def committed_round(self) -> int: ...
    @property
    def is_placing(self) -> bool: ...
    @property
    def is_handing_over(self) -> bool: ...
    @property
    def is_letting_go(self) -> bool: ...
    @property
    def stuck(self) -> Sequence[int]: ...
    @property
    def is_unfed(self) -> bool: ...
    @property
    def is_refused(self) -> bool: ...
    @property
    def unmirrored(self) -> frozenset[tuple[PeerId, int]]: ...
    @property
    def durations_s(self) -> Sequence[float]: ...

    def usable(self, known: Mapping[PeerId, int]) -> SwarmView:
        """Return the view less the replicas that do not hold the record, or leave their stage.

        Args:
            known: holds while the coordinator does not know `holders`.
        """
        ...

    def is_own(self, ready: RoundReady, base: str) -> bool:
        """Return whether a start of this client has made the record that is ready, on top of the one with the hash
        `base`."""
        ...

    def is_evaluated(self, round: int) -> bool:
        """Return whether a record's loss on the held-out samples is known, or there are none."""
        ...


class RunPhase(Enum):
    """What a client waits for."""

    WAIT_TURN = auto()
    """No client of another host can be reached that comes before it."""
    GATHER = auto()
    """As many servers as were started, or one of each stage."""
    SETTLE = auto()
    """Nobody comes any more."""
    LEAD = auto()
    """The servers agree on where the run is."""
    CATCH_UP = auto()
    """All servers have taken the record from which the run is resumed."""
    PLACE = auto()
    """Each server stands where it should."""
    INHERIT = auto()
    """The record that clients of other hosts have committed is written down."""
    FORM = auto()
    """There is a pipeline."""
    STAFF = auto()
    """Each slot has a trainer."""
    GIVE = auto()
    """The replicas have what their inner optimizers knew at a checkpoint."""
    TRAIN = auto()
    """The trainers are done."""
    HAND_OVER = auto()
    """No stage is being handed over: a record committed meanwhile would have to be fetched anew."""
    AVERAGE = auto()
    """The round's record stands."""
    RECORD = auto()
    """It is written down, and acted upon."""
    MIRROR = auto()
    """Mirrors have the last record."""
    OVER = auto()


@dataclass(frozen=True, slots=True)
class Stand:
    """Take the lead."""


@dataclass(frozen=True, slots=True)
class PlaceServers:
    """Have servers stand where they should."""


@dataclass(frozen=True, slots=True)
class InheritRecord:
    """Go on from a record of others; then say `carried_out`."""

    ready: RoundReady


@dataclass(frozen=True, slots=True)
class GiveInner:
    """Give the replicas what a checkpoint has of their inner optimizers; then say `carried_out`."""

    record_hash: str


@dataclass(frozen=True, slots=True)
class BeginRound:
    """Have the trainers train. There may be no steps, but an evaluation of the record `base`.

    Attributes:
        left: as an earlier start of this client has begun it; its trainers have been told. None: it begins now.
    """

    round: int
    steps: StepRange
    base: str
    begun_s: float
    left: RoundPlan | None


@dataclass(frozen=True, slots=True)
class EndTraining:
    """The trainers of the round are waited for no longer."""


@dataclass(frozen=True, slots=True)
class CloseRound:
    """Have the replicas average.

    Attributes:
        trained_s: how long the round was trained, in the time of the run; None: this client has not begun it.
    """

    round: int
    trained_s: float | None = None


@dataclass(frozen=True, slots=True)
class WriteRecord:
    """A record stands: write it down and act on it; then say `carried_out`.

    Attributes:
        begun_s: when this client has begun the round, in the time of the run; None: it has not.
        closed_s: when it has ended it, likewise.
    """

    ready: RoundReady
    begun_s: float | None
    closed_s: float | None


@dataclass(frozen=True, slots=True)
class Failed:
    """The run ends here."""

    error: ShoalError


RunEffect = (
    AskClient
    | TakeTurn
    | Stand
    | PlaceServers
    | InheritRecord
    | StartTrainer
    | GiveInner
    | BeginRound
    | EndTraining
    | CloseRound
    | WriteRecord
    | Failed
    | Event
)
"""Events are to be noted."""
RunEffects = list[RunEffect]
