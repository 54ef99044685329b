"""The processes of the simulated swarm: production's machines around symbolic tensors.

A tensor is the chain of what its forward went through (`Seen`); a gradient is the chain of the loss. A step whose
gradients all carry one chain, and that is the path's, has seen one version everywhere and mixed nothing. The buffers of
a replica (batch norm and the like) are the list of the steps that have changed them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from tests.simulation.safety import Broken, Seen

from shoal.ids import PeerId, StepKey
from shoal.pipeline.schedule import choose
from shoal.swarm.early_payloads import EarlyPayload, EarlyPayloads
from shoal.swarm.step_operations import Decision, Operation, OperationKind, Schedule, SendStepMessage, StepTotals
from shoal.swarm.step_replica import StepReplica
from shoal.swarm.step_trainer import (
    Dial,
    FeedMicrobatch,
    Finished,
    NoPath,
    Note,
    RoundOver,
    StepPhase,
    StepPlan,
    StepTrainer,
    TrainerEffect,
)
from shoal.wire.limits import TENSORS_OF
from shoal.wire.messages.base import ReplicaRef, SampleRange
from shoal.wire.messages.step import Backward, Fenced, Forward, Labels, Open, StepEntry, StepMessage

if TYPE_CHECKING:
    from tests.simulation.step.world import World

Chain = tuple[object, ...]
SIZES = (2, 1, 3)
"""Samples of a step's microbatches; those of a path with caps are smaller."""
TARGETS = (3, 0, 1, 5, 2, 7)
"""Of a step's samples."""
STEPS_PER_ROUND = 3
_COMPUTE_S = 1 / 30
_PAYLOADS = frozenset((Forward, Labels, Backward))


class Envelope(NamedTuple):
    """A step message with its symbolic tensor."""

    message: StepMessage
    tensor: Chain = ()


def _targets_by_microbatch() -> tuple[tuple[int, ...], ...]:
    bounds = pairwise(accumulate(SIZES, initial=0))
    return tuple(TARGETS[start:stop] for start, stop in bounds)


def is_bulk(message: object) -> bool:
    """Whether production sends it with tensors."""
    return type(message) is Envelope and type(message.message) in TENSORS_OF


@dataclass(frozen=True, slots=True)
class Hello:
    """Coordinator to replica, again and again: the round, who is in its record, whether it closes, what it resolved."""

    round: int
    members: dict[str, int]
    closing: bool
    resolved: dict[StepKey, Decision | None]


@dataclass(frozen=True, slots=True)
class Join:
    """Replica to coordinator."""

    round: int
    generation: int
    log: tuple[StepEntry, ...]
    in_doubt: tuple[StepKey, ...]


@dataclass(slots=True)
class Way:
    """What a replica computes for one pass of a step; `gradients` are those of the parameters."""

    forwards: dict[int, Chain] = field(default_factory=dict[int, Chain])
    gradients: dict[int, Chain] = field(default_factory=dict[int, Chain])
    put_off: dict[int, Chain] = field(default_factory=dict[int, Chain])


@dataclass(slots=True)
class Work:
    """The same for all of the step; `head` is empty but in the first stage of a wrapped run."""

    own: Way = field(default_factory=Way)
    head: Way = field(default_factory=Way)

    def way(self, is_head: bool) -> Way:
        return self.head if is_head else self.own


class ReplicaHost:
    """One server; `applied` counts its commits in this generation, and `buffers` are the steps that have changed
    those."""

    def __init__(self, world: World, peer: str) -> None:
        self.world, self.peer, self.stage = world, PeerId(peer), int(peer[1])
        self.machine: StepReplica = world.replica_class(
            self.peer,
            stage=self.stage,
            num_stages=world.num_stages,
            max_open_steps=world.max_open_steps,
            max_microbatch_samples=world.caps.get(self.peer),
            room=world.rooms.get(self.peer),
            schedule=world.schedule,
            is_wrapped=world.is_wrapped,
            cuts=world.cuts,
        )
        self.generation = world.new_generation(peer)
        self.work: dict[StepKey, Work] = {}
        self.early = EarlyPayloads[Chain](self.machine)
        self.payloads: dict[tuple[StepKey, bool, type, int], Chain] = {}
        self.applied: list[StepKey] = []
        self.buffers: list[StepKey] = []
        self.joined: Join | None = None
        self._busy = self._reminds = False
        self.attach()

    def attach(self) -> None:
        """The process is up."""
        self.world.network.start(self.peer, self)

    def deliver(self, sender: str, message: object) -> None:
        if type(message) is Envelope:
            self._on_step(PeerId(sender), message)
        elif isinstance(message, Hello):
            self._on_hello(message)
        self._kick()

    def lost(self, peer: str) -> None:
        self.early.lost(PeerId(peer))
        self._do(self.machine.lost(PeerId(peer), self.world.network.now_s))
        self._remind_later()
        self._kick()

    def _on_step(self, sender: PeerId, envelope: Envelope) -> None:
        message = envelope.message
        if type(message) not in _PAYLOADS:
            self._do(self.machine.receive(sender, message, self.world.network.now_s))
            if type(message) is Open:
                for early in self.early.take(message.key):
                    self._on_step(early.sender, Envelope(early.message, early.content))
            self._remind_later()
            return
        if self.early.hold(EarlyPayload(sender, message, envelope.tensor, 1)):
            return
        if (wanted := self.machine.wanted_by(sender, message)) is not None:
            self.payloads[message.key, wanted.is_head, type(message), message.microbatch] = envelope.tensor
        self._do(self.machine.receive(sender, message, self.world.network.now_s))
        self._keeps_to_its_room(message.key)

    def _keeps_to_its_room(self, key: StepKey) -> None:
        step, room = self.machine.open.get(key), self.machine.room
        held = max((each.inputs.bit_count() - each.backwards for each in step.passes), default=0) if step else 0
        if room is not None and held > room:
            raise Broken(f"{self.peer} holds {held} microbatches of {key}, and has room for {room}")

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
        if self.joined is not None and hello.members.get(self.peer) == self.generation:
            committed = [entry.key for entry in self.machine.log]
            recorded = self.world.coordinator.recorded_logs[self.peer]
            if committed != recorded:
                raise Broken(f"{self.peer} has committed after its join: {committed} but {recorded}")
        # Whoever holds what the record says and whoever fetches it starts a new generation: no step reaches over a
        # record.
        self.generation, self.applied, self.buffers, self.joined = self.world.new_generation(self.peer), [], [], None
        self.early.clear()
        self._do(self.machine.start_round(hello.round))

    def _try_join(self) -> None:
        if self.machine.closed:
            self.machine.join()
            self.joined = Join(self.machine.round, self.generation, tuple(self.machine.log), self.machine.in_doubt)
            self.world.network.send(self.peer, "K", self.joined)

    def _remind_later(self) -> None:
        wake_at_s = self.machine.wake_at_s
        if not self._reminds and wake_at_s < inf:
            self._reminds = True
            delay_s = max(1e-3, wake_at_s - self.world.network.now_s)
            self.world.network.on_host(self.peer, delay_s, self._remind)

    def _remind(self) -> None:
        self._reminds, now_s = False, self.world.network.now_s
        if self.machine.wake_at_s <= now_s:
            self._do(self.machine.tick(now_s))
        self._remind_later()

    def _do(self, sends: list[SendStepMessage], tensor: Chain = ()) -> None:
        send_to = self.world.network.send
        for send in sends:
            message = send.message
            if isinstance(message, Backward) and not tensor:
                # A repeated backward is answered with the gradient that was sent before; the first stage's units send
                # none.
                way = self.work[message.key].way(self.stage == 0)
                tensor = way.gradients.get(message.microbatch) or way.put_off[message.microbatch]
            if isinstance(message, Fenced):
                self.answer_fence(send.to, message)
            else:
                send_to(self.peer, send.to, Envelope(message, tensor))

    def answer_fence(self, to: PeerId, message: Fenced) -> None:
        self.world.network.send(self.peer, "K", message)

    def _kick(self) -> None:
        if self._busy:
            return
        operation = choose(self.machine.ready(), self.world.max_kept)
        if operation is None:
            return
        self._busy = True
        step = self.machine.open.get(operation.key)
        if step is not None and not step.begun:
            unapplied = self.machine.open.keys() - self.machine.in_doubt
            self.world.safety.begins(self.peer, self.generation, operation.key, unapplied)
        self.machine.started(operation)
        network = self.world.network
        duration_s = network.exponential(_COMPUTE_S) * network.slowness(self.peer)
        network.on_host(self.peer, duration_s, self._finish, operation, self.generation)

    def _finish(self, operation: Operation, generation: int) -> None:
        self._busy = False
        if generation != self.generation:
            operation = Operation(OperationKind.DROP, operation.key)
        tensor, totals = self._compute(operation)
        self._do(self.machine.finished(operation, totals), tensor)
        self.world.safety.buffers(self.peer, self.buffers, self.machine.log)
        if self.machine.closed and self.joined is None:
            self._try_join()
        self._kick()

    def _compute(self, operation: Operation) -> tuple[Chain, StepTotals | None]:
        key, microbatch = operation.key, operation.microbatch
        if operation.kind == OperationKind.DROP:
            self.work.pop(key, None)
            return (), None
        work = self.work.get(key)
        if work is None:
            work = self.work[key] = Work()
        if operation.kind == OperationKind.COMMIT:
            self._apply(key, work)
            return (), None
        step, way, is_head = self.machine.open.get(key), work.way(operation.is_head), operation.is_head
        totals = StepTotals(1.0, key.number % 7 != 5, 1.0) if step is not None and step.completes(operation) else None
        if operation.kind == OperationKind.WEIGHTS:
            if microbatch not in way.put_off:
                raise Broken(f"{key} has no gradient of {microbatch} to add, or has added it")
            self._add(way, key, microbatch, way.put_off.pop(microbatch))
            return (), totals
        if operation.kind == OperationKind.BACKWARD:
            gradient = self.payloads[key, is_head, Backward, microbatch]
        else:
            if microbatch not in way.forwards:
                way.forwards[microbatch] = self._forward(key, self.payloads[key, is_head, Forward, microbatch])
            if operation.kind == OperationKind.FORWARD:
                return way.forwards[microbatch], None
            gradient = way.forwards[microbatch]
        if microbatch in way.put_off:
            raise Broken(f"{key} does the backward of {microbatch} twice")
        if self.world.schedule == Schedule.ZERO_BUBBLE:
            way.put_off[microbatch] = gradient
        else:
            self._add(way, key, microbatch, gradient)
        return gradient, totals

    def _forward(self, key: StepKey, received: Chain) -> Chain:
        """Compute; what it does to buffers goes into the step's own copy, which is live from the commit on."""
        return (*received, Seen(self.peer, self.generation, len(self.applied)))

    def _apply(self, key: StepKey, work: Work) -> None:
        request = self.machine.open[key].request
        path = tuple(hop.peer for hop in request.path)
        cap, safety = self.world.caps.get(self.peer), self.world.safety
        ways = [work.own]
        if self.world.is_wrapped:
            path = (*path, path[0])
            ways += [work.head] if self.stage == 0 else []
        for way in ways:
            safety.applies(self.peer, self.generation, key, way.gradients, path, SIZES, cap, self.applied)
            safety.weighs(key, way.gradients, request.microbatch_targets, TARGETS)
        self.applied.append(key)
        self.buffers.append(key)

    def _add(self, way: Way, key: StepKey, microbatch: int, gradient: Chain) -> None:
        if microbatch in way.gradients:
            raise Broken(f"{key} adds the gradient of {microbatch} twice")
        if microbatch != len(way.gradients):
            raise Broken(f"{key} adds the gradient of {microbatch} out of order")
        way.gradients[microbatch] = gradient


class TrainerHost:
    """One generation of a trainer, with the data server's ledger beside it on the same host."""

    def __init__(self, world: World, slot: int, generation: int, first_number: int) -> None:
        self.world, self.slot, self.generation = world, slot, generation
        self.peer = PeerId(f"T{slot}.{generation}")
        self.machine: StepTrainer = world.trainer_class(
            trainer=slot,
            generation=generation,
            window=world.window,
            max_grad_norm=None,
            step_timeout_s=3.0,
            is_wrapped=world.is_wrapped,
        )
        self.round = 0
        self.steps = 0
        self.number = first_number
        self.sample: int | None = None
        self.busy, self.begun_in = False, 0
        self._wake_s = 0.0
        self._armed_s = inf
        world.network.start(self.peer, self)

    def deliver(self, sender: str, message: object) -> None:
        if type(message) is Envelope:
            self._do(self.machine.receive(PeerId(sender), message.message, self.world.network.now_s))
        elif isinstance(message, Hello) and message.round > self.round:
            self.round, self.steps = message.round, 0
            if not self.busy and self.sample is not None:
                self.world.ledger.give_back(self)
                self.sample, self.number = None, self.number + 1
        self._arm()

    def lost(self, peer: str) -> None:
        self._do(self.machine.lost(PeerId(peer), self.world.network.now_s))
        self._arm()

    def runs_over(self, replica: str) -> bool:
        """Whether a step is open over this replica whose first Commit has not been sent."""
        return (
            self.busy
            and self.machine._phase in (StepPhase.OPENING, StepPhase.RUNNING)
            and replica in self.machine._path
        )

    def _arm(self) -> None:
        """Wake up when there is something to do."""
        may_start = self.round and self.steps < STEPS_PER_ROUND
        at_s = self.machine.wake_at_s if self.busy else self._wake_s if may_start else inf
        if at_s < self._armed_s and self.peer in self.world.network.hosts:
            self._armed_s = at_s
            self.world.network.on_host(self.peer, max(1e-3, at_s - self.world.network.now_s), self._wake)

    def _wake(self) -> None:
        self._armed_s = inf
        now_s = self.world.network.now_s
        if self.busy:
            self._do(self.machine.tick(now_s))
        elif now_s >= self._wake_s and self.round and self.steps < STEPS_PER_ROUND:
            self._start(now_s)
        self._arm()

    def _start(self, now_s: float) -> None:
        if self.sample is None:
            self.sample = self.world.ledger.lease(self)
        if self.sample is None:
            self.steps = STEPS_PER_ROUND
            return
        self.busy, self.begun_in = True, self.round
        home = tuple(stage[self.slot % len(stage)] for stage in self.world.hops)
        samples = (SampleRange(0, self.sample, self.sample + 1),)
        # Now and then it has not heard of the caps yet.
        caps = self.world.caps if self.world.caps_rng.random() < 0.8 else {}
        replicas = tuple(tuple(ReplicaRef(hop, caps.get(hop.peer)) for hop in stage) for stage in self.world.hops)
        plan = StepPlan(self.round, self.number, _targets_by_microbatch(), samples, 0.1, home, replicas)
        self._do(self.machine.start(plan, now_s))

    def _do(self, effects: list[TrainerEffect]) -> None:
        network = self.world.network
        for effect in effects:
            match effect:
                case SendStepMessage(to, message):
                    self.world.before_send(self, to, message)
                    if self.peer in network.hosts:
                        network.send(self.peer, to, Envelope(message))
                case FeedMicrobatch(key, microbatch, part, inputs_to, labels_to):
                    before = sum(SIZES[: part.whole])
                    samples = ("samples", before + part.start, before + part.stop)
                    network.send(self.peer, inputs_to, Envelope(Forward(key, microbatch), (samples,)))
                    network.send(self.peer, labels_to, Envelope(Labels(key, microbatch)))
                case Note(key, path):
                    self.world.losses.followed(f"another attempt of {self.peer}")
                    self.world.ledger.note(self, key, tuple(hop.peer for hop in path))
                case Dial(to):
                    network.on_host(self.peer, 0.05, self._dial, to)
        if self.busy and self.machine.ended is not None:
            self._ended()

    def _dial(self, peer: PeerId) -> None:
        if self.world.network.dial(self.peer, peer):
            self.machine.peer_found(peer)
            self._arm()

    def _ended(self) -> None:
        self.busy = False
        self.world.losses.followed(f"another attempt of {self.peer}")
        match self.machine.ended:
            case Finished(key=key, committed=committed):
                if committed:
                    self.world.safety.done(key)
                self.world.ledger.acknowledge(self)
                self.sample, self.number, self.steps = None, self.number + 1, self.steps + 1
            case RoundOver():
                self.world.ledger.give_back(self)
                self.sample, self.number, self.steps = None, self.number + 1, STEPS_PER_ROUND
            case NoPath():
                self._wake_s = self.world.network.now_s + 0.3
                if self.round > self.begun_in:
                    self.world.ledger.give_back(self)
                    self.sample, self.number = None, self.number + 1
            case None:
                pass
