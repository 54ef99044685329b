"""Servers that train and average, clients that fence, and the leases of their trainers: the machines put together."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.round.hosts import ClientHost
from tests.simulation.round.hosts import ReplicaHost as RoundHost
from tests.simulation.round.world import FAULTS_END_S
from tests.simulation.safety import Broken
from tests.simulation.step.hosts import STEPS_PER_ROUND, Envelope, Hello, Join, TrainerHost, Work
from tests.simulation.step.hosts import ReplicaHost as StepHost

from shoal.errors import ControlError
from shoal.events.trainers import TrainerGivenUp, TrainerNotReplaced
from shoal.ids import PeerId, StepKey
from shoal.runtime.launcher_messages import StartTrainer
from shoal.swarm.lease import Grant, Release
from shoal.swarm.round_effects import (
    CloseSteps,
    CoordinatorEffect,
    Deposed,
    Journal,
    MemberEffect,
    Overtaken,
    ResolveStep,
    RoundReady,
    Swap,
)
from shoal.swarm.round_orders import StepsClosed
from shoal.swarm.run_client import RunClient
from shoal.swarm.run_effects import BeginRound, EndTraining, Failed, RunEffect
from shoal.swarm.step_operations import Decision, SendStepMessage
from shoal.swarm.step_trainer import Finished
from shoal.swarm.takeover import Settled
from shoal.swarm.trainer_slots import MAX_PER_ROUND, GoOn, ReleaseLeases, SlotEffect, TrainerSlots
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.base import Hop, StepRange
from shoal.wire.messages.control import TrainerHello
from shoal.wire.messages.feed import Released
from shoal.wire.messages.round import Resolve, StageHashes
from shoal.wire.messages.step import Fenced, StepEntry

if TYPE_CHECKING:
    from tests.simulation.swarm.world import World

START_TIMEOUT_S = 0.6
"""Within this a trainer that was started says hello, or is not waited for."""
LAUNCH_S = 0.5
CALM_S = 1.8
"""So long after a fault each slot has a trainer again, or is done: doubt is settled within a second, and a hello waited
for as long as above."""
_LOOK_S = 0.05
_LOOK_AFTER_S = 0.3
_DIAL_S = 0.2


def steps_of(round: int) -> StepRange:
    """The numbers that production gives the steps of a round."""
    return StepRange((round - 1) * STEPS_PER_ROUND, round * STEPS_PER_ROUND)


class Steps(StepHost):
    """The steps of a server; when a round ends is the other half's to say."""

    world: World

    def __init__(self, server: Server) -> None:
        self.server = server
        # By fragment, the steps that are in its parameters and in no average of this fragment yet.
        self.since: list[list[StepKey]] = [[] for _ in range(server.world.num_fragments)]
        self.taken: int | None = None  # of those of this round's fragment, how many it had at its cut
        super().__init__(server.world, server.peer)

    def attach(self) -> None:
        """The process is the server's."""

    def answer_fence(self, to: PeerId, message: Fenced) -> None:
        self.world.network.send(self.peer, to, Envelope(message))

    def _apply(self, key: StepKey, work: Work) -> None:
        step = self.machine.open[key]
        path = [hop.peer for hop in step.request.path]
        super()._apply(key, work)
        for keys in self.since if step.decision is not None and not step.decision.skipped else ():
            keys.append(key)
        if len(self.applied) == self.world.cut_in(self.machine.round):
            self.taken = len(self.fragment)
        self.world.applied(key, path)

    @property
    def fragment(self) -> list[StepKey]:
        """`since` of what this round averages."""
        return self.since[self.machine.round % self.world.num_fragments]

    @property
    def averaged(self) -> int:
        """Of how many steps its pseudo-gradient is, if the round is closed now."""
        return len(self.fragment) if self.taken is None else self.taken

    def close(self) -> None:
        self._do(self.machine.close())
        self._try_join()

    def resolve(self, fate: Resolve) -> None:
        decision = Decision(fate.scale, fate.lr, fate.skipped) if fate.commit else None
        self._do(self.machine.resolve(fate.key, decision))
        self.joined = None
        self._try_join()
        self._kick()

    def _try_join(self) -> None:
        if self.machine.closed:
            self.machine.join()
            self.joined = Join(self.machine.round, self.generation, tuple(self.machine.log), self.machine.in_doubt)
            self.server.steps_closed()

    def begin(self, round: int) -> None:
        """The server holds the record before this round; it may have kept what the record has not averaged."""
        if self.server.keeps_rest:
            del self.fragment[: self.averaged]
        else:
            self.since = [[] for _ in self.since]
        self.taken = None
        self.generation, self.applied, self.buffers, self.joined = self.world.new_generation(self.peer), [], [], None
        self.early.clear()
        self._do(self.machine.start_round(round, keeps_rest=self.server.keeps_rest))
        self.server.keeps_rest = False
        self._kick()


class Server(RoundHost):
    """One replica: its steps and its part in the rounds."""

    world: World
    steps_class = Steps

    def __init__(self, world: World, peer: PeerId, stage: int, is_behind: bool = False) -> None:
        self.steps: Steps | None = None
        self.keeps_rest = False
        super().__init__(world, peer, stage, is_behind)
        self.steps = self.steps_class(self)
        if not is_behind:
            self.steps.begin(1)

    @property
    def log(self) -> list[StepEntry]:  # type: ignore[override]
        return [] if self.steps is None else self.steps.machine.log

    @log.setter
    def log(self, entries: list[StepEntry]) -> None:
        """It is the step machine's."""

    def deliver(self, sender: str, message: object) -> None:
        if type(message) is Envelope and self.steps is not None:
            self.steps.deliver(sender, message)
        else:
            super().deliver(sender, message)

    def lost(self, peer: str) -> None:
        if self.steps is not None:
            self.steps.lost(peer)
        super().lost(peer)

    def _act(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            if isinstance(effect, CloseSteps) and self.steps is not None:
                self.steps.close()
            elif isinstance(effect, ResolveStep) and self.steps is not None:
                self.steps.resolve(effect.fate)
            else:
                self.keeps_rest = effect.keeps_rest if isinstance(effect, Swap) else self.keeps_rest
                super()._act([effect])

    def steps_closed(self) -> None:
        if self.steps is not None:
            machine, averaged = self.steps.machine, self.steps.averaged
            log = tuple(machine.log)
            brought = machine.cuts.brought(machine.round, log, machine.earlier)
            if brought.num_steps != averaged:
                raise Broken(f"{self.peer} joins as with {brought}, and has {averaged} of {self.steps.fragment}")
            num_samples = sum(entry.num_samples for entry in log)
            closed = StepsClosed(num_samples, machine.in_doubt, log, earlier=machine.earlier)
            self._act(self.machine.steps_closed(closed))

    def _swap(self, record: object, hashes: StageHashes) -> list[MemberEffect]:
        swapping = self.machine.swapping
        effects = super()._swap(record, hashes)
        if swapping is not None and self.machine.tip.signed == swapping and self.steps is not None:
            self.steps.begin(self.machine.round)
        return effects


class Orders(NamedTuple):
    """Client to trainer: do these steps of a round."""

    round: int
    steps: StepRange


class Done(NamedTuple):
    """Trainer to client: no more steps of the round come from it."""

    slot: int
    round: int


class Launcher:
    """Starts trainers on the one host that has them, for the client that trains there, and ends those before them.

    Attributes:
        client: Whom trainers dial, and who may have them started: the last one that has begun, or taken up, a round.
        generations: Of each slot's newest trainer; 0: there has been none.
        asked: Of each slot's trainer that was to be started last, also if that could not be.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.client: Client | None = None
        self.generations = dict.fromkeys(range(world.num_trainers), 0)
        self.asked = dict(self.generations)
        self.rng = random.Random(f"launcher of {world.seed}")
        self.fail_rate = self.rng.choice((0.0, 0.0, 0.1)) if world.has_faults else 0.0
        self.stuck_rate = self.rng.choice((0.0, 0.0, 0.2)) if world.has_faults else 0.0
        self._under_way: dict[int, RunClient | None] = {}  # by slot, the run whose client, as one process, has asked

    def start(self, client: Client, order: StartTrainer) -> None:
        if self.client is not client:
            return
        if order.slot in self._under_way and self._under_way[order.slot] is client.run:
            raise Broken(f"trainer {order.slot} is to be started while one is being started")
        self._under_way[order.slot], self.asked[order.slot] = client.run, order.generation
        self.world.network.after(self.rng.uniform(0.0, LAUNCH_S), self._started, client, client.run, order)

    def _started(self, client: Client, run: RunClient | None, order: StartTrainer) -> None:
        network, slot = self.world.network, order.slot
        if slot in self._under_way and self._under_way[slot] is run:
            del self._under_way[slot]
        if self.client is not client or order.generation <= self.generations[slot]:
            return
        before = f"T{slot}.{self.generations[slot]}"
        if before in network.hosts:
            network.crash(before)
        can_fail = network.now_s < FAULTS_END_S - 1.0
        error = "no memory" if can_fail and self.rng.random() < self.fail_rate else ""
        if not error:
            self.generations[slot] = order.generation
            greets_in_s = 0.0
            if can_fail and self.rng.random() < self.stuck_rate:
                # It has begun, and gets no further, or late.
                greets_in_s = self.rng.choice((self.rng.uniform(0.3, 3.0), inf))
                network.faults.append((network.now_s, network.now_s))
            Trainer(self.world, slot, order.generation, greets_in_s)
        if network.hosts.get(client.peer) is client:
            network.on_host(client.peer, 0.01, client.launched, order, error)

    @property
    def running(self) -> list[int]:
        """Slots whose trainer has not ended."""
        hosts = self.world.network.hosts
        return [slot for slot, generation in self.asked.items() if f"T{slot}.{generation}" in hosts]


class Client(ClientHost):
    """A client that has trainers of its own, and drives what decides about them as `client.trainers` does."""

    world: World
    start_timeout_s = START_TIMEOUT_S

    def __init__(self, world: World, peer: PeerId) -> None:
        super().__init__(world, peer)
        self._training: tuple[int, float] | None = None  # which round, and since when
        self._starts: Counter[int] = Counter()  # of trainers, by slot, in this round
        # By slot, where the last trainer that this client has told has begun; of a round that another process has begun
        # nothing can be proven, so that a step in progress may be left to the record.
        self._firsts: dict[int, int] = {}
        self._armed_s = inf
        self._release_s = self.world.deaths_rng.choice((0.01, 0.2))  # that a data server takes, which has much to do

    def new_slots(self) -> TrainerSlots:
        return self.world.slots_class(start_timeout_s=self.start_timeout_s)

    @property
    def has_trainers(self) -> bool:
        return self.world.launcher.client is self

    def lowest(self) -> Mapping[int, int]:
        return self.slots.lowest if self.has_trainers else {}

    # -- events

    def deliver(self, sender: str, message: object) -> None:
        if isinstance(message, TrainerHello):
            self.world.greeted(PeerId(sender))
            self._do(self.slots.receive(PeerId(sender), message, self.now_s))
        elif type(message) is Done:
            is_of_this_round = self._training is not None and message.round == self._training[0]
            if is_of_this_round and self.slots.slot_of(PeerId(sender)) == message.slot:
                self.slots.finish(message.slot)
                # It may have died after it was through.
                self.world.losses.followed(f"the trainer of slot {message.slot}")
                self.look()
        elif type(message) is Envelope:
            if isinstance(message.message, Fenced):
                self._do(self.slots.receive(PeerId(sender), message.message, self.now_s))
        else:
            super().deliver(sender, message)

    def lost(self, peer: str) -> None:
        self._do(self.slots.lost(PeerId(peer), self.now_s))
        super().lost(peer)
        self._see_replicas()

    def see(self, hops: dict[PeerId, Hop]) -> None:
        super().see(hops)
        self._see_replicas()

    def close(self) -> None:
        """Trainers say themselves that they are done."""

    def launched(self, order: StartTrainer, error: str) -> None:
        if self.has_trainers:
            self._do(self.slots.launched(order.slot, order.generation, error, self.now_s))

    def _see_replicas(self) -> None:
        """Those are in its view that it is connected with, as in `Membership`."""
        network = self.world.network
        live = [replica for replica in self.world.replicas if network.is_linked(self.peer, replica)]
        self._do(self.slots.replicas(live, self.now_s))

    # -- rounds

    def _act(self, effects: list[CoordinatorEffect]) -> None:
        for effect in effects:
            if isinstance(effect, Journal):
                self.world.journaled[effect.digest] = effect
            if isinstance(effect, Overtaken | Deposed):
                self.end_training()
            if isinstance(effect, RoundReady) and not self.has_trainers:
                # Another one has had the trainers meanwhile: it goes on as the next process of their host.
                self.end_training()
                self.run = None
        super()._act(effects)

    def new_run(self) -> RunClient:
        """It takes over the trainers that run, which another one has started."""
        launcher = self.world.launcher
        if launcher.client is not None and not self.has_trainers:
            launcher.client.end_training()
        launcher.client = self
        self.slots.adopt({slot: number for slot, number in launcher.asked.items() if number}, launcher.running)
        return super().new_run()

    def usable(self, known: Mapping[PeerId, int]) -> SwarmView:
        """There are as many pipelines as trainers, whoever is lost, since each of them may use all replicas; but none
        where a stage has nobody."""
        stages = {replica.stage for replica in super().usable(known).replicas}
        names = [(stage, f"home {slot}") for stage in sorted(stages) for slot in range(self.world.num_trainers)]
        return SwarmView(tuple(Replica(Hop(PeerId(name), ()), 0.0, stage=stage) for stage, name in names))

    def _carry_out(self, effect: RunEffect) -> None:
        match effect:
            case StartTrainer():
                self.world.launcher.start(self, effect)
            case Failed(ControlError()):
                # No trainer could be started; its user starts it again.
                self.world.crash_client(self.peer, loses_power=False)
            case EndTraining():
                if self._training is not None:
                    self._check_trainers(*self._training)
                self.end_training()
            case _:
                super()._carry_out(effect)

    def begin_round(self, order: BeginRound) -> None:
        """Tell trainers of a round; who was there when another process has begun it is not known."""
        is_first, round, steps = order.left is None, order.round, order.steps
        super().begin_round(order)
        every_slot = range(self.world.num_trainers)
        self.world.leases.table.plan_round(round, self.world.num_trainers, steps)
        self._training, self._starts = (round, self.now_s), Counter()
        self._firsts = dict.fromkeys(every_slot, steps.first if is_first else steps.stop)
        holders = frozenset(self.machine.holders or ())
        if is_first:
            for hop in self.slots.present.values():
                self.world.tells(self, hop.peer)
                if not self.is_here:
                    return  # crashed between two
                self.world.network.send(self.peer, hop.peer, Orders(round, steps))
        self._see_replicas()
        named, steady = (holders, holders) if is_first else (None, ())
        self._do(self.slots.begin_round(round, frozenset(every_slot), steps, named, steady, self.now_s))
        self._look_after(*self._training)

    def _look_after(self, round: int, since_s: float) -> None:
        if self._training == (round, since_s):
            self._check_trainers(round, since_s)
            self.world.network.on_host(self.peer, _LOOK_AFTER_S, self._look_after, round, since_s)

    def take_trainers(self) -> None:
        """If it leads, and the client that had the trainers is gone, it goes on as the next process of their host."""
        launcher = self.world.launcher
        is_free = launcher.client is None or not launcher.client.is_here or not launcher.client.leads
        if self.ready is not None and not self.has_trainers and is_free:
            self.end_training()
            self.run = self.new_run()
            self.look()

    def trains(self, peer: str) -> bool:
        """Whether a round is trained in which this is a slot's trainer that is not done."""
        slot = self.slots.slot_of(PeerId(peer))
        return self._training is not None and slot is not None and not self.slots.is_done(slot)

    def end_training(self) -> None:
        """Whoever is lost from now on is replaced in the next round: the record says what it has trained."""
        self._training = None
        self.slots.end_round()
        for slot in range(self.world.num_trainers):
            self.world.losses.followed(f"the trainer of slot {slot}")

    def _check_trainers(self, round: int, since_s: float) -> None:
        """Where nothing has gone wrong for a while every slot has a trainer that was told of the round, or is done."""
        network = self.world.network
        if self.now_s - since_s < CALM_S or network.num_faults(self.now_s - CALM_S) or not self.has_trainers:
            return
        if network.manners.slow_rate or self.world.loses_frames:
            return  # what is lost may be noticed late
        if not all(self._reaches_one_of(hops) for hops in self.world.hops):
            return  # what a trainer has committed is known when servers of all stages have said so
        for slot, generation in self.world.launcher.generations.items():
            trainer = network.hosts.get(f"T{slot}.{generation}")
            if not self.slots.is_done(slot) and not (isinstance(trainer, Trainer) and trainer.told >= round):
                raise Broken(f"slot {slot} is without a trainer in round {round}, {CALM_S} s after the last fault")

    def _reaches_one_of(self, hops: Iterable[Hop]) -> bool:
        """Whether a server of a stage was there and could be reached for a while."""
        since_s, now_s = self.now_s - CALM_S, self.now_s
        return any(self.world.network.reachable(self.peer, hop.peer, since_s, now_s) for hop in hops)

    # -- what the machine of its trainers wants

    def _do(self, effects: Sequence[SlotEffect]) -> None:
        network, launcher = self.world.network, self.world.launcher
        for effect in effects if self.has_trainers else ():
            match effect:
                case StartTrainer() | ReleaseLeases() if self._training is None:
                    raise Broken(f"{effect} between two rounds: the record says what was trained")
                case StartTrainer(slot, _):
                    self._starts[slot] += 1
                    if self._starts[slot] > MAX_PER_ROUND:
                        raise Broken(f"the trainer of slot {slot} is started {self._starts[slot]} times in a round")
                    launcher.start(self, effect)
                case SendStepMessage(to, message):
                    network.send(self.peer, to, Envelope(message))
                case ReleaseLeases():
                    delay_s = self.world.deaths_rng.uniform(0.0, self._release_s)
                    network.on_host(self.peer, delay_s, self._release, effect)
                case GoOn(slot, steps) if self._training is not None:
                    if self.world.losses.is_alone(what := f"the trainer of slot {slot}"):
                        self.world.check_rest(slot, self._firsts[slot], steps)
                    self._firsts[slot] = max(self._firsts[slot], steps.first)
                    self.world.losses.followed(what)
                    network.send(self.peer, self.slots.present[slot].peer, Orders(self._training[0], steps))
                case TrainerNotReplaced(slot) | TrainerGivenUp(slot):
                    self.world.losses.followed(f"the trainer of slot {slot}")
                case _:
                    pass
        self._arm()
        self.look()

    def _release(self, order: ReleaseLeases) -> None:
        if self.has_trainers:
            slot, generation = order.slot, order.generation
            found = self.world.leases.release(slot, generation, order.settled)
            answer = Released(slot, generation, found.next_step, found.is_known)
            self._do(self.slots.released(answer, -1, self.now_s))

    def _arm(self) -> None:
        wake_at_s = self.slots.wake_at_s
        if wake_at_s < self._armed_s and self.is_here:
            self._armed_s = wake_at_s
            self.world.network.on_host(self.peer, max(1e-3, wake_at_s - self.now_s), self._wake)

    def _wake(self) -> None:
        self._armed_s = inf
        self._see_replicas()
        if self.slots.wake_at_s <= self.now_s:
            self._do(self.slots.tick(self.now_s))


class Trainer(TrainerHost):
    """A trainer that its client tells what to do; its steps have the numbers that production gives them."""

    def __init__(self, world: World, slot: int, generation: int, greets_in_s: float) -> None:
        super().__init__(world, slot, generation, 0)  # type: ignore[arg-type]
        self.told = 0  # of which round
        self._orders: Orders | None = None  # for when the step that is under way is over
        self._client: Client | None = None  # that it has said hello to
        self._finished = 0  # the last round in which it has said that it is done
        if greets_in_s < inf:
            world.network.on_host(self.peer, greets_in_s, self._greet)

    @property
    def number(self) -> int:  # type: ignore[override]
        return steps_of(self.round).first + self.steps

    @number.setter
    def number(self, number: int) -> None:
        """It follows from round and step."""

    def deliver(self, sender: str, message: object) -> None:
        if type(message) is not Orders:
            super().deliver(sender, message)
        elif self._client is not None and sender == self._client.peer and message.round > self.told:
            self.told, self._orders = message.round, message
            if not self.busy:
                self._obey()

    def lost(self, peer: str) -> None:
        if self._client is not None and peer == self._client.peer:
            self._client = None
        super().lost(peer)

    def _ended(self) -> None:
        super()._ended()
        self._obey()

    def _obey(self) -> None:
        orders, self._orders = self._orders, None
        if orders is not None:
            super().deliver("", Hello(orders.round, {}, False, {}))
            self.steps = orders.steps.first - steps_of(orders.round).first
            self._arm()

    def _greet(self) -> None:
        """Dial the client, and dial it again."""
        network, client = self.world.network, self.world.launcher.client  # type: ignore[attr-defined]
        network.on_host(self.peer, _DIAL_S, self._greet)
        if client is not None and self._client is not client and network.hosts.get(client.peer) is client:
            self._client, self._finished = client, 0
            hello = TrainerHello(self.slot, self.generation, Hop(self.peer, ()), self.told)
            network.send(self.peer, client.peer, hello)
            self._arm()

    def _arm(self) -> None:
        super()._arm()
        is_done = self.round and not self.busy and self.steps >= STEPS_PER_ROUND
        if is_done and self._client is not None and self._finished < self.round:
            self._finished = self.round
            self.world.network.send(self.peer, self._client.peer, Done(self.slot, self.round))


class Leases:
    """The data server: it lives as long as the run. What `step.coordinator.Ledger` is there, over the real table."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.table = world.new_table()
        self._leases: dict[PeerId, int] = {}

    def lease(self, trainer: TrainerHost) -> int | None:
        now_s = self.world.network.now_s
        number = steps_of(trainer.round).first + trainer.steps
        given = self.table.lease(trainer.slot, trainer.generation, trainer.round, number, now_s)
        if not isinstance(given, Grant):
            return None
        self.table.begun(given.lease, now_s)
        self._leases[trainer.peer] = given.lease
        return given.batch.samples[0].start

    def note(self, trainer: TrainerHost, key: StepKey, path: tuple[PeerId, ...]) -> None:
        self.world.safety.opened(key, {peer: self.world.generations[peer] for peer in path})
        hosts = [self.world.network.hosts.get(peer) for peer in path]
        self.world.checks.opened(key, [host for host in hosts if isinstance(host, Server)])
        self.table.note(self._leases[trainer.peer], key, path)

    def acknowledge(self, trainer: TrainerHost) -> None:
        ended = trainer.machine.ended
        is_sure = isinstance(ended, Finished) and ended.committed
        self.table.acknowledge(self._leases[trainer.peer], committed=is_sure, now_s=self.world.network.now_s)

    def give_back(self, trainer: TrainerHost) -> None:
        self.table.give_back(self._leases[trainer.peer])

    def release(self, slot: int, generation: int, settled: Settled) -> Release:
        """A client has settled what this trainer has left."""
        return self.table.release_trainer(slot, generation, settled)
