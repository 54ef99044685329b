"""The processes of the simulated swarm: production's machines around symbolic tensors.

A tensor is the chain of (replica, life, version) that its forward went through; a gradient is the chain of the loss. A
step whose gradients all carry one chain, and that is the path's, has seen one version everywhere and mixed nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.ids import PeerId, StepKey
from shoal.pipeline.schedule import choose
from shoal.swarm.step_operations import Decision, Operation, OperationKind, Schedule, Send, StepTotals
from shoal.swarm.step_replica import StepReplica
from shoal.swarm.step_trainer import Dial, Feed, Finished, NoPath, Note, RoundOver, StepPlan, StepTrainer, TrainerEffect
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.step import Backward, Fenced, Forward, Labels, StepEntry, StepMessage

if TYPE_CHECKING:
    from tests.simulation.step.world import World

Chain = tuple[tuple[str, int, int], ...]
SIZES = (2, 1, 3)
"""Samples of a step's microbatches; those of a path with caps are smaller."""
STEPS_PER_ROUND = 3


@dataclass(frozen=True)
class Envelope:
    """A step message with its symbolic tensor."""

    message: StepMessage
    tensor: Chain = ()


@dataclass(frozen=True)
class Hello:
    """Coordinator to replica, again and again: the round, who is in its record, whether it closes, what it resolved."""

    round: int
    members: dict[str, int]
    closing: bool
    resolved: dict[StepKey, Decision | None]


@dataclass(frozen=True)
class Join:
    """Replica to coordinator."""

    round: int
    life: int
    log: tuple[StepEntry, ...]
    in_doubt: tuple[StepKey, ...]


@dataclass
class Work:
    """What a replica computes for one step; `gradients` are those of the parameters."""

    forwards: dict[int, Chain] = field(default_factory=dict[int, Chain])
    gradients: dict[int, Chain] = field(default_factory=dict[int, Chain])
    put_off: dict[int, Chain] = field(default_factory=dict[int, Chain])


class ReplicaHost:
    """One server; `applied` counts its commits in this life."""

    def __init__(self, world: World, peer: str) -> None:
        self.world, self.peer, self.stage = world, PeerId(peer), int(peer[1])
        self.machine: StepReplica = world.replica_class(
            self.peer,
            stage=self.stage,
            num_stages=world.num_stages,
            max_open_steps=world.max_open_steps,
            max_microbatch_samples=world.caps.get(self.peer),
            schedule=world.schedule,
        )
        self.life = world.new_life(peer)
        self.work: dict[StepKey, Work] = {}
        self.payloads: dict[tuple[StepKey, type, int], Chain] = {}
        self.applied: list[StepKey] = []
        self.joined: Join | None = None
        self._busy = False
        world.network.start(peer, self)
        self._remind()

    def deliver(self, sender: str, message: object) -> None:
        if isinstance(message, Hello):
            self._on_hello(message)
        elif isinstance(message, Envelope):
            self._on_step(PeerId(sender), message)
        self._kick()

    def lost(self, peer: str) -> None:
        self._do(self.machine.peer_lost(PeerId(peer)))
        self._kick()

    def _on_step(self, sender: PeerId, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, Forward | Labels | Backward) and self.machine.wants(sender, message):
            self.payloads[message.key, type(message), message.microbatch] = envelope.tensor
        self._do(self.machine.handle(sender, message))

    def _on_hello(self, hello: Hello) -> None:
        if self.machine.round < hello.round:
            self._swap(hello)
        if hello.closing and hello.round == self.machine.round:
            if self.joined is None:
                self._do(self.machine.close())
                self._try_join()
                return
            fates = {key: fate for key, fate in hello.resolved.items() if key in self.joined.in_doubt}
            for key, fate in fates.items():
                self._do(self.machine.resolve(key, fate))
            if fates:
                self._try_join()
            else:
                self.world.network.send(self.peer, "K", self.joined)

    def _swap(self, hello: Hello) -> None:
        if self.joined is not None and hello.members.get(self.peer) == self.life:
            committed = [entry.key for entry in self.machine.log]
            recorded = self.world.coordinator.recorded_logs[self.peer]
            assert committed == recorded, f"{self.peer} has committed after its join: {committed} but {recorded}"
        # Whoever holds what the record says and whoever fetches it starts a new life: no step reaches over a record.
        self.life, self.applied, self.joined = self.world.new_life(self.peer), [], None
        self._do(self.machine.start_round(hello.round))

    def _try_join(self) -> None:
        if self.machine.closed:
            self.machine.join()
            self.joined = Join(self.machine.round, self.life, tuple(self.machine.log), self.machine.in_doubt)
            self.world.network.send(self.peer, "K", self.joined)

    def _remind(self) -> None:
        self._do(self.machine.remind())
        self._kick()
        self.world.network.on_host(self.peer, 0.3, self._remind)

    def _do(self, sends: list[Send], tensor: Chain = ()) -> None:
        for send in sends:
            message = send.message
            if isinstance(message, Backward) and not tensor:
                # A repeated backward is answered with the gradient that was sent before.
                work = self.work[message.key]
                tensor = work.gradients.get(message.microbatch) or work.put_off[message.microbatch]
            if isinstance(message, Fenced):
                self.world.network.send(self.peer, "K", message)
            else:
                self.world.network.send(self.peer, send.to, Envelope(message, tensor))

    def _kick(self) -> None:
        if self._busy:
            return
        operation = choose(self.machine.ready(), self.world.max_held)
        if operation is None:
            return
        self._busy = True
        self.machine.started(operation)
        life = self.life
        duration_s = self.world.network.rng.expovariate(30)
        self.world.network.on_host(self.peer, duration_s, lambda: self._finish(operation, life))

    def _finish(self, operation: Operation, life: int) -> None:
        self._busy = False
        if life != self.life:
            operation = Operation(OperationKind.DROP, operation.key)
        tensor, totals = self._compute(operation)
        self._do(self.machine.finished(operation, totals), tensor)
        if self.machine.closed and self.joined is None:
            self._try_join()
        self._kick()

    def _compute(self, operation: Operation) -> tuple[Chain, StepTotals | None]:
        key, microbatch = operation.key, operation.microbatch
        if operation.kind == OperationKind.DROP:
            self.work.pop(key, None)
            return (), None
        work = self.work.setdefault(key, Work())
        if operation.kind == OperationKind.COMMIT:
            self.world.check_commit(self, key, work)
            self.applied.append(key)
            return (), None
        step = self.machine.open.get(key)
        totals = StepTotals(1.0, key.number % 7 != 5, 1.0) if step is not None and step.completes(operation) else None
        if operation.kind == OperationKind.WEIGHTS:
            assert microbatch in work.put_off, f"{key} has no gradient of {microbatch} to add, or has added it"
            self._add(work, key, microbatch, work.put_off.pop(microbatch))
            return (), totals
        if operation.kind == OperationKind.BACKWARD:
            gradient = self.payloads[key, Backward, microbatch]
        else:
            if microbatch not in work.forwards:
                received = self.payloads[key, Forward, microbatch]
                work.forwards[microbatch] = (*received, (self.peer, self.life, len(self.applied)))
            if operation.kind == OperationKind.FORWARD:
                return work.forwards[microbatch], None
            gradient = work.forwards[microbatch]
        assert microbatch not in work.put_off, f"{key} does the backward of {microbatch} twice"
        if self.world.schedule == Schedule.ZERO_BUBBLE:
            work.put_off[microbatch] = gradient
        else:
            self._add(work, key, microbatch, gradient)
        return gradient, totals

    def _add(self, work: Work, key: StepKey, microbatch: int, gradient: Chain) -> None:
        assert microbatch not in work.gradients, f"{key} adds the gradient of {microbatch} twice"
        assert microbatch == len(work.gradients), f"{key} adds the gradient of {microbatch} out of order"
        work.gradients[microbatch] = gradient


class TrainerHost:
    """One incarnation of a trainer, with the data server's ledger beside it on the same host."""

    def __init__(self, world: World, slot: int, incarnation: int, first_number: int) -> None:
        self.world, self.slot, self.incarnation = world, slot, incarnation
        self.peer = PeerId(f"T{slot}.{incarnation}")
        self.machine: StepTrainer = world.trainer_class(
            trainer=slot, incarnation=incarnation, window=world.window, max_grad_norm=None, step_timeout_s=3.0
        )
        self.round = 0
        self.steps = 0
        self.number = first_number
        self.sample: int | None = None
        self.busy = False
        self._wake_s = 0.0
        world.network.start(self.peer, self)
        self._tick()

    def deliver(self, sender: str, message: object) -> None:
        if isinstance(message, Hello):
            if message.round > self.round:
                self.round, self.steps = message.round, 0
        elif isinstance(message, Envelope):
            self._do(self.machine.handle(PeerId(sender), message.message, self.world.network.now_s))

    def lost(self, peer: str) -> None:
        self._do(self.machine.peer_lost(PeerId(peer), self.world.network.now_s))

    def _tick(self) -> None:
        now_s = self.world.network.now_s
        if self.busy:
            self._do(self.machine.tick(now_s))
        elif now_s >= self._wake_s and self.round and self.steps < STEPS_PER_ROUND:
            self._start(now_s)
        self.world.network.on_host(self.peer, 0.05, self._tick)

    def _start(self, now_s: float) -> None:
        if self.sample is None:
            self.sample = self.world.ledger.lease(self)
        if self.sample is None:
            self.steps = STEPS_PER_ROUND
            return
        self.busy = True
        replicas = tuple(tuple(_hop(peer) for peer in stage) for stage in self.world.replicas)
        home = tuple(stage[self.slot % len(stage)] for stage in replicas)
        samples = (SampleRange(0, self.sample, self.sample + 1),)
        # Now and then it has not heard of the caps yet.
        caps = self.world.caps if self.world.caps_rng.random() < 0.8 else {}
        plan = StepPlan(self.round, self.number, SIZES, samples, 0.1, home, replicas, caps)
        self._do(self.machine.start(plan, now_s))

    def _do(self, effects: list[TrainerEffect]) -> None:
        for effect in effects:
            match effect:
                case Note(key, path):
                    self.world.ledger.note(self, key, tuple(hop.peer for hop in path))
                case Feed(key, path, microbatch, part):
                    before = sum(SIZES[: part.whole])
                    samples = ("samples", before + part.start, before + part.stop)
                    self.world.network.send(self.peer, path[0], Envelope(Forward(key, microbatch), (samples,)))
                    self.world.network.send(self.peer, path[-1], Envelope(Labels(key, microbatch)))
                case Dial(to):
                    self.world.network.on_host(self.peer, 0.05, lambda to=to: self._dialled(to))
                case Send(to, message):
                    self.world.sabotage(self, to, message)
                    if self.peer in self.world.network.hosts:
                        self.world.network.send(self.peer, to, Envelope(message))
        if self.busy and self.machine.ended is not None:
            self._ended()

    def _dialled(self, peer: PeerId) -> None:
        if peer in self.world.network.hosts:
            self.machine.peer_found(peer)
        else:
            self.lost(peer)

    def _ended(self) -> None:
        self.busy = False
        match self.machine.ended:
            case Finished():
                self.world.ledger.acknowledge(self)
                self.sample, self.number, self.steps = None, self.number + 1, self.steps + 1
            case RoundOver():
                self.world.ledger.give_back(self)
                self.sample, self.number, self.steps = None, self.number + 1, STEPS_PER_ROUND
            case NoPath():
                self._wake_s = self.world.network.now_s + 0.3
            case None:
                pass


def _hop(peer: str) -> Hop:
    return Hop(PeerId(peer), ())
