"""Carries the actions of a replay out, with the code that the servers ran: stage, optimizer, averages, outer step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from msgspec.structs import astuple

from shoal.averaging.gathered import brought_by, gathered_average, gathered_weights, payload_of
from shoal.averaging.replica_state import Contribution, OuterState, ReplicaState
from shoal.averaging.round_average import averaging_codec, buffer_vectors, ring_vectors
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.codec.raw import from_wire, to_wire
from shoal.collective.sequential import reduce_in_turn
from shoal.config.schema import Config
from shoal.data.fields import Fields
from shoal.data.targets import targets_of
from shoal.errors import StateMismatch
from shoal.ids import StepKey
from shoal.optim.schedule import LrSchedule
from shoal.pipeline.device_operations import operate
from shoal.pipeline.replica_log import Applied, Loaded
from shoal.pipeline.stage_compute import StageCompute
from shoal.replay.generations import Boundary, Generation
from shoal.replay.links import Crew, Name
from shoal.replay.order import Action, Apply, Average, Begin, Compute, End, Inherit, Keep, Load, Resume
from shoal.replay.samples import Samples
from shoal.replay.sharing import Stretch, stretches, turns
from shoal.replay.verdict import Difference
from shoal.server.replica import build_state
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.records import outcome_of, payload_in
from shoal.swarm.step_operations import (
    Decision,
    Operation,
    OperationKind,
    Schedule,
    StepTotals,
    decision_of,
    gradient_norm,
)
from shoal.wire.messages.round import Payload, Record, StageHashes, StageOutcome
from shoal.wire.tensors import WireTensor

_OUTPUT, _GRADIENT, _TOTALS, _SHARE, _STATE, _SNAPSHOT = range(6)
"""What a parcel from another process holds, in its name."""


@dataclass(slots=True)
class _ReplayedReplica:
    """A generation that is under way.

    Attributes:
        computed: by step that it will commit, the totals of its gradients and the trainer's decision over all stages.
        counted: what of it is in the average of a record that it has not loaded yet, by the record's round and state.
    """

    generation: Generation
    compute: StageCompute
    state: ReplicaState
    computed: dict[StepKey, tuple[StepTotals, Decision]] = field(
        default_factory=dict[StepKey, "tuple[StepTotals, Decision]"]
    )
    counted: dict[tuple[int, StageHashes], Payload] = field(default_factory=dict[tuple[int, StageHashes], Payload])


@dataclass(frozen=True, slots=True)
class _ReplayedStep:
    """A step that is being computed, as this process sees it.

    Attributes:
        number: place of the step in the replay.
        batches: what there is of each microbatch; empty where this process needs nothing of it.
        targets: of each microbatch, counted anew; as they are logged where `batches` is empty.
        path: names who computes which stages of it; behind the last one, the head that a wrapped first stage hosts.
        replicas: by stage, those of this process.
    """

    number: int
    key: StepKey
    batches: Sequence[Fields[WireTensor]]
    targets: tuple[int, ...]
    path: list[Stretch]
    replicas: dict[int, _ReplayedReplica]
    num_stages: int
    loss_scale: float

    def replica(self, place: int) -> _ReplayedReplica:
        """Who computes what stands at this place of the path."""
        return self.replicas[place % self.num_stages]

    def context(self, microbatch: int) -> tuple[WireTensor, ...]:
        """What every stage gets of a microbatch."""
        return tuple(self.batches[microbatch].context.values()) if self.batches else ()

    def name(self, microbatch: int, stage: int, content: int) -> Name:
        """Of a parcel that crosses from one stretch to another one."""
        return (content, self.number, microbatch, stage)


class Engine:
    """The replicas of the round at hand, and the states that may still be loaded.

    In one process, each microbatch of a step runs alone through all stages and back, whatever the schedule of the run
    was, and activations are kept. Neither changes a bit, and this takes the least memory and time. With several
    processes, each has some of the generations, and sends what a path or an average needs of them (`replay.sharing`).

    Args:
        crew: names the process of each generation, and the links to it; None: this process computes all generations.
        beginning: the checkpoint that a fork began with; None: the run began with D_0.
    """

    def __init__(
        self,
        config: Config,
        samples: Samples,
        generations: tuple[Generation, ...],
        crew: Crew | None = None,
        beginning: StoredCheckpoint | None = None,
    ) -> None:
        pipeline = {"schedule": Schedule.ONE_F_ONE_B.value, "activation_checkpointing": False}
        self._config = config.model_copy(update={"model_pipeline": config.model_pipeline.model_copy(update=pipeline)})
        self._samples = samples
        self._beginning = beginning
        self._schedule = LrSchedule.from_config(config.diloco)
        self._codec = averaging_codec(config.diloco)
        self._codecs: dict[int, str] = {}  # by record, what it names for the round after it
        self._cuts = CutRule.of(config.diloco)
        self._replicas: dict[int, _ReplayedReplica] = {}
        self._states: defaultdict[int, dict[StageHashes, OuterState]] = defaultdict(dict)
        self._kept: dict[tuple[int, Boundary], torch.Tensor] = {}
        self._crew = crew or Crew([0] * len(generations))
        self._loads = _loads_of([generation for generation in generations if self._crew.is_mine(generation.number)])
        self._hosts: defaultdict[int, set[int]] = defaultdict(set)
        for generation in generations:
            self._hosts[generation.stage].add(self._crew.home(generation.number))

    def act(self, action: Action) -> Iterator[Difference]:
        """Carry out what of an action is this process's; yields what is not as the logs say.

        Raises:
            ConnectionLost: Another process has ended.
            ShoalError: It cannot be carried out here at all.
        """
        match action:
            case Compute():
                yield from self._compute(action)
            case Average(record):
                yield from self._average(action, record)
            case (
                Begin(generation)
                | Load(generation)
                | Keep(generation)
                | Resume(generation)
                | Inherit(generation)
                | Apply(_, generation)
                | End(generation)
            ) if not self._crew.is_mine(generation.number):
                pass
            case Begin(generation):
                self._begin(generation)
            case Load(generation, loaded):
                yield from self._load(generation, loaded)
            case Keep(generation, boundary, heir):
                self._take_snapshot(generation, boundary, heir)
            case Resume(generation, origin):
                self._resume(generation, origin)
            case Inherit(generation, slot):
                yield from self._inherit(generation, slot)
            case Apply(round, generation, applied):
                yield from self._apply(round, generation, applied)
            case End(generation):
                del self._replicas[generation.number]

    # ---- generations

    def _begin(self, generation: Generation) -> None:
        torch.set_num_threads(generation.place.num_threads)
        compute, state = build_state(self._config, generation.stage, _device_here(generation.place.device))
        self._replicas[generation.number] = _ReplayedReplica(generation, compute, state)
        self._states[generation.stage].setdefault(state.hashes, state.base)

    def _load(self, generation: Generation, loaded: Loaded) -> Iterator[Difference]:
        replica, states = self._replicas[generation.number], self._states[generation.stage]
        if loaded.hashes not in states:
            self._read_beginning(generation.stage)
        state = states.get(loaded.hashes)
        if state is None:
            source = f"as those of record {loaded.round}, which no round has led to"
            if loaded.round == 0:
                source = "from the seed, which leads to other ones here"
            what = f"it began with parameters {loaded.hashes.parameters[:16]} {source}"
            yield Difference(loaded.round, generation.stage, generation.peer, what)
            return
        counted = replica.counted.pop((loaded.round, loaded.hashes), None)
        fragment = replica.state.fragment(loaded.round)
        if counted is None:
            replica.state.brought(fragment)  # as at the join before, where it was left out of the record
        replica.state.stage_fetched(state, loaded.hashes)
        codec = self._codecs.get(loaded.round, "")
        replica.state.swap(loaded.hashes, counted=counted, fragment=fragment, keeps_rest=loaded.keeps_rest, codec=codec)
        replica.counted.clear()
        replica.compute.start_round(cut_after=self._cuts.commits(loaded.round + 1))
        replica.computed.clear()
        loads = self._loads[generation.stage]
        loads[loaded.hashes] -= 1

    def _take_snapshot(self, generation: Generation, boundary: Boundary, heir: int) -> None:
        content = self._replicas[generation.number].compute.snapshot()
        if self._crew.is_mine(heir):
            self._kept[heir, boundary] = content
        else:
            self._crew.links[self._crew.home(heir)].send(_snapshot_name(heir, boundary), None, [content])

    def _resume(self, generation: Generation, origin: Boundary) -> None:
        if self._crew.is_mine(origin.generation):
            content = self._kept.pop((generation.number, origin))
        else:
            [content] = (
                self._crew.links[self._crew.home(origin.generation)]
                .receive(_snapshot_name(generation.number, origin))
                .tensors
            )
        compute = self._replicas[generation.number].compute
        compute.start_round(content, origin.commits, self._cuts.commits(origin.round))
        if origin.commits == 0:
            compute.take_base()  # it has another one's optimizer, and the parameters of the record

    def _read_beginning(self, stage: int) -> None:
        checkpoint = self._beginning
        if checkpoint is not None and (outcome := outcome_of(checkpoint.record, stage)) is not None:
            self._states[stage][outcome.hashes] = OuterState(*checkpoint.vectors(stage))

    def _inherit(self, generation: Generation, slot: int) -> Iterator[Difference]:
        found = self._beginning and self._beginning.inner(generation.stage, slot)
        try:
            self._replicas[generation.number].compute.inherit(found or {})
        except StateMismatch as error:
            what = f"it goes on with what the fork's first checkpoint has of slot {slot}: {error}"
            yield Difference(0, generation.stage, generation.peer, what)

    # ---- steps

    def _compute(self, action: Compute) -> Iterator[Difference]:
        began, key = action.began, action.began.key
        homes = [self._crew.home(generation.number) for generation in action.generations]
        mine = {
            stage: generation
            for stage, generation in enumerate(action.generations)
            if self._crew.is_mine(generation.number)
        }
        if not mine:
            return
        replicas = {stage: self._replicas[generation.number] for stage, generation in mine.items()}
        is_wrapped = any(replica.compute.module.is_wrapped for replica in replicas.values())
        path = stretches([*homes, homes[0]] if is_wrapped else homes)
        last = 0 if is_wrapped else len(homes) - 1
        sizes, has_end = began.microbatch_samples, not {0, last}.isdisjoint(mine)
        needs_samples = has_end or self._samples.has_context
        batches = self._samples.microbatches(began.samples, sizes) if needs_samples else []
        logged = tuple(began.microbatch_targets)
        step = _ReplayedStep(
            action.number,
            key,
            batches,
            tuple(sum(targets_of(batch.labels)) for batch in batches) if needs_samples else logged,
            path,
            replicas,
            len(homes),
            began.loss_scale,
        )
        if last in mine and step.targets != logged:
            # Its weight in the average of the round follows from them.
            what = f"step {key}: {list(step.targets)} targets in its microbatches, its log says {list(logged)}"
            yield Difference(action.round, last, action.generations[last].peer, what)
        for turn in turns(len(path), range(len(sizes))):
            if path[turn.stretch].process != self._crew.process:
                continue
            if turn.is_backward:
                self._go_back(step, turn.stretch, turn.microbatch, None)
            else:
                self._go_forward(step, turn.stretch, turn.microbatch)
        totals, decision = self._totals(step)
        for stage, replica in step.replicas.items():
            if action.keeps[stage]:
                replica.computed[key] = totals[stage], decision
            else:
                replica.compute.drop(key)

    def _go_forward(self, step: _ReplayedStep, number: int, microbatch: int) -> None:
        """Through a stretch; where that is the end of the path also back."""
        _, start, stop = step.path[number]
        is_last = number == len(step.path) - 1
        received: WireTensor | None
        if start == 0:
            received = step.batches[microbatch].inputs
        else:
            received = self._receive(step.path[number - 1].process, step.name(microbatch, start, _OUTPUT))
        context = step.context(microbatch)
        forward = Operation(OperationKind.FORWARD, step.key, microbatch)
        for place in range(start, stop - is_last):
            received = self._operate(step.replica(place), forward, [received, *context], step)
        if not is_last:
            self._send(step.path[number + 1].process, step.name(microbatch, stop, _OUTPUT), received)
            return
        labels = step.batches[microbatch].labels
        loss = Operation(OperationKind.LOSS, step.key, microbatch, is_head=stop > step.num_stages)
        gradient = self._operate(step.replica(stop - 1), loss, [received, *context, labels], step)
        self._go_back(step, number, microbatch, gradient)

    def _go_back(self, step: _ReplayedStep, number: int, microbatch: int, gradient: WireTensor | None) -> None:
        """Through a stretch, from its end; in the last one that is behind the loss, whose gradient is given."""
        _, start, stop = step.path[number]
        is_last = number == len(step.path) - 1
        if not is_last:
            gradient = self._receive(step.path[number + 1].process, step.name(microbatch, stop, _GRADIENT))
        backward = Operation(OperationKind.BACKWARD, step.key, microbatch)
        for place in reversed(range(start, stop - is_last)):
            gradient = self._operate(step.replica(place), backward, [gradient], step)
        if number:
            self._send(step.path[number - 1].process, step.name(microbatch, start, _GRADIENT), gradient)

    def _totals(self, step: _ReplayedStep) -> tuple[dict[int, StepTotals], Decision]:
        """What the gradients come to in the stages of this process, and what the trainer makes of all stages'."""
        totals = {stage: replica.compute.totals(step.key) for stage, replica in step.replicas.items()}
        parts = {stage: (one.squared_norm, one.finite) for stage, one in totals.items()}
        others = {stretch.process for stretch in step.path} - {self._crew.process}
        for process in others:
            self._crew.links[process].send(step.name(0, 0, _TOTALS), parts)
        for process in others:
            parts |= self._crew.links[process].receive(step.name(0, 0, _TOTALS)).note
        norm = gradient_norm(parts[stage][0] for stage in sorted(parts))
        is_finite = all(finite for _, finite in parts.values())
        lr, most = self._schedule.lr(step.key.number), self._config.diloco.max_grad_norm
        return totals, decision_of(norm, is_finite, lr, most)

    def _send(self, process: int, name: Name, tensor: WireTensor | None) -> None:
        self._crew.links[process].send(name, None, [] if tensor is None else [from_wire(tensor)])

    def _receive(self, process: int, name: Name) -> WireTensor:
        [tensor] = self._crew.links[process].receive(name).tensors
        return to_wire(tensor)

    def _operate(
        self,
        replica: _ReplayedReplica,
        operation: Operation,
        inputs: list[WireTensor | None],
        step: _ReplayedStep | None,
    ) -> WireTensor | None:
        """Compute one operation, of a step if it is not its end.

        No input is None, since only the ends of a path give nothing to a neighbour.
        """
        if torch.get_num_threads() != replica.generation.place.num_threads:
            torch.set_num_threads(replica.generation.place.num_threads)
        given = [tensor for tensor in inputs if tensor is not None]
        if step is None:
            return operate(replica.compute, operation, given, ())
        return operate(replica.compute, operation, given, step.targets, step.loss_scale)

    def _apply(self, round: int, generation: Generation, applied: Applied) -> Iterator[Difference]:
        replica, key = self._replicas[generation.number], applied.key
        found, wanted = replica.computed.pop(key)
        logged = (applied.squared_norm, applied.loss)
        if logged != _as_logged(found):
            what = f"step {key}: squared gradient norm and loss {_as_logged(found)}, its log says {logged}"
            yield Difference(round, generation.stage, generation.peer, what)
        decision = Decision(applied.scale, applied.lr, applied.skipped)
        if decision != wanted:
            what = f"step {key}: committed with {decision}, its gradients make it {wanted}"
            yield Difference(round, generation.stage, generation.peer, what)
        self._operate(replica, Operation(OperationKind.COMMIT, key, decision=decision), [], None)

    # ---- rounds

    def _average(self, action: Average, record: Record) -> Iterator[Difference]:
        """The process of a stage's first member computes its state, and gives it to all that may load it."""
        members = action.members
        self._codecs[record.round] = record.codec
        mine = {outcome.stage: self._contribute(outcome, members[outcome.stage], record) for outcome in record.stages}
        for outcome in record.stages:
            generations = members[outcome.stage]
            if not self._crew.is_mine(generations[0].number):
                continue
            replica = self._replicas[generations[0].number]
            shares: list[Contribution] = []
            for place, generation in enumerate(generations):
                hashes, share = mine[outcome.stage].get(place) or self._contributed(
                    outcome.stage, place, generation, record
                )
                shares += [] if share is None else [share]
                if hashes != replica.state.hashes:
                    what = f"it has trained from other parameters than {generations[0].peer}"
                    yield Difference(record.round, outcome.stage, generation.peer, what)
                announced = payload_in(record, outcome.stage, outcome.members[place])
                if share is not None and announced is not None and payload_of(share.parameters_M) != announced:
                    what = f"its pseudo-gradient is encoded as {payload_of(share.parameters_M)}, and not as {announced}"
                    yield Difference(record.round, outcome.stage, generation.peer, what)
            state = replica.state.base
            if shares:
                fragment = replica.state.fragment(record.round)
                average = self._averaged(outcome, shares, replica.state.gradient_size(fragment))
                state = replica.state.successor(state, average, fragment)
            found = state.hashes()
            for name in ("parameters", "momentum", "buffers"):
                due, theirs = getattr(found, name), getattr(outcome.hashes, name)
                if due != theirs:
                    what = f"{name} hash to {due[:16]}, the record says {theirs[:16]}"
                    yield Difference(record.round, outcome.stage, None, what)
            self._keep(outcome.stage, found, state)
            for process in self._hosts[outcome.stage] - {self._crew.process}:
                self._crew.links[process].send((_STATE, record.round, outcome.stage), astuple(found), state)
        for outcome in record.stages:
            owner = self._crew.home(members[outcome.stage][0].number)
            if owner != self._crew.process and self._crew.process in self._hosts[outcome.stage]:
                parcel = self._crew.links[owner].receive((_STATE, record.round, outcome.stage))
                self._keep(outcome.stage, StageHashes(*parcel.note), OuterState(*parcel.tensors))

    def _contribute(
        self, outcome: StageOutcome, generations: Sequence[Generation], record: Record
    ) -> dict[int, tuple[StageHashes, Contribution | None]]:
        """What members of this process bring to an average, by place; it is sent where it is computed."""
        found: dict[int, tuple[StageHashes, Contribution | None]] = {}
        scales = outcome.scales or [1.0] * len(generations)
        for place, (generation, scale) in enumerate(zip(generations, scales, strict=True)):
            if not self._crew.is_mine(generation.number):
                continue
            replica = self._replicas[generation.number]
            state = replica.state
            fragment = state.fragment(record.round)
            weights = self._weights(outcome, state.gradient_size(fragment))
            weight, total = weights[place], sum(weights)
            _, payload = state.brought(fragment)  # as at its join: one that is not finite costs it its moments
            share: Contribution | None = None
            announced = payload_in(record, outcome.stage, outcome.members[place])
            if announced is not None:
                replica.counted[record.round, outcome.hashes] = announced
            if total and not self._codec.is_elementwise:
                payload_P = state.encoded if payload is not None and weight else torch.empty(0, dtype=torch.uint8)
                share = Contribution(payload_P, *state.buffers(weight, total, fragment))
            elif total:
                share = state.contribution(weight, total, scale=scale, fragment=fragment)
            if self._crew.is_mine(generations[0].number):
                found[place] = state.hashes, share
            else:
                link = self._crew.links[self._crew.home(generations[0].number)]
                link.send((_SHARE, record.round, outcome.stage, place), astuple(state.hashes), share or ())
        return found

    def _weights(self, outcome: StageOutcome, num_elements: int) -> Sequence[int]:
        """What the members count where so many parameters are averaged."""
        if self._codec.is_elementwise:
            return outcome.weights
        return gathered_weights(outcome.weights, outcome.payloads, self._codec, num_elements)

    def _averaged(self, outcome: StageOutcome, shares: Sequence[Contribution], num_elements: int) -> Contribution:
        """What the members' shares come to; of gathered ones `parameters_M` is what they have encoded."""
        if self._codec.is_elementwise:
            for of_members in zip(*(ring_vectors(share, self._codec) for share in shares), strict=True):
                reduce_in_turn(of_members)
            return shares[0]
        for of_members in zip(*(buffer_vectors(share.floats_F, share.integers_I) for share in shares), strict=True):
            reduce_in_turn(of_members)
        weights, payloads = self._weights(outcome, num_elements), [share.parameters_M for share in shares]
        brought = brought_by(outcome.members, weights, outcome.scales, payloads)
        brought = [one for one in brought if one.payload_P.numel()]  # who has none here is named already
        over_senders = self._config.diloco.averages_senders
        average_M = gathered_average(self._codec, brought, num_elements, over_senders=over_senders)
        return shares[0]._replace(parameters_M=average_M)

    def _contributed(
        self, stage: int, place: int, generation: Generation, record: Record
    ) -> tuple[StageHashes, Contribution | None]:
        """The same of a member of another process."""
        parcel = self._crew.links[self._crew.home(generation.number)].receive((_SHARE, record.round, stage, place))
        return StageHashes(*parcel.note), Contribution(*parcel.tensors) if parcel.tensors else None

    def _keep(self, stage: int, hashes: StageHashes, state: OuterState) -> None:
        """Keep a new state, and of the older ones those that somebody will load."""
        states, loads = self._states[stage], self._loads[stage]
        self._states[stage] = {known: held for known, held in states.items() if loads[known] > 0} | {hashes: state}


def _loads_of(generations: Sequence[Generation]) -> Mapping[int, defaultdict[StageHashes, int]]:
    """How often each state of a stage will be loaded."""
    found: defaultdict[int, defaultdict[StageHashes, int]] = defaultdict(lambda: defaultdict(int))
    for generation in generations:
        for event in generation.events:
            if isinstance(event, Loaded):
                found[generation.stage][event.hashes] += 1
    return found


def _snapshot_name(heir: int, boundary: Boundary) -> Name:
    """Of a parcel with a snapshot, for the generation that goes on from it."""
    return (_SNAPSHOT, heir, boundary.generation, boundary.round, boundary.commits)


def _as_logged(totals: StepTotals) -> tuple[float | None, float | None]:
    """What a log says of them."""
    norm, loss = totals.squared_norm, totals.loss
    return (norm if math.isfinite(norm) else None, loss if loss is not None and math.isfinite(loss) else None)


def _device_here(device: str) -> str:
    """Where a replica of that device is computed again."""
    return "cuda:0" if device != "cpu" and torch.cuda.is_available() else "cpu"
