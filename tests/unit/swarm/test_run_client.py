"""What a client does next, from its first server to its last record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest

from shoal.errors import ControlError, NoPipeline, RoundAborted
from shoal.events.losses import ClientReplaced
from shoal.events.mirror import MirrorsBehind
from shoal.events.run import EvaluationIncomplete, RoundSlow, RoundTakenUp, RunEnded
from shoal.events.stages import ServersFewer, StagesMissing
from shoal.events.trainers import TrainersSilent
from shoal.ids import Ballot, PeerId, StageIndex
from shoal.runtime.launcher_messages import StartTrainer
from shoal.swarm.client_turn import AskClient, ClientTurn, TakeTurn
from shoal.swarm.records import Tip
from shoal.swarm.round_boundary import RunTime
from shoal.swarm.round_effects import RoundReady
from shoal.swarm.routing import Pipeline
from shoal.swarm.run_client import (
    AGAIN_S,
    GONE_S,
    MAX_EVALUATIONS,
    MAX_STARTS,
    NO_FURTHER_S,
    PATIENCE_S,
    RETURN_S,
    SETTLE_S,
    RunClient,
)
from shoal.swarm.run_effects import (
    BeginRound,
    CloseRound,
    EndTraining,
    Failed,
    GiveInner,
    InheritRecord,
    PlaceServers,
    RoundPlan,
    RunEffect,
    RunPhase,
    RunRules,
    Stand,
    WriteRecord,
)
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.swarm.view import Candidate, ClientPeer, Replica, Run, SwarmView
from shoal.wire.messages.base import Hop, StepRange
from shoal.wire.messages.control import TrainerHello
from shoal.wire.messages.round import SignedRecord

RULES = RunRules(
    num_stages=2,
    num_rounds=3,
    total_steps=30,
    steps_of=lambda round: StepRange(10 * (round - 1), 10 * round),
    expected_servers=2,
    servers_timeout_s=60.0,
    averaging_timeout_s=20.0,
    first_deadline_s=40.0,
)
SIGNED = SignedRecord(b"", b"", b"")
M = PeerId("M")


def tip(round: int, name: str = "") -> Tip:
    return Tip(round, name or f"D{round}", SIGNED if round else None)


def view_of(*names: str, candidates: Sequence[str] = ()) -> SwarmView:
    """Replicas named after their stages, as in a0 b1."""
    named = sorted(names, key=lambda name: name[1])
    replicas = [Replica(Hop(PeerId(name), ()), 0.0, stage=StageIndex(int(name[1]))) for name in named]
    return SwarmView(tuple(replicas), tuple(Candidate(Hop(PeerId(name), ()), 0.0) for name in candidates))


@dataclass
class Facts:
    """What the client is told."""

    view: SwarmView = field(default_factory=SwarmView)
    leads: bool = False
    ready: RoundReady | None = None
    holders: Mapping[PeerId, int] | None = None
    committed_round: int = 0
    is_placing: bool = False
    is_handing_over: bool = False
    is_letting_go: bool = False
    stuck: Sequence[int] = ()
    is_unfed: bool = False
    is_refused: bool = False
    unmirrored: frozenset[tuple[PeerId, int]] = frozenset()
    durations_s: Sequence[float] = ()
    evaluated: set[int] = field(default_factory=set[int])
    made_on: str = "D1"
    """On top of which record this client has made the one that stands; empty: others have made it."""

    def usable(self, known: Mapping[PeerId, int]) -> SwarmView:
        return self.view

    def is_own(self, ready: RoundReady, base: str) -> bool:
        return base == self.made_on

    def is_evaluated(self, round: int) -> bool:
        return round in self.evaluated


class Desk:
    """A client, and a swarm that does what it is told."""

    def __init__(
        self,
        rules: RunRules = RULES,
        *,
        turn: ClientTurn | None = None,
        left: RoundPlan | None = None,
        base: str = "",
    ) -> None:
        self.now_s = 100.0
        self.facts = Facts()
        self.time = RunTime()
        self.slots = TrainerSlots(start_timeout_s=20.0)
        self.run = RunClient(rules, self.slots, self.time, turn=turn, left=left, base=base)
        self.launches = True
        if turn is None:
            assert self.run.look(self.facts, self.now_s) == [TakeTurn()], "it comes before everybody else"

    def look(self, after_s: float = 0.0) -> list[RunEffect]:
        """Return all that it does now."""
        self.now_s += after_s
        done: list[RunEffect] = []
        while effects := self.run.look(self.facts, self.now_s):
            for effect in effects:
                done.append(effect)
                self.obey(effect)
        assert self.run.wake_at_s > self.now_s, "it would be asked again and again"
        return done

    def wakes(self) -> float:
        """Go on to when it wants to be asked; return after how long."""
        assert math.isfinite(self.run.wake_at_s)
        after_s = self.run.wake_at_s - self.now_s
        assert after_s > 0
        self.now_s = self.run.wake_at_s
        return after_s

    def obey(self, effect: RunEffect) -> None:
        match effect:
            case Stand():
                self.facts.leads = True
            case PlaceServers():
                self.facts.is_placing = True
            case StartTrainer(slot, generation) if self.launches:
                self.slots.launched(slot, generation, "", self.now_s)
                self.hello(slot, generation)
            case BeginRound(round, steps):
                self.slots.nothing_done()
                slots = frozenset(pipeline.slot for pipeline in self.run.pipelines)
                self.slots.begin_round(round, slots, steps, (), (), self.now_s)
            case EndTraining():
                self.slots.end_round()
            case InheritRecord() | GiveInner() | WriteRecord():
                self.run.carried_out()
            case _:
                pass

    def hello(self, slot: int, generation: int, round: int = 0) -> None:
        peer = PeerId(f"T{slot}.{generation}")
        self.slots.receive(peer, TrainerHello(slot, generation, Hop(peer, ()), round), self.now_s)

    def stands(self, round: int, name: str = "", *, committed: bool = True) -> None:
        """A record stands; `committed`: by this client."""
        holders = {replica.peer: int(replica.stage) for replica in self.facts.view.replicas}
        self.facts.ready = RoundReady(tip(round, name), holders, {})
        self.facts.holders = holders
        if committed and round:
            self.facts.committed_round = round

    def trains(self, *names: str) -> list[RunEffect]:
        """Go on until the first round is trained."""
        self.facts.view = view_of(*(names or ("a0", "b1")))
        self.look()
        self.stands(0)
        self.look()
        self.facts.is_placing = False
        return self.look()

    def done(self) -> list[RunEffect]:
        """All trainers are done."""
        for pipeline in self.run.pipelines:
            self.slots.finish(pipeline.slot)
        return self.look()

    def committed(self, round: int) -> list[RunEffect]:
        self.stands(round)
        return self.look()


def failure(effects: Sequence[RunEffect]) -> Exception:
    (failed,) = (effect for effect in effects if isinstance(effect, Failed))
    return failed.error


def begun(effects: Sequence[RunEffect]) -> BeginRound:
    (begin,) = (effect for effect in effects if isinstance(effect, BeginRound))
    return begin


# -- servers


def test_a_run_goes_from_its_servers_to_its_last_record() -> None:
    desk = Desk()
    desk.facts.view = view_of("a0")
    assert desk.look() == []
    desk.facts.view = view_of("a0", "b1")
    assert desk.look() == [Stand()]
    desk.stands(0)
    assert desk.look() == [PlaceServers()]
    desk.facts.is_placing = False
    assert desk.look() == [
        StartTrainer(0, 1),
        GiveInner("D0"),
        BeginRound(1, StepRange(0, 10), "D0", 100.0, None),
    ]
    assert desk.look(5.0) == []
    assert desk.done() == [EndTraining(), CloseRound(1, 5.0)]
    desk.now_s += 2.0
    effects = desk.committed(1)
    assert effects == [
        WriteRecord(desk.facts.ready, 100.0, 105.0),  # type: ignore[arg-type]
        GiveInner("D1"),
        BeginRound(2, StepRange(10, 20), "D1", 107.0, None),
    ]
    assert desk.run.holders == {"a0": 0, "b1": 1}
    desk.done()
    desk.committed(2)
    desk.done()
    evaluation = begun(desk.committed(3))
    assert (evaluation.round, evaluation.steps, evaluation.base) == (4, StepRange(30, 30), "D3")
    desk.facts.evaluated.add(3)
    assert desk.done() == [EndTraining()]
    assert desk.run.phase is RunPhase.OVER
    assert desk.run.base == "D3"


def test_a_client_goes_on_with_fewer_servers_than_were_started_if_each_stage_has_one() -> None:
    desk = Desk(replace(RULES, expected_servers=4))
    desk.facts.view = view_of("a0", "b1")
    desk.look()
    assert desk.wakes() == RULES.servers_timeout_s
    assert desk.look() == [ServersFewer(4, 2), Stand()]


def test_stages_without_servers_are_named_when_they_do_not_come_in_time() -> None:
    desk = Desk()
    desk.facts.view = view_of("a0", candidates=["x"])
    desk.look()
    desk.wakes()
    error = failure(desk.look())
    assert isinstance(error, NoPipeline)
    assert "no replica serves stage 1" in str(error)


def test_a_patient_client_waits_for_servers_however_long_it_takes() -> None:
    desk = Desk(replace(RULES, patient=True))
    desk.facts.view = view_of("a0", candidates=["x"])
    assert desk.look() == []
    assert desk.run.wake_at_s == math.inf
    desk.facts.view = view_of("a0", "b1")
    desk.look(1e6)
    desk.facts.view = view_of("a0")
    assert desk.look(1e6) == []
    assert desk.run.phase is RunPhase.LEAD


def test_servers_that_took_the_same_stage_are_led_early_and_only_once() -> None:
    desk = Desk()
    desk.facts.view = view_of("a0", "b0")
    assert desk.look() == []
    assert desk.wakes() == SETTLE_S
    assert desk.look() == [StagesMissing((StageIndex(1),)), Stand()]
    assert desk.look(2 * SETTLE_S) == []
    desk.facts.view = view_of("a0", "b1")
    assert desk.look() == []
    assert desk.run.phase is RunPhase.LEAD


def test_a_gap_that_is_filled_in_time_is_none() -> None:
    desk = Desk(replace(RULES, expected_servers=3))
    desk.facts.view = view_of("a0", "b0")
    desk.look()
    desk.facts.view = view_of("a0", "b0", candidates=["x"])
    desk.look(0.9 * SETTLE_S)
    desk.facts.view = view_of("a0", "b0")
    assert desk.look(0.9 * SETTLE_S) == []


def test_an_unknown_number_of_servers_is_there_when_nobody_has_come_for_a_moment() -> None:
    desk = Desk(replace(RULES, expected_servers=0))
    desk.facts.view = view_of("a0", "b1")
    assert desk.look() == []
    assert desk.run.is_hurried
    desk.facts.view = view_of("a0", "b1", "c1")
    assert desk.look(0.9 * SETTLE_S) == []
    assert desk.look(0.9 * SETTLE_S) == []
    assert desk.look(0.1 * SETTLE_S) == [Stand()]
    assert not desk.run.is_hurried


def test_a_stage_that_is_lost_before_the_run_is_led_ends_it_only_when_it_stays_lost() -> None:
    desk = Desk()
    desk.facts.view = view_of("a0", "b1")
    desk.look()
    desk.facts.view = view_of("a0")
    desk.look(50.0)
    desk.facts.view = view_of("a0", "b1")
    desk.look(50.0)
    desk.facts.view = view_of("b1")
    assert desk.look(50.0) == []
    assert desk.wakes() == RULES.servers_timeout_s
    assert "stage 0" in str(failure(desk.look()))


def test_a_client_waits_for_its_turn_before_it_gathers_servers() -> None:
    turn = ClientTurn(M, "run")
    desk = Desk(turn=turn)
    assert (desk.look(), desk.run.has_turn, desk.run.is_hurried) == ([], False, True)
    before = Hop(PeerId("C"), ())
    desk.facts.view = replace(view_of("a0", "b1"), clients=(ClientPeer(before, 0.0),), run=Run("run", 2, before.peer))
    assert desk.look() == [AskClient(before)]
    assert not desk.run.is_hurried
    turn.lost(before.peer, desk.now_s)
    desk.facts.view = replace(desk.facts.view, clients=(), run=None)
    assert (desk.look(), desk.run.has_turn) == ([], False)
    replaced, *rest = desk.look(PATIENCE_S)
    assert isinstance(replaced, ClientReplaced)
    assert rest == [TakeTurn(), Stand()]
    assert desk.run.has_turn


@pytest.mark.parametrize("well", [True, False])
def test_the_run_that_a_client_waits_for_ends(well: bool) -> None:
    desk = Desk(turn=ClientTurn(M, "run"))
    desk.look()
    desk.run.ended("it is over", well=well)
    if well:
        assert desk.look() == [RunEnded("it is over")]
    else:
        assert str(failure(desk.look())) == "it is over"
    assert (desk.run.phase, desk.run.has_turn, desk.look()) == (RunPhase.OVER, False, [])


def test_who_is_deposed_ends() -> None:
    desk = Desk()
    desk.facts.view = view_of("a0", "b1")
    assert desk.look() == [Stand()]
    desk.facts.leads = False
    desk.run.deposed(Ballot(7, M, 1))
    error = failure(desk.look())
    assert isinstance(error, RoundAborted)
    assert "taken the run over under ballot 7" in str(error)
    assert (desk.run.phase, desk.look(), desk.run.is_replaced) == (RunPhase.OVER, [], True)


def test_the_evaluation_at_the_end_is_given_more_time_than_rounds_have_taken() -> None:
    desk = Desk(replace(RULES, num_rounds=1))
    desk.trains()
    desk.slots.finish(0)
    desk.look()
    desk.stands(1)
    desk.facts.durations_s = (1.0, 1.0, 1.0)
    desk.look()
    assert desk.run.phase is RunPhase.TRAIN
    assert desk.wakes() == RULES.first_deadline_s


def test_a_round_that_begins_with_an_evaluation_is_given_the_time_of_such_rounds() -> None:
    desk = Desk(replace(RULES, num_rounds=9, evaluates=lambda round: round % 2 == 0))
    desk.trains()
    desk.facts.durations_s = (1.0, 1.0, 1.0)
    deadlines_s: list[float] = []
    for round in range(2, 9):
        desk.now_s += 4.0 if round % 2 else 1.0  # they end now, an even round before this one has taken longer
        desk.slots.finish(0)
        desk.look()
        desk.stands(round - 1)
        desk.look()
        assert desk.run.phase is RunPhase.TRAIN
        deadlines_s.append(desk.run.wake_at_s - desk.now_s)
    assert deadlines_s[0] == deadlines_s[2] == deadlines_s[4] == RULES.first_deadline_s, "no such round is known yet"
    assert deadlines_s[1] == deadlines_s[3] == deadlines_s[5] < 4.0
    assert deadlines_s[1] < 4.0 < deadlines_s[6] < RULES.first_deadline_s, "of three such rounds one knows"


def test_a_client_that_has_its_turn_does_not_end_because_the_one_before_it_says_so() -> None:
    desk = Desk()
    desk.facts.view = view_of("a0", "b1")
    desk.run.ended("it is over", well=True)
    assert desk.look() == [Stand()]


@pytest.mark.parametrize("comes", [True, False])
def test_a_resumed_run_begins_with_all_servers_that_are_there_unless_one_takes_long(comes: bool) -> None:
    desk = Desk(base="D2")
    desk.facts.view = view_of("a0", "b1", "c1")
    desk.look()
    desk.stands(2, committed=False)
    desk.facts.holders = {PeerId("a0"): 0, PeerId("b1"): 1}
    assert desk.look() == []
    if comes:
        desk.stands(2, committed=False)
    else:
        assert desk.wakes() == RULES.servers_timeout_s
    assert desk.look() == [PlaceServers()]


# -- where the run stands


def plan(round: int, steps: StepRange | None = None) -> RoundPlan:
    steps = RULES.steps_of(round) if steps is None else steps
    path = tuple(replica.hop for replica in view_of("a0", "b1").replicas)
    return RoundPlan(round, steps, (Pipeline(0, path),), {0: 3}, 7.0, (1.5,))


def started_again(left: RoundPlan, base: str, stands: int) -> Desk:
    desk = Desk(left=left, base=base)
    desk.slots.adopt({0: 3}, [0])
    desk.facts.view = view_of("a0", "b1")
    assert desk.look() == [Stand()], "a client that is started again waits for one pipeline, and for no others"
    desk.stands(stands, committed=False)
    return desk


def test_a_client_that_is_started_again_goes_on_in_its_round_with_the_trainers_that_it_had() -> None:
    left = plan(2)
    desk = started_again(left, "D1", 1)
    assert desk.look() == [RoundTakenUp(2, 1)]
    desk.hello(0, 3, round=2)
    assert desk.look() == [BeginRound(2, StepRange(10, 20), "D1", 7.0, left)]
    assert desk.run.pipelines == left.pipelines
    assert desk.done() == [EndTraining(), CloseRound(2, 93.0)]
    (written, *_) = desk.committed(2)
    assert isinstance(written, WriteRecord)
    assert written.begun_s == 7.0


def test_a_trainer_that_does_not_return_is_waited_for_no_longer_than_a_moment() -> None:
    desk = started_again(plan(2), "D1", 1)
    desk.look()
    assert desk.wakes() == RETURN_S
    assert isinstance(desk.look()[0], BeginRound)
    assert desk.slots.generations == {0: 4}, "the next one is started"


def test_a_record_that_was_committed_while_there_was_no_client_is_written_first() -> None:
    desk = started_again(plan(2), "D1", 2)
    desk.launches = False
    written = WriteRecord(desk.facts.ready, 7.0, None)  # type: ignore[arg-type]
    assert desk.look()[:2] == [RoundTakenUp(2, 2), written]
    desk.slots.forgo([0])
    desk.hello(0, 3)
    assert begun(desk.look()).round == 3


def test_a_client_whose_run_has_gone_on_without_it_inherits_what_stands() -> None:
    desk = started_again(plan(2), "D1", 2)
    desk.facts.made_on = ""
    ready = desk.facts.ready
    assert desk.look() == [InheritRecord(ready), CloseRound(3)]  # type: ignore[arg-type]
    (written, *_) = desk.committed(3)
    assert isinstance(written, WriteRecord)
    assert written.begun_s is None, "it was not this client that has begun it"


def test_servers_that_are_further_back_end_a_client_that_is_started_again() -> None:
    desk = started_again(plan(3), "D2", 0)
    error = failure(desk.look())
    assert isinstance(error, ControlError)
    assert "hold record 0" in str(error)


@pytest.mark.parametrize(("name", "goes_on"), [("D2", True), ("newer", False)])
def test_a_client_that_resumes_goes_on_where_the_checkpoint_was_and_nowhere_else(name: str, goes_on: bool) -> None:
    desk = Desk(base="D2")
    desk.facts.view = view_of("a0", "b1")
    desk.look()
    desk.stands(2, name, committed=False)
    desk.look()
    desk.facts.is_placing = False
    effects = desk.look()
    assert any(isinstance(effect, BeginRound) for effect in effects) is goes_on
    assert any(isinstance(effect, InheritRecord) for effect in effects) is not goes_on


def test_who_succeeds_places_nobody_and_ends_the_round_of_others_before_it_trains() -> None:
    desk = Desk(replace(RULES, succeeds=True))
    desk.facts.view = view_of("a0", "b1")
    desk.look()
    desk.stands(1, committed=False)
    ready = desk.facts.ready
    assert desk.look() == [InheritRecord(ready), CloseRound(2)]  # type: ignore[arg-type]
    desk.stands(2)
    assert begun(desk.look()).round == 3


def test_who_succeeds_after_the_last_record_evaluates_it() -> None:
    desk = Desk(replace(RULES, succeeds=True))
    desk.facts.view = view_of("a0", "b1")
    desk.look()
    desk.stands(3, committed=False)
    assert begun(desk.look()).round == 4


@pytest.mark.parametrize("phase", [RunPhase.TRAIN, RunPhase.AVERAGE, RunPhase.STAFF, RunPhase.HAND_OVER])
def test_who_is_overtaken_leaves_its_round_and_goes_on_from_what_stands_then(phase: RunPhase) -> None:
    desk = Desk()
    desk.launches = phase is not RunPhase.STAFF
    desk.trains()
    desk.facts.is_handing_over = phase is RunPhase.HAND_OVER
    if phase in (RunPhase.AVERAGE, RunPhase.HAND_OVER):
        desk.done()
    assert desk.run.phase is phase
    desk.facts.ready = desk.facts.holders = None
    desk.run.overtaken()
    assert desk.run.pipelines == ()
    assert desk.look() == ([EndTraining()] if phase is RunPhase.TRAIN else [])
    assert desk.run.phase is RunPhase.LEAD
    desk.facts.view = view_of("a0")
    assert desk.look(1e6) == [], "a run that has begun waits for its servers"
    desk.facts.view = view_of("a0", "b1")
    desk.facts.is_handing_over = False
    desk.stands(2, "theirs", committed=False)
    assert desk.look() == [InheritRecord(desk.facts.ready), CloseRound(3)]  # type: ignore[arg-type]


def test_what_was_carried_out_before_others_were_met_is_void() -> None:
    desk = Desk()
    desk.trains()
    desk.done()
    desk.stands(1)
    effects = desk.run.look(desk.facts, desk.now_s)
    assert isinstance(effects[0], WriteRecord)
    desk.run.carried_out()
    desk.run.overtaken()
    desk.facts.ready = None
    assert desk.look() == []
    assert desk.run.phase is RunPhase.LEAD


# -- pipelines and trainers


def test_the_first_round_begins_with_what_is_there() -> None:
    desk = Desk()
    desk.trains("a0", "b1", "c1")
    assert [pipeline.peers for pipeline in desk.run.pipelines] == [("a0", "b1")]


def second_round(*names: str, durations_s: Sequence[float]) -> Desk:
    """Two pipelines have trained the first round; of their servers these are left."""
    desk = Desk()
    desk.trains("a0", "c0", "b1", "d1")
    assert len(desk.run.pipelines) == 2
    desk.done()
    desk.facts.view, desk.facts.durations_s = view_of(*names), durations_s
    return desk


def refused_starts(desk: Desk, count: int) -> list[RunEffect]:
    """The launcher refuses so many starts of the only trainer, one after the other."""
    effects: list[RunEffect] = []
    for _ in range(count):
        generation = desk.slots.generations[0]
        desk.slots.launched(0, generation, "cannot fork", desk.now_s)
        assert desk.look() == []
        assert desk.wakes() <= AGAIN_S
        effects += desk.look()
    return effects


@pytest.mark.parametrize("num_refused", [MAX_STARTS - 1, MAX_STARTS])
def test_trainers_that_cannot_be_started_for_a_moment_end_no_run_that_has_trained(num_refused: int) -> None:
    desk = Desk()
    desk.trains()
    desk.done()
    desk.slots.lost(PeerId("T0.1"), desk.now_s)
    desk.launches = False
    desk.committed(1)
    assert desk.run.phase is RunPhase.STAFF
    effects = refused_starts(desk, MAX_STARTS - 1)
    assert effects == [StartTrainer(0, generation) for generation in range(3, 3 + MAX_STARTS - 1)]
    if num_refused == MAX_STARTS:
        desk.slots.launched(0, desk.slots.generations[0], "cannot fork", desk.now_s)
        assert str(failure(desk.look())) == "cannot fork"
    else:
        desk.hello(0, desk.slots.generations[0])
        assert begun(desk.look()).round == 2


def test_a_spare_that_comes_a_moment_later_trains_in_the_round() -> None:
    desk = second_round("a0", "c0", "b1", durations_s=[100.0])
    desk.committed(1)
    assert desk.run.phase is RunPhase.FORM
    assert desk.run.is_hurried
    desk.facts.view = view_of("a0", "c0", "b1", "e1")
    assert begun(desk.look(0.5 * PATIENCE_S)).round == 2
    assert {pipeline.peers for pipeline in desk.run.pipelines} == {("a0", "b1"), ("c0", "e1")}


@pytest.mark.parametrize(("last_s", "waits_s"), [(0.4, 0.1), (100.0, PATIENCE_S)])
def test_who_does_not_come_back_is_waited_for_once_and_not_for_long(last_s: float, waits_s: float) -> None:
    desk = second_round("a0", "c0", "b1", durations_s=[last_s])
    desk.committed(1)
    assert desk.wakes() == pytest.approx(waits_s)
    assert begun(desk.look()).round == 2
    assert len(desk.run.pipelines) == 1
    desk.done()
    assert begun(desk.committed(2)).round == 3, "the next round waits for nobody"


def test_slots_count_without_holes() -> None:
    desk = second_round("c0", "d1", durations_s=[0.0])
    desk.committed(1)
    assert [(pipeline.slot, pipeline.peers) for pipeline in desk.run.pipelines] == [(0, ("c0", "d1"))]


def test_without_any_pipeline_it_is_waited_for_however_long() -> None:
    desk = second_round("a0", "c0", durations_s=[0.4])
    desk.committed(1)
    assert desk.look(1e6) == []
    assert desk.run.phase is RunPhase.FORM
    desk.facts.view = view_of("a0", "e1")
    assert begun(desk.look()).round == 2


def test_a_run_whose_only_trainer_cannot_be_started_ends() -> None:
    desk = Desk()
    desk.launches = False
    desk.trains()
    desk.slots.launched(0, 1, "no memory", desk.now_s)
    error = failure(desk.look())
    assert isinstance(error, ControlError)
    assert str(error) == "no memory"


def test_a_trainer_that_cannot_be_started_is_left_behind_if_there_is_another() -> None:
    desk = Desk()
    desk.launches = False
    desk.trains("a0", "c0", "b1", "d1")
    desk.slots.launched(1, 1, "", desk.now_s)
    desk.hello(1, 1)
    assert desk.look() == [], "the launcher has not answered for the other one"
    desk.slots.launched(0, 1, "no memory", desk.now_s)
    assert desk.look()[0] == GiveInner("D0")
    assert desk.slots.generations == {0: 2, 1: 1}, "it is started anew"


def test_a_trainer_that_hangs_since_an_earlier_start_of_the_client_is_replaced() -> None:
    desk = Desk()
    desk.slots.adopt({0: 3}, [0])
    desk.trains()
    assert desk.run.phase.name == "STAFF"
    assert desk.wakes() == desk.slots.start_timeout_s
    assert begun(desk.look()).round == 1
    assert desk.slots.generations == {0: 4}


def test_trainers_that_come_and_go_are_replaced_when_the_round_begins() -> None:
    desk = Desk()
    desk.launches = False
    desk.trains()
    desk.slots.launched(0, 1, "", desk.now_s)
    desk.hello(0, 1)
    desk.slots.lost(PeerId("T0.1"), desk.now_s)
    assert begun(desk.look()).round == 1
    assert desk.slots.generations == {0: 2}


def test_a_trainers_time_to_report_begins_when_it_runs() -> None:
    desk = Desk()
    desk.launches = False
    desk.trains()
    assert desk.look(500.0) == []
    desk.slots.launched(0, 1, "", desk.now_s)
    desk.look()
    assert desk.wakes() == desk.slots.start_timeout_s
    assert "did not report within 20 s" in str(failure(desk.look()))


def test_a_trainer_that_does_not_report_is_left_behind_if_there_is_another() -> None:
    desk = Desk()
    desk.launches = False
    desk.trains("a0", "c0", "b1", "d1")
    for slot in (0, 1):
        desk.slots.launched(slot, 1, "", desk.now_s)
    desk.hello(1, 1)
    desk.look()
    desk.wakes()
    assert desk.look()[:2] == [TrainersSilent((0,), 20.0), GiveInner("D0")]


def test_trainers_that_wait_for_a_data_server_are_waited_for_and_pipelines_formed_anew_when_it_is_back() -> None:
    desk = Desk()
    desk.launches = False
    desk.trains()
    desk.slots.launched(0, 1, "", desk.now_s)
    desk.facts.is_unfed = True
    assert desk.look() == []
    assert desk.look(500.0) == []
    desk.facts.view = view_of("c0", "b1")
    desk.facts.is_unfed = False
    assert desk.look() == []
    desk.hello(0, 1)
    assert begun(desk.look()).round == 1
    assert [pipeline.peers for pipeline in desk.run.pipelines] == [("c0", "b1")]
    assert desk.slots.generations == {0: 1}


# -- how long a round takes


@pytest.mark.parametrize(
    ("durations_s", "round", "expected_s"), [((), 1, 40.0), ((1.0, 1.0), 2, 40.0), ((1.0, 1.0, 1.0), 2, 1.5)]
)
def test_the_first_rounds_may_take_as_long_as_configured_and_others_what_is_usual(
    durations_s: Sequence[float], round: int, expected_s: float
) -> None:
    desk = Desk()
    desk.trains()
    if round == 2:
        desk.done()
        desk.facts.durations_s = durations_s
        desk.committed(1)
    assert desk.wakes() == pytest.approx(expected_s)
    assert desk.look() == [EndTraining(), CloseRound(round, expected_s)]


def test_the_last_round_may_take_as_long_as_configured() -> None:
    desk = Desk(replace(RULES, num_rounds=2))
    desk.trains()
    desk.done()
    desk.facts.durations_s = (1.0, 1.0, 1.0)
    desk.committed(1)
    assert desk.wakes() == 40.0


def test_a_round_that_has_to_be_repeatable_is_waited_for_as_long_as_it_takes() -> None:
    desk = Desk(replace(RULES, first_deadline_s=math.inf))
    desk.trains()
    desk.facts.durations_s = (1.0, 1.0, 1.0)
    assert desk.look(1e6) == []
    assert desk.run.wake_at_s == math.inf


def test_a_round_is_over_when_the_last_trainer_is_done() -> None:
    desk = Desk()
    desk.trains("a0", "c0", "b1", "d1")
    desk.slots.finish(0)
    assert desk.look() == []
    desk.slots.finish(1)
    assert desk.look() == [EndTraining(), CloseRound(1, 0.0)]


def test_the_time_of_a_round_that_had_to_wait_for_a_disk_counts_from_when_trainers_were_told_of_it() -> None:
    desk = Desk()
    desk.trains()
    desk.now_s += 1000.0
    desk.run.begun(desk.now_s)
    assert desk.look() == []
    assert desk.wakes() == pytest.approx(40.0)
    assert desk.look() == [EndTraining(), CloseRound(1, 1040.0)]


@pytest.mark.parametrize("ends_by", ["trainers", "deadline"])
def test_a_paused_round_is_over_only_when_it_is_resumed(ends_by: str) -> None:
    desk = Desk()
    desk.trains()
    desk.time.pause(desk.now_s)
    if ends_by == "trainers":
        assert desk.done() == []
    assert desk.look(1000.0) == []
    assert desk.run.wake_at_s == math.inf
    desk.time.resume(desk.now_s)
    if ends_by == "deadline":
        assert desk.look() == []
        assert desk.wakes() == pytest.approx(40.0)
    assert desk.look() == [EndTraining(), CloseRound(1, 40.0 if ends_by == "deadline" else 0.0)]


def test_a_round_goes_on_past_its_deadline_while_a_stage_has_nobody() -> None:
    desk = Desk()
    desk.trains()
    desk.facts.stuck = (1,)
    assert desk.look(50.0) == []
    desk.facts.stuck = ()
    assert desk.look() == []
    assert desk.wakes() == pytest.approx(40.0)
    assert desk.look() == [EndTraining(), CloseRound(1, 90.0)]


@pytest.mark.parametrize("what", ["is_unfed", "is_refused"])
def test_a_round_goes_on_past_its_deadline_while_no_samples_come_or_servers_refuse_every_step(what: str) -> None:
    desk = Desk()
    desk.trains()
    setattr(desk.facts, what, True)
    assert desk.look(50.0) == []
    setattr(desk.facts, what, False)
    assert desk.look() == []
    assert desk.wakes() == pytest.approx(40.0)
    assert desk.look() == [EndTraining(), CloseRound(1, 90.0)]


# -- its end


def test_a_round_is_not_closed_while_a_stage_is_handed_over() -> None:
    desk = Desk()
    desk.trains()
    desk.facts.is_handing_over = desk.facts.is_letting_go = True
    assert desk.done() == [EndTraining()]
    assert desk.look(1e3) == [], "however long"
    desk.facts.is_handing_over = False
    assert desk.look() == []
    assert desk.wakes() == GONE_S
    assert desk.look() == [CloseRound(1, 1005.0)]


@pytest.mark.parametrize("stuck", [(), (1,)])
def test_a_round_that_does_not_end_in_time_is_waited_for_and_said_unless_a_stage_has_nobody(
    stuck: tuple[int, ...],
) -> None:
    desk = Desk()
    desk.trains()
    desk.done()
    desk.facts.stuck = stuck
    for _ in range(2):
        desk.look()
        assert desk.wakes() == RULES.averaging_timeout_s
        assert desk.look() == ([] if stuck else [RoundSlow(1, 20.0)])
    desk.facts.stuck = ()
    assert isinstance(desk.committed(1)[0], WriteRecord)


def test_a_round_that_another_client_has_committed_ends_this_client() -> None:
    desk = Desk()
    desk.trains()
    desk.done()
    desk.stands(1, committed=False)
    assert isinstance(failure(desk.look()), RoundAborted)


def test_an_evaluation_that_lost_its_trainers_is_repeated_a_few_times_and_each_time_said() -> None:
    desk = Desk(replace(RULES, num_rounds=1))
    desk.trains()
    desk.done()
    desk.committed(1)
    for left in reversed(range(MAX_EVALUATIONS)):
        ended, said, *again = desk.done()
        assert (ended, said) == (EndTraining(), EvaluationIncomplete(1))
        assert any(isinstance(effect, BeginRound) for effect in again) is bool(left)
    assert desk.run.phase is RunPhase.OVER


def test_an_evaluation_that_is_left_is_taken_up() -> None:
    left = plan(4, StepRange(30, 30))
    desk = started_again(left, "D3", 3)
    desk.hello(0, 3, round=4)
    assert begun(desk.look()).left is left
    desk.facts.evaluated.add(3)
    assert desk.done() == [EndTraining()]
    assert desk.run.phase is RunPhase.OVER


@pytest.mark.parametrize("comes", [True, False])
def test_mirrors_are_waited_for_as_long_as_they_get_further(comes: bool) -> None:
    desk = Desk(replace(RULES, num_rounds=1))
    desk.trains()
    desk.done()
    desk.committed(1)
    desk.facts.evaluated.add(1)
    desk.facts.unmirrored = frozenset({(M, 0), (M, 1)})
    assert desk.done() == [EndTraining()]
    desk.look(0.9 * NO_FURTHER_S)
    desk.facts.unmirrored = frozenset({(M, 1)})
    assert desk.look() == []
    assert desk.wakes() == NO_FURTHER_S
    if comes:
        desk.facts.unmirrored = frozenset()
    assert desk.look() == ([] if comes else [MirrorsBehind(1, 1, NO_FURTHER_S)])
    assert desk.run.phase is RunPhase.OVER


def test_who_is_overtaken_after_all_is_trained_goes_on_to_the_end() -> None:
    desk = Desk(replace(RULES, num_rounds=1))
    desk.trains()
    desk.done()
    desk.committed(1)
    desk.facts.evaluated.add(1)
    desk.facts.unmirrored = frozenset({(M, 0)})
    desk.done()
    desk.run.overtaken()
    desk.facts.unmirrored = frozenset()
    assert desk.look() == []
    assert desk.run.phase is RunPhase.OVER
