"""Carries the actions of a replay out, with the code that the servers ran: stage, optimizer, averages, outer step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from shoal.averaging.replica_state import OuterState, ReplicaState
from shoal.averaging.round_average import ring_vectors
from shoal.codec.cast import CASTS
from shoal.collective.sequential import reduce_in_turn
from shoal.config.schema import Config
from shoal.ids import StepKey
from shoal.optim.schedule import LrSchedule
from shoal.pipeline.device_operations import operate
from shoal.pipeline.replica_log import Applied, Loaded
from shoal.pipeline.stage_compute import StageCompute
from shoal.replay.lives import Boundary, Life
from shoal.replay.order import Action, Apply, Average, Begin, Compute, End, Keep, Load, Resume
from shoal.replay.samples import Samples
from shoal.replay.verdict import Difference
from shoal.server.replica import build_state
from shoal.swarm.step_operations import (
    Decision,
    Operation,
    OperationKind,
    Schedule,
    StepTotals,
    decision_of,
    gradient_norm,
)
from shoal.wire.messages.round import Record, StageHashes
from shoal.wire.tensors import WireTensor


@dataclass(slots=True)
class _Replica:
    """A life that is under way.

    Attributes:
        life: Which one.
        compute: Its module and optimizer.
        state: Its outer state.
        computed: Of steps that it will commit: what its gradients come to, and what the trainer makes of all stages'.
    """

    life: Life
    compute: StageCompute
    state: ReplicaState
    computed: dict[StepKey, tuple[StepTotals, Decision]] = field(
        default_factory=dict[StepKey, "tuple[StepTotals, Decision]"]
    )


class Engine:
    """The replicas of the round at hand, and the states that may still be loaded.

    Steps run one microbatch at a time through all stages and back, whatever the schedule of the run was, and keep their
    activations: neither changes a bit, and this takes the least memory and time.

    Args:
        config: Of the run.
        samples: Its data set.
        lives: All of the run.
    """

    def __init__(self, config: Config, samples: Samples, lives: tuple[Life, ...]) -> None:
        pipeline = {"schedule": Schedule.ONE_F_ONE_B.value, "activation_checkpointing": False}
        self._config = config.model_copy(update={"model_pipeline": config.model_pipeline.model_copy(update=pipeline)})
        self._samples = samples
        self._schedule = LrSchedule.from_config(config.diloco)
        self._replicas: dict[int, _Replica] = {}
        self._states: defaultdict[int, dict[StageHashes, OuterState]] = defaultdict(dict)
        self._loads = _loads_of(lives)
        self._kept: dict[Boundary, torch.Tensor] = {}

    def act(self, action: Action) -> Iterator[Difference]:
        """Carry an action out; yields what is not as the logs say.

        Raises:
            ShoalError: It cannot be carried out here at all.
        """
        match action:
            case Begin(life):
                self._begin(life)
            case Load(life, loaded):
                yield from self._load(life, loaded)
            case Keep(life, boundary):
                self._kept[boundary] = self._replicas[life.number].compute.snapshot()
            case Resume(life, origin):
                self._replicas[life.number].compute.start_round(self._kept.pop(origin), origin.commits)
            case Compute():
                self._compute(action)
            case Apply(round, life, applied):
                yield from self._apply(round, life, applied)
            case Average(record):
                yield from self._average(action, record)
            case End(life):
                del self._replicas[life.number]

    # ---- lives

    def _begin(self, life: Life) -> None:
        torch.set_num_threads(life.place.num_threads)
        compute, state = build_state(self._config, life.stage, _device_here(life.place.device))
        self._replicas[life.number] = _Replica(life, compute, state)
        self._states[life.stage].setdefault(state.hashes, state.held)

    def _load(self, life: Life, loaded: Loaded) -> Iterator[Difference]:
        replica, states = self._replicas[life.number], self._states[life.stage]
        state = states.get(loaded.hashes)
        if state is None:
            source = f"as those of record {loaded.round}, which no round has led to"
            if loaded.round == 0:
                source = "from the seed, which leads to other ones here"
            what = f"it began with parameters {loaded.hashes.parameters[:16]} {source}"
            yield Difference(loaded.round, life.stage, life.peer, what)
            return
        replica.state.gradient_norm()  # as at the join before, where it was left out of the record
        replica.state.stage_fetched(state, loaded.hashes)
        replica.state.swap(loaded.hashes)
        replica.compute.start_round()
        replica.computed.clear()
        loads = self._loads[life.stage]
        loads[loaded.hashes] -= 1

    # ---- steps

    def _compute(self, action: Compute) -> None:
        began, key = action.began, action.began.key
        replicas = [self._replicas[life.number] for life in action.lives]
        sizes = began.microbatch_samples
        for microbatch, (inputs, labels) in enumerate(self._samples.microbatches(began.samples, sizes)):
            received = inputs
            for replica in replicas[:-1]:
                forward = Operation(OperationKind.FORWARD, key, microbatch)
                received = self._operate(replica, forward, [received], sizes)
            loss = Operation(OperationKind.LOSS, key, microbatch)
            gradient = self._operate(replicas[-1], loss, [received, labels], sizes)
            for replica in reversed(replicas[:-1]):
                backward = Operation(OperationKind.BACKWARD, key, microbatch)
                gradient = self._operate(replica, backward, [gradient], sizes)
        totals = [replica.compute.totals(key) for replica in replicas]
        norm = gradient_norm(one.squared_norm for one in totals)
        is_finite = all(one.finite for one in totals)
        lr, most = self._schedule.lr(key.number), self._config.diloco.max_grad_norm
        decision = decision_of(norm, is_finite, lr, most)
        for replica, one, keeps in zip(replicas, totals, action.keeps, strict=True):
            if keeps:
                replica.computed[key] = one, decision
            else:
                replica.compute.drop(key)

    def _operate(
        self, replica: _Replica, operation: Operation, inputs: list[WireTensor | None], sizes: tuple[int, ...]
    ) -> WireTensor | None:
        """Compute one operation; no input is None, since only the ends of a path give nothing to a neighbour."""
        if torch.get_num_threads() != replica.life.place.num_threads:
            torch.set_num_threads(replica.life.place.num_threads)
        return operate(replica.compute, operation, [tensor for tensor in inputs if tensor is not None], sizes)

    def _apply(self, round: int, life: Life, applied: Applied) -> Iterator[Difference]:
        replica, key = self._replicas[life.number], applied.key
        found, wanted = replica.computed.pop(key)
        logged = (applied.squared_norm, applied.loss)
        if logged != _as_logged(found):
            what = f"step {key}: squared gradient norm and loss {_as_logged(found)}, its log says {logged}"
            yield Difference(round, life.stage, life.peer, what)
        decision = Decision(applied.scale, applied.lr, applied.skipped)
        if decision != wanted:
            what = f"step {key}: committed with {decision}, its gradients make it {wanted}"
            yield Difference(round, life.stage, life.peer, what)
        self._operate(replica, Operation(OperationKind.COMMIT, key, decision=decision), [], ())

    # ---- rounds

    def _average(self, action: Average, record: Record) -> Iterator[Difference]:
        for outcome in record.stages:
            members = [self._replicas[life.number] for life in action.members[outcome.stage]]
            base = members[0].state.held
            for replica in members[1:]:
                if replica.state.hashes != members[0].state.hashes:
                    what = f"it has trained from other parameters than {members[0].life.peer}"
                    yield Difference(record.round, outcome.stage, replica.life.peer, what)
            state, total = base, sum(outcome.weights)
            for replica in members:
                replica.state.gradient_norm()  # as at its join: one that is not finite costs it its moments
            if total:
                wire = CASTS[self._config.diloco.averaging_compression]
                scales = outcome.scales or [1.0] * len(members)
                shares = [
                    replica.state.contribution(weight, total, scale=scale)
                    for replica, weight, scale in zip(members, outcome.weights, scales, strict=True)
                ]
                vectors = zip(*(ring_vectors(share, wire) for share in shares), strict=True)
                for of_members in vectors:
                    reduce_in_turn(of_members)
                state = members[0].state.successor(base, shares[0])
            found = state.hashes()
            for name in ("parameters", "momentum", "buffers"):
                mine, theirs = getattr(found, name), getattr(outcome.hashes, name)
                if mine != theirs:
                    what = f"{name} hash to {mine[:16]}, the record says {theirs[:16]}"
                    yield Difference(record.round, outcome.stage, None, what)
            self._keep(outcome.stage, found, state)

    def _keep(self, stage: int, hashes: StageHashes, state: OuterState) -> None:
        """Keep a new state, and of the older ones those that somebody will load."""
        states, loads = self._states[stage], self._loads[stage]
        self._states[stage] = {known: held for known, held in states.items() if loads[known] > 0} | {hashes: state}


def _loads_of(lives: tuple[Life, ...]) -> Mapping[int, defaultdict[StageHashes, int]]:
    """How often each state of a stage will be loaded."""
    found: defaultdict[int, defaultdict[StageHashes, int]] = defaultdict(lambda: defaultdict(int))
    for life in lives:
        for event in life.events:
            if isinstance(event, Loaded):
                found[life.stage][event.hashes] += 1
    return found


def _as_logged(totals: StepTotals) -> tuple[float | None, float | None]:
    """What a log says of them."""
    norm, loss = totals.squared_norm, totals.loss
    return (norm if math.isfinite(norm) else None, loss if loss is not None and math.isfinite(loss) else None)


def _device_here(device: str) -> str:
    """Where a replica of that device is computed again."""
    return "cuda:0" if device != "cpu" and torch.cuda.is_available() else "cpu"
