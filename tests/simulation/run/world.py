"""A client's run from its first server to its last record, beside servers, trainers and mirrors that come, go and hang.

What is simulated is `swarm.run_client`, with `swarm.trainer_slots`, `swarm.round_boundary` and `swarm.client_turn`
inside. The client of another host may come before it, and be lost, or end the run. Coordinator,
data server, launcher and mirrors are models here: they do what they are told, late; records of others come from
nowhere. What these do when they ship is the matter of the worlds `round`, `split` and `swarm`, which have the same
machine in their clients.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from tests.simulation import liveness
from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken

from shoal.errors import ControlError, NoPipeline, RoundAborted
from shoal.events.run import EvaluationIncomplete, RunEnded
from shoal.events.stages import StagesMissing
from shoal.ids import Ballot, PeerId, StageIndex
from shoal.runtime.launcher_messages import StartTrainer
from shoal.swarm.client_turn import AskClient, ClientTurn, TakeTurn
from shoal.swarm.records import Tip
from shoal.swarm.round_boundary import RunTime, boundary_s
from shoal.swarm.round_effects import RoundReady
from shoal.swarm.routing import Pipeline
from shoal.swarm.run_client import MAX_EVALUATIONS, NO_FURTHER_S, SETTLE_S, RunClient
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
from shoal.swarm.takeover import Settled
from shoal.swarm.trainer_slots import GoOn, ReleaseLeases, SlotEffect, TrainerSlots
from shoal.swarm.view import ClientPeer, Replica, Run, SwarmView
from shoal.wire.messages.base import Hop, StepRange
from shoal.wire.messages.control import TrainerHello
from shoal.wire.messages.feed import Released
from shoal.wire.messages.round import SignedRecord

FAULTS_END_S = 60.0
"""The last fault begins before that."""
END_S = 600.0
DEADLINE_S = 20.0
SERVERS_S = 40.0
_LASTS_S = 1.5 * SERVERS_S
"""The longest fault: a server comes back when nobody waits for it any more."""
SLOW_S = 8.0
START_S = 3.0
ROUND_S = 3.0
ROUND_LIMIT_S = 2 * DEADLINE_S + NO_FURTHER_S
"""After the last fault the next thing happens within so long: a deadline, or mirrors that get no further."""
_LONG_S = 10.0
"""It is noticed before that a server is lost; from its pipelines on, a round takes less to begin."""
_OF_OTHERS, _INHERITED = 0, -1
"""Who has made a record, where the starts of the client count from 1."""
_ME, _BEFORE, _SCOUT = PeerId("C"), PeerId("B"), PeerId("scout")
_SIGNED = SignedRecord(b"", _ME, b"")


class World:
    """One seed: up to three stages and three pipelines, a few rounds; the client may be started again in the middle."""

    def __init__(self, seed: int, run_class: type[RunClient] = RunClient) -> None:
        self.network = Kernel(seed)
        self.run_class = run_class
        rng = self.network.rng
        self.num_stages, self.num_slots, self.num_rounds = rng.randint(1, 3), rng.randint(1, 3), rng.randint(2, 5)
        self.names = [f"R{stage}.{slot}" for slot in range(self.num_slots) for stage in range(self.num_stages)]
        self.is_patient = rng.random() < 0.5
        self.succeeds = rng.random() < 0.2
        self.resumes = not self.succeeds and rng.random() < 0.2
        expected = rng.choice((0, len(self.names), len(self.names) + (not self.is_patient)))
        self.rules = RunRules(
            num_stages=self.num_stages,
            num_rounds=self.num_rounds,
            total_steps=4 * self.num_rounds,
            steps_of=lambda round: StepRange(4 * (round - 1), 4 * round),
            expected_servers=expected,
            servers_timeout_s=SERVERS_S,
            averaging_timeout_s=SLOW_S,
            first_deadline_s=rng.choice((DEADLINE_S, math.inf)),
            succeeds=self.succeeds,
            patient=self.is_patient,
        )
        # The swarm, as it is.
        self.there: set[str] = set()
        self.came_s = 0.0
        self.gone_s: dict[str, float] = {}
        self.standing = Tip(2, "D2", _SIGNED) if self.succeeds or self.resumes else Tip(0, "D0", None)
        self.previous_of = {"D2": "D1"}
        # By the hash of a record, the start of the client that has committed it.
        self.made_by: dict[str, int] = {"D2": _OF_OTHERS} if self.succeeds else {}
        self.asked: dict[int, int] = {}  # of each slot, the trainer that was to be started last
        self.mirrored, self.mirrored_s = 0, 0.0
        self.has_evaluated: set[int] = set()
        # What is true of the run, whoever looks.
        self.begun: dict[int, str] = {}  # rounds that were begun, by the record on top of which
        self.written: list[str] = []
        self.ended = ""
        self.left: RoundPlan | None = None
        self.base = "D2" if self.resumes else ""
        self.start = 0
        self.time = RunTime()
        self.paused = False
        # Of its own, so that all else stays as it is.
        self.turn_rng = random.Random(f"turn {seed}")
        self.has_client = self.succeeds  # the one before it
        self.is_deposed = self.is_told_over = self.has_taken_turn = False
        if self.succeeds:
            self.network.at(self.turn_rng.uniform(0.5, 20.0), self.client_goes)
        if self.turn_rng.random() < 0.1:
            self.network.at(self.turn_rng.uniform(2.0, FAULTS_END_S), self.deposes)
        self.is_unfed = self.is_refused = False
        for fact in ("is_unfed", "is_refused"):
            if self.turn_rng.random() < 0.3:
                self.network.at(self.turn_rng.uniform(2.0, FAULTS_END_S), self.is_hindered, fact)
        # The disk of the client takes nothing for a while. Of its own as well.
        disk_rng = random.Random(f"disk {seed}")
        self.is_full = False
        if disk_rng.random() < 0.2:
            full_s = disk_rng.choice((0.5, START_S, 3 * DEADLINE_S))
            self.network.at(disk_rng.uniform(0.0, FAULTS_END_S), self.disk_is_full, full_s)
        for name in self.names:
            self.network.at(rng.uniform(0.0, 8.0), self.arrives, name)
        self.begin()
        for _ in range(rng.choice((0, 3, 8))):
            self.network.at(rng.uniform(2.0, FAULTS_END_S), self.fault)

    # -- the client's process

    def begin(self) -> None:
        """The client starts, knowing what an earlier start has left."""
        self.start += 1
        self.is_down = False
        self.started_s = self.network.now_s
        self.leads = False
        self.ready: RoundReady | None = None
        self.holders: Mapping[PeerId, int] | None = None
        self.committed_round = 0
        self.is_placing = self.is_handing_over = self.is_letting_go = False
        self.durations_s: list[float] = []
        self.slots = TrainerSlots(start_timeout_s=START_S)
        self.slots.adopt(self.asked, [slot for slot in self.asked if self.flips(0.7)])
        self.turn = ClientTurn(_ME, "run") if self.succeeds and self.left is None else None
        self.is_linked = False
        self.run_machine = self.run_class(
            self.rules, self.slots, self.time, turn=self.turn, left=self.left, base=self.base
        )
        self.num_stands = self.num_evaluations = 0
        self.said_gap = False
        self.led_s: float | None = None
        self.given = ""
        self.started_slots: set[int] = set()
        self.is_met = False
        self.beginning: BeginRound | None = None
        self.written_now: set[str] = set()
        self.has_trained = False
        self.training: BeginRound | None = None
        self.training_since_s = 0.0
        self.is_busy = False
        self.wake_s = math.inf
        self.evaluates = self.network.rng.random() < 0.8
        for slot in self.slots.booting:
            if self.network.now_s < FAULTS_END_S and self.flips(0.2):
                continue  # it hangs
            self.later(self.network.rng.choice((0.5, 2.0)), self.says_hello, slot, self.slots.generations[slot])
        self.look()

    def flips(self, chance: float) -> bool:
        return self.network.rng.random() < chance

    def later(self, delay_s: float, call: object, *arguments: object) -> None:
        """Do something of this start of the client, if it still lives then."""
        self.network.after(delay_s, self._if_alive, self.start, call, arguments)

    def _if_alive(self, start: int, call: object, arguments: tuple[object, ...]) -> None:
        if start == self.start and not self.ended:
            call(*arguments)  # type: ignore[operator]
            self.look()

    def look(self) -> None:
        """As `client.run_driver` does."""
        now_s = self.network.now_s
        while not self.ended and not self.is_busy and not self.is_down:
            effects = self.run_machine.look(self, now_s)
            if not effects:
                break
            for effect in effects:
                self.obey(effect)
        if self.is_down:
            return
        if self.run_machine.phase is RunPhase.OVER and not self.ended:
            self.over()
        if not self.ended and not self.is_busy and self.run_machine.wake_at_s < now_s:
            raise Broken("it is to be looked at again and again")
        wake_at_s = min(self.slots.wake_at_s, math.inf if self.is_busy else self.run_machine.wake_at_s)
        if not self.ended and wake_at_s < self.wake_s:
            self.wake_s = wake_at_s
            self.later(max(1e-3, self.wake_s - now_s), self._wake)

    def _wake(self) -> None:
        self.wake_s = math.inf
        if self.slots.wake_at_s <= self.network.now_s:
            self.do(self.slots.tick(self.network.now_s))

    # -- what it knows (`RunFacts`)

    @property
    def view(self) -> SwarmView:
        replicas = (Replica(Hop(PeerId(n), ()), 0.0, stage=StageIndex(int(n[1]))) for n in sorted(self.there))
        before = (ClientPeer(Hop(_BEFORE, ()), 0.0),) if self.has_client else ()
        announcer = _BEFORE if self.has_client else _ME if self.has_taken_turn else _SCOUT
        run = Run("run", self.num_stages, announcer, kept=announcer == _SCOUT)
        return SwarmView(tuple(replicas), clients=before, run=run)

    def usable(self, known: Mapping[PeerId, int]) -> SwarmView:
        return self.view

    @property
    def stuck(self) -> Sequence[int]:
        return self.view.missing_stages(self.num_stages)

    @property
    def unmirrored(self) -> frozenset[tuple[PeerId, int]]:
        return frozenset((PeerId("M"), stage) for stage in range(self.mirrored))

    def is_own(self, ready: RoundReady, base: str) -> bool:
        return self.made_by.get(ready.tip.hash, 0) > 0 and self.previous_of[ready.tip.hash] == base

    def is_evaluated(self, round: int) -> bool:
        return round in self.has_evaluated

    # -- what it does

    def obey(self, effect: RunEffect) -> None:
        rng = self.network.rng
        if (self.is_deposed or self.is_told_over) and not isinstance(effect, Failed | RunEnded):
            raise Broken(f"{effect}, though another client has the run, or has ended it")
        match effect:
            case AskClient(hop):
                self.later(0.1, self.answers, hop.peer)
            case TakeTurn():
                self.takes_turn()
            case RunEnded():
                self.ended = "another client has ended it"
            case Stand():
                self.num_stands += 1
                self.stands()
                self.later(rng.uniform(0.1, 2.0), self.agrees)
            case StagesMissing():
                self.said_gap = True
            case PlaceServers():
                self.places()
                self.is_placing = True
                self.later(rng.uniform(0.0, 1.0), self.is_placed)
            case StartTrainer(slot):
                self.started_slots.add(slot)
                self.launch(effect)
            case BeginRound():
                self.checks_begin(effect)
                self.beginning, self.is_busy = effect, True
                if effect.left is not None or not self.is_full:
                    self.begins(effect)
            case EndTraining():
                self.ends_training()
            case CloseRound(round):
                self.closes(round)
            case InheritRecord(ready):
                self.inherits(ready)
            case GiveInner(digest):
                if digest != self.standing.hash:
                    raise Broken(f"what is known of {digest} is given to replicas that hold {self.standing.hash}")
                self.given = digest
                self.takes_a_while()
            case WriteRecord():
                self.writes(effect)
            case EvaluationIncomplete():
                self.num_evaluations += 1
                if self.num_evaluations > MAX_EVALUATIONS:
                    raise Broken(f"the last record is evaluated {self.num_evaluations} times")
            case Failed(error):
                self.fails(error)
            case _:
                pass

    def takes_turn(self) -> None:
        if self.has_client:
            raise Broken("it takes the run from the client before it, which is there")
        self.has_taken_turn = True

    def answers(self, peer: PeerId) -> None:
        """Who was asked says which client it has, or cannot be reached."""
        if self.turn is None or self.run_machine.phase is not RunPhase.WAIT_TURN:
            return
        if peer != _BEFORE:
            self.turn.told(peer, _BEFORE if self.has_client else None)
        elif self.has_client:
            self.is_linked = True
            self.turn.up(peer)
        else:
            self.turn.lost(peer, self.network.now_s)

    def client_goes(self) -> None:
        """The client before this one is lost, or ends the run."""
        self.has_client = False
        if self.ended or self.is_down or self.turn is None:
            return
        if self.is_linked and self.turn_rng.random() < 0.2:
            self.is_told_over = True
            self.run_machine.ended("it is over", well=self.turn_rng.random() < 0.5)
        elif self.is_linked:
            self.turn.lost(_BEFORE, self.network.now_s)
        self.look()

    def deposes(self) -> None:
        """Another client coordinates, under a higher ballot."""
        if self.leads and not self.ended and not self.is_down:
            self.is_deposed, self.is_busy, self.beginning = True, False, None
            self.run_machine.deposed(Ballot(99, _BEFORE, 1))
            self.look()

    def stands(self) -> None:
        """Take the lead: once, and when the servers that were started are there, or have had their time."""
        if self.num_stands > 1:
            raise Broken("it takes the lead twice: a second ballot is that of a client that was replaced")
        self.leads = True
        now_s, has_waited = self.network.now_s, self.network.now_s - self.started_s >= SERVERS_S - 1e-6
        if self.said_gap or has_waited or self.left is not None:
            return
        expected = self.rules.expected_servers
        if expected and (self.stuck or len(self.there) < expected):
            raise Broken(f"it leads {len(self.there)} servers of {expected}")
        if not expected and now_s - self.came_s < SETTLE_S - 1e-6:
            raise Broken("it leads while servers are still coming")

    def places(self) -> None:
        if self.succeeds or self.left is not None:
            raise Broken("servers of a run that goes on are sent elsewhere before it trains")
        lacking = self.there - set(self.holders or {})
        if self.resumes and lacking and self.network.now_s - self.led_s < SERVERS_S - 1e-6:
            raise Broken(f"the run is resumed before {sorted(lacking)} have taken its record")

    def takes_a_while(self) -> None:
        self.is_busy = True
        self.later(self.network.rng.uniform(0.0, 0.3), self.is_done)

    def is_done(self) -> None:
        self.is_busy = False
        self.run_machine.carried_out()

    def launch(self, order: StartTrainer) -> None:
        rng = self.network.rng
        self.asked[order.slot] = order.generation
        can_fail = self.network.now_s < FAULTS_END_S
        error = "no memory" if can_fail and rng.random() < 0.1 else ""
        self.later(rng.uniform(0.0, 1.0), self.launched, order, error)

    def launched(self, order: StartTrainer, error: str) -> None:
        self.do(self.slots.launched(order.slot, order.generation, error, self.network.now_s))
        if error or (self.network.now_s < FAULTS_END_S and self.flips(0.1)):
            return  # it never says hello
        self.later(self.network.rng.uniform(0.0, 1.0), self.says_hello, order.slot, order.generation)

    def says_hello(self, slot: int, generation: int) -> None:
        trainer = Hop(PeerId(f"T{slot}.{generation}"), ())
        told = 0 if self.left is None else self.left.round
        self.do(self.slots.receive(trainer.peer, TrainerHello(slot, generation, trainer, told), self.network.now_s))
        self.later(self.network.rng.uniform(1.0, ROUND_S), self.trains, slot, generation)

    def trains(self, slot: int, generation: int) -> None:
        """A trainer is through with what it has been told, and looks again."""
        present = self.slots.present.get(slot)
        if present is None or present.peer != f"T{slot}.{generation}":
            return
        training = self.training
        if math.isfinite(self.rules.first_deadline_s) and self.network.now_s < FAULTS_END_S and self.flips(0.03):
            return  # it hangs
        if training is not None and not self.paused and not self.stuck and not self.is_unfed and not self.is_refused:
            if training.round > self.num_rounds and self.evaluates:
                self.has_evaluated.add(self.num_rounds)
            self.slots.finish(slot)
        self.evaluates = self.evaluates or self.network.now_s > FAULTS_END_S
        self.later(self.network.rng.uniform(1.0, ROUND_S), self.trains, slot, generation)

    def do(self, effects: Sequence[SlotEffect]) -> None:
        for effect in effects:
            match effect:
                case StartTrainer():
                    if self.training is None:
                        raise Broken("a trainer is replaced between two rounds")
                    self.launch(effect)
                case ReleaseLeases(slot, generation, settled):
                    self.later(0.1, self.released, slot, generation, settled)
                case GoOn():
                    pass
                case _:
                    pass

    def released(self, slot: int, generation: int, settled: Settled) -> None:
        first = 0 if self.training is None else self.training.steps.first
        answer = Released(slot, generation, first, True)
        self.do(self.slots.released(answer, -1, self.network.now_s))

    # -- rounds

    def checks_begin(self, order: BeginRound) -> None:
        """A round is to begin, or to be taken up: on top of what stands, once, over complete pipelines."""
        pipelines: tuple[Pipeline, ...] = self.run_machine.pipelines
        if self.training is not None:
            raise Broken(f"round {order.round} begins in round {self.training.round}")
        if not pipelines or [p.slot for p in pipelines] != list(range(len(pipelines))):
            raise Broken(f"round {order.round} begins with pipelines {pipelines}")
        if order.base != self.standing.hash or order.round != self.standing.round + 1:
            raise Broken(f"round {order.round} begins on {order.base}, record {self.standing.round} stands")
        is_last = order.round > self.num_rounds
        if not is_last and order.steps != self.rules.steps_of(order.round):
            raise Broken(f"round {order.round} has the steps {order.steps}")
        if self.is_placing:
            raise Broken(f"round {order.round} begins while servers are on their way")
        coming = [slot for slot in self.slots.booting if slot < len(pipelines)]
        if coming:
            raise Broken(f"round {order.round} begins without the trainers of {coming}, which are coming")
        used = {peer for pipeline in pipelines for peer in pipeline.peers}
        gone = [name for name in used & self.gone_s.keys() if self.network.now_s - self.gone_s[name] > _LONG_S]
        if gone and order.left is None:
            raise Broken(f"round {order.round} begins over {gone}, which are lost")
        if order.left is None:
            if self.given != order.base:
                raise Broken(f"round {order.round} begins before replicas have what was kept of record {order.base}")
            if not is_last and self.made_by.get(order.base) == _INHERITED:
                raise Broken(f"round {order.round} begins with steps of others that nobody has counted")
            if not is_last and self.begun.get(order.round) == order.base:
                raise Broken(f"round {order.round} begins again: its steps are trained twice")
            if self.standing.hash in self.made_by and self.standing.hash not in self.written:
                raise Broken(f"round {order.round} begins before record {self.standing.round} is written")
            if not is_last and self.made_by.get(self.standing.hash) == _OF_OTHERS:
                raise Broken(f"round {order.round} begins with steps of others that nobody has counted")
            missing = [slot for slot in range(len(pipelines)) if slot not in self.slots.present]
            if len(missing) == len(pipelines) and not any(self.slots.generations.get(slot) for slot in missing):
                raise Broken(f"round {order.round} begins before any trainer was started")
        elif order.left is not self.left or pipelines != self.left.pipelines:
            raise Broken(f"round {order.round} is taken up in another way than it was left")

    def begins(self, order: BeginRound) -> None:
        """Its file is written, and trainers hear of it."""
        self.beginning, self.is_busy = None, False
        pipelines: tuple[Pipeline, ...] = self.run_machine.pipelines
        self.begun[order.round] = order.base
        self.has_trained = True
        generations = dict(self.slots.generations)
        self.left = RoundPlan(order.round, order.steps, pipelines, generations, order.begun_s)
        self.base = order.base
        self.training, self.training_since_s = order, self.time.at_s(self.network.now_s)
        self.slots.nothing_done()
        named = None if order.left is not None else ()
        slots = frozenset(pipeline.slot for pipeline in pipelines)
        self.slots.replicas((), self.network.now_s)
        self.do(self.slots.begin_round(order.round, slots, order.steps, named, (), self.network.now_s))
        self.run_machine.begun(self.network.now_s)

    def ends_training(self) -> None:
        """All are done, or have had their time, and nobody has paused the run; a round of a chain that is left ends."""
        training, self.training = self.training, None
        self.slots.end_round()
        if self.is_met:
            return  # a round may have been about to begin
        if training is None:
            raise Broken("training ends that has not begun")
        if self.paused:
            raise Broken(f"round {training.round} ends in a pause")
        missing = [pipeline.slot for pipeline in self.run_machine.pipelines if not self.slots.is_done(pipeline.slot)]
        took_s = self.time.at_s(self.network.now_s) - self.training_since_s
        durations_s = [] if training.round >= self.num_rounds else self.durations_s
        if missing and took_s < boundary_s(durations_s, self.rules.first_deadline_s) - 1e-6:
            raise Broken(f"round {training.round} ends after {took_s:.1f} s, before slots {missing} are done")
        if missing and self.stuck:
            raise Broken(f"round {training.round} ends while stages {self.stuck} have nobody")
        if missing and self.is_unfed:
            raise Broken(f"round {training.round} ends while nobody hands out samples")
        if missing and self.is_refused:
            raise Broken(f"round {training.round} ends while servers refuse every step")

    def closes(self, round: int) -> None:
        if self.training is not None:
            raise Broken(f"round {round} is closed while it is trained")
        if round != self.standing.round + 1 or self.ready is None:
            raise Broken(f"round {round} is closed, record {self.standing.round} stands")
        if round > self.num_rounds:
            raise Broken(f"round {round} is closed, there are {self.num_rounds}")
        if self.is_handing_over:
            raise Broken("a record is made while the state of the one before is fetched")
        delay_s = self.network.rng.choice((0.5, 0.5, 2 * SLOW_S))
        self.later(delay_s, self.commits, round, self.standing.hash)

    def commits(self, round: int, base: str) -> None:
        if self.standing.hash != base or self.ready is None:
            return  # others were met
        if self.stuck:
            self.later(1.0, self.commits, round, base)
            return
        name = f"D{round}/{self.start}"
        self.previous_of[name], self.made_by[name] = base, self.start
        self.standing = Tip(round, name, _SIGNED)
        self.committed_round = round
        if round == self.num_rounds:
            self.mirrored = self.num_stages if self.flips(0.5) else 0
            self.mirrored_s = self.network.now_s
            self.later(1.0, self.mirrors)
        self.ready = None
        self.later(0.2, self.agrees)

    def mirrors(self) -> None:
        """A mirror takes one stage after the other; now and then it stands still."""
        self.mirrored, self.mirrored_s = max(0, self.mirrored - 1), self.network.now_s
        if self.mirrored and not self.flips(0.1):
            self.later(self.network.rng.choice((1.0, 0.8 * NO_FURTHER_S)), self.mirrors)

    def agrees(self) -> None:
        """All replicas hold what stands."""
        if self.stuck or not self.leads:
            self.later(0.5, self.agrees)
            return
        self.holders = {PeerId(name): int(name[1]) for name in sorted(self.there)}
        self.led_s = self.network.now_s if self.led_s is None else self.led_s
        self.ready = RoundReady(self.standing, self.holders, {})

    def is_placed(self) -> None:
        self.is_placing = False

    def inherits(self, ready: RoundReady) -> None:
        self.is_met = False
        if self.made_by.get(ready.tip.hash) == self.start:
            raise Broken(f"it inherits {ready.tip.hash}, which it has made itself")
        self.written.append(ready.tip.hash)
        self.made_by[ready.tip.hash] = _INHERITED
        self.takes_a_while()

    def writes(self, order: WriteRecord) -> None:
        tip = order.ready.tip
        if tip.hash in self.written_now:
            raise Broken(f"record {tip.round} is written again")
        if order.closed_s is not None and order.begun_s is not None and order.closed_s < order.begun_s - 1e-6:
            raise Broken(f"round {tip.round} was closed before it was begun")
        self.written.append(tip.hash)
        self.written_now.add(tip.hash)
        if order.begun_s is not None:
            # Bounded, so that a round which somebody hangs in does not give the next ones longer than a schedule has.
            self.durations_s.append(min(2 * ROUND_S, self.time.at_s(self.network.now_s) - order.begun_s))
        self.takes_a_while()

    # -- ends

    def fails(self, error: Exception) -> None:
        self.ended = str(error)
        if self.is_told_over or (self.is_deposed and isinstance(error, RoundAborted)):
            return
        if isinstance(error, NoPipeline):
            if self.is_patient:
                raise Broken("a client that waits however long gives up")
            if self.has_trained:
                raise Broken("a run that has begun ends for want of servers")
            since_s = min(self.started_s, self.lacked_s or math.inf)
            if self.network.now_s - since_s < SERVERS_S - 1e-6:
                raise Broken("it gives up before its servers had their time")
        elif isinstance(error, ControlError):
            missing = {pipeline.slot for pipeline in self.run_machine.pipelines} - self.slots.present.keys()
            if self.slots.present or not missing <= self.started_slots:
                raise Broken(f"the run ends for want of trainers: {error}")
        else:
            raise Broken(f"it ends: {error}")

    def over(self) -> None:
        self.ended = "all is done"
        if self.standing.round != self.num_rounds:
            raise Broken(f"it ends after record {self.standing.round} of {self.num_rounds}")
        if self.num_rounds not in self.has_evaluated and self.num_evaluations < MAX_EVALUATIONS:
            raise Broken(f"the last record is given up after {self.num_evaluations} evaluations")
        if self.training is not None:
            raise Broken("it ends while its trainers train")
        if self.mirrored and self.network.now_s - self.mirrored_s < NO_FURTHER_S - 1e-6:
            raise Broken(f"it ends while mirrors take {self.mirrored} stages")

    # -- faults

    lacked_s: float | None = None
    """Since when some stage has had nobody."""

    def arrives(self, name: str) -> None:
        self.there.add(name)
        self.gone_s.pop(name, None)
        self.came_s = self.network.now_s
        self._note_lack()
        if not self.ended:
            self.look()

    def _note_lack(self) -> None:
        if not self.stuck:
            self.lacked_s = None
        elif self.lacked_s is None:
            self.lacked_s = self.network.now_s

    def fault(self) -> None:
        if self.ended or self.is_down:
            return
        rng = self.network.rng
        what = rng.choice(("server", "server", "trainer", "trainer", "client", "others", "pause", "leave"))
        match what:
            case "server" if self.there:
                name = rng.choice(sorted(self.there))
                self.there.discard(name)
                self.gone_s[name] = self.network.now_s
                self._note_lack()
                self.network.after(rng.choice((0.5, 3.0, _LASTS_S)), self.arrives, name)
            case "trainer" if self.slots.present:
                slot = rng.choice(sorted(self.slots.present))
                self.do(self.slots.lost(self.slots.present[slot].peer, self.network.now_s))
            case "client":
                self.start += 1
                self.is_down = True
                if self.standing.round < self.num_rounds and self.begun and self.flips(0.3):
                    self.network.after(0.1, self.goes_on_elsewhere, self.start)
                self.network.after(rng.uniform(0.2, 2.0), self.restarts)
                return
            case "others" if self.ready is not None and self.begun:
                self.others()
            case "pause" if not self.paused:
                self.paused = True
                self.time.pause(self.network.now_s)
                self.network.after(rng.uniform(1.0, 2 * DEADLINE_S), self.resumes_run)
            case "leave" if self.leads:
                self.is_handing_over = True
                self.later(rng.uniform(0.5, 6.0), self.handed_over)
            case _:
                pass
        self.look()

    def is_hindered(self, fact: str) -> None:
        """For a while it is so that nobody can train: the data server is lost, or servers refuse all steps."""
        setattr(self, fact, True)
        self.network.after(self.turn_rng.choice((0.5, START_S, 2 * DEADLINE_S)), self.is_relieved, fact)
        self.look_again()

    def disk_is_full(self, lasts_s: float) -> None:
        """Files of rounds that are begun wait meanwhile, as in `client.needed_files`."""
        self.is_full = True
        self.network.after(lasts_s, self.disk_has_room)

    def disk_has_room(self) -> None:
        self.is_full = False
        if self.beginning is not None and not self.ended and not self.is_down:
            self.begins(self.beginning)
        self.look_again()

    def is_relieved(self, fact: str) -> None:
        setattr(self, fact, False)
        self.look_again()

    def look_again(self) -> None:
        if not self.ended and not self.is_down:
            self.look()

    def restarts(self) -> None:
        if not self.ended:
            self.begin()

    def handed_over(self) -> None:
        """What it had is kept; it ends soon, or hangs."""
        self.is_handing_over, self.is_letting_go = False, self.flips(0.5)
        self.later(self.network.rng.choice((1.0, 8.0, END_S)), self.let_go)

    def let_go(self) -> None:
        self.is_letting_go = False

    def resumes_run(self) -> None:
        self.paused = False
        self.time.resume(self.network.now_s)
        if not self.ended:
            self.look()

    def goes_on_elsewhere(self, start: int) -> None:
        """While this client is away, another one makes a record of the round that it was in, and may train on."""
        if start == self.start:
            self.makes_record(self.standing.hash)

    def makes_record(self, previous: str) -> None:
        round = self.standing.round + 1
        name = f"O{round}/{self.network.num_events}"
        self.previous_of[name], self.made_by[name] = previous, _OF_OTHERS
        self.standing, self.ready, self.holders = Tip(round, name, _SIGNED), None, None

    def others(self) -> None:
        """Another side of the swarm is met, whose record stands from now on."""
        if self.standing.round >= self.num_rounds:
            return
        self.makes_record("of others")
        self.is_busy, self.is_met, self.beginning = False, True, None
        self.run_machine.overtaken()
        self.later(self.network.rng.uniform(0.1, 1.0), self.agrees)

    def run(self) -> None:
        """Run to the end.

        Raises:
            Broken: One of the promises above, or it does not get there.
        """
        self._note_lack()
        self.network.run(FAULTS_END_S + _LASTS_S, lambda: bool(self.ended))
        if not self.ended:
            liveness.keeps_going(
                self.network,
                END_S,
                ROUND_LIMIT_S,
                lambda: len(self.written) + self.num_evaluations,
                lambda: bool(self.ended),
            )
        if not self.ended:
            raise Broken(f"it is in {self.run_machine.phase} after {END_S} s")
