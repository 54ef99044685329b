"""R pipelines train exactly what a plain DiLoCo of R workers trains: bit for bit, after three rounds."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import anyio
import pytest
import torch
from tests.families import gpt, resnet, resnet18
from tests.leading import finish_round, lead
from tests.reference.diloco import Batch, Coding, PlainDiloco, coded_by, flat, num_targets
from tests.threads import one_thread as one_thread

from shoal.averaging.contents import Contents
from shoal.averaging.coordinator import RoundCoordinator, RoundOutcome
from shoal.averaging.member import RoundMember
from shoal.averaging.payloads_ahead import PayloadsAhead
from shoal.averaging.replica_state import ReplicaState
from shoal.averaging.round_average import RingSettings
from shoal.averaging.signing import Signer, unsealer
from shoal.averaging.state_donor import StateDonor
from shoal.averaging.state_source import StateSource
from shoal.averaging.state_sync import StateSync
from shoal.clock import SystemClock
from shoal.codec.cast import BF16, FP16
from shoal.codec.plain import PLAIN
from shoal.codec.raw import to_wire
from shoal.codec.registry import CodecSettings, codec_of
from shoal.config.diloco import InnerOptimConfig
from shoal.data.fields import Fields
from shoal.data.microbatch import Microbatch
from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.model.stage import Family, build_stage
from shoal.optim.inner import InnerOptimizer
from shoal.optim.merge import Merge
from shoal.optim.outer import OuterSgd
from shoal.pipeline.driver import StepDriver
from shoal.pipeline.stage_compute import StageCompute
from shoal.pipeline.stage_worker import RoundCuts, StageWorker, StepLimits
from shoal.runtime.device_thread import DeviceThread
from shoal.swarm.content_transfer import TransferSettings
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.swarm.round_settings import RoundSettings
from shoal.swarm.step_operations import Schedule
from shoal.swarm.view import Replica as SeenReplica
from shoal.swarm.view import SwarmView
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import SampleRange
from shoal.wire.messages.base import ReplicaRef

SEED = 7
GENESIS = "D0"
MAX_NORM = 0.5
LR = 3e-3
OUTER = OuterSgd(lr=0.7, momentum=0.9, nesterov=True)


def text_batch(generator: torch.Generator, sizes: Sequence[int]) -> Batch:
    return [
        (torch.randint(32, (n, 8), generator=generator), torch.randint(32, (n, 8), generator=generator)) for n in sizes
    ]


def masked_batch(generator: torch.Generator, sizes: Sequence[int]) -> Batch:
    """Each sample has its own number of targets, from one to all eight."""
    batch = text_batch(generator, sizes)
    for _, labels in batch:
        for sample in labels:
            sample[int(torch.randint(1, 9, (), generator=generator)) :] = -100
    return batch


def image_batch(generator: torch.Generator, sizes: Sequence[int]) -> Batch:
    return [(torch.randn(n, 1, 8, 8, generator=generator), torch.randint(4, (n,), generator=generator)) for n in sizes]


class Inner(NamedTuple):
    """The inner optimizer, and whether it begins anew with every round."""

    type: Literal["adam", "muon"] = "adam"
    resets: bool = False


ADAM = Inner()


@dataclass
class Replica:
    stage: int
    endpoint: MemoryEndpoint
    compute: StageCompute
    worker: StageWorker
    member: RoundMember


@dataclass
class Swarm:
    """`replicas[stage][slot]`, a step driver for each slot, and the client."""

    replicas: list[list[Replica]]
    drivers: list[StepDriver]
    coordinator: RoundCoordinator

    async def train(self, slot: int, round: int, number: int, batch: Batch) -> None:
        result = await self.drivers[slot].train(
            round=round,
            number=number,
            microbatches=[Microbatch(Fields(to_wire(x), to_wire(y)), len(y)) for x, y in batch],
            samples=(SampleRange(slot, number * 100, number * 100 + sum(len(y) for _, y in batch)),),
            lr=LR,
            path=tuple(stage[slot].endpoint.hop for stage in self.replicas),
            replicas=tuple(tuple(ReplicaRef(replica.endpoint.hop) for replica in stage) for stage in self.replicas),
            note=lambda _key, _path: None,
            base=self.coordinator.record_hash,
        )
        assert result.committed
        assert result.attempts == 1

    async def round(self, round: int, first_number: int, batches: Sequence[Sequence[Batch]]) -> RoundOutcome:
        async def train_slot(slot: int) -> None:
            for index, batch in enumerate(batches[slot]):
                await self.train(slot, round, first_number + index, batch)

        async with anyio.create_task_group() as tasks:
            for slot in range(len(batches)):
                tasks.start_soon(train_slot, slot)
        slots = {replica.endpoint.peer_id: slot for stage in self.replicas for slot, replica in enumerate(stage)}
        self.coordinator.close_round(round, slots)
        return await finish_round(self.coordinator, round)


async def _no_journal(*_: object) -> None:
    """Nobody will read it."""


@asynccontextmanager
async def make_swarm(
    family: Family,
    num_stages: int,
    num_slots: int,
    ring: RingSettings,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    activation_checkpointing: bool = False,
    inner: Inner = ADAM,
    cuts: CutRule = EVERY_STEP,
    merge: Merge | None = None,
) -> AsyncIterator[Swarm]:
    network = MemoryNetwork(seed=0)
    clock = SystemClock()
    client = Identity.generate()
    # Random generators belong to the process, so all replicas of the test share one device thread.
    async with DeviceThread(lambda: torch.set_num_threads(1)) as device, anyio.create_task_group() as tasks:
        replicas: list[list[Replica]] = [[] for _ in range(num_stages)]
        for stage in range(num_stages):
            for slot in range(num_slots):
                module = build_stage(family, stage, num_stages, seed=SEED)
                optimizer = InnerOptimizer(module.named_parameters(), InnerOptimConfig(type=inner.type))
                compute = StageCompute(
                    module,
                    optimizer,
                    run_seed=SEED,
                    stage=stage,
                    schedule=schedule,
                    activation_checkpointing=activation_checkpointing,
                )
                # Names against the slots: the order of the ring is that of the slots, not that of the peer ids.
                endpoint = network.endpoint(PeerId(f"R{stage}.{9 - slot}"))
                worker = StageWorker(
                    endpoint=endpoint,
                    compute=compute,
                    device=device,
                    num_stages=num_stages,
                    limits=StepLimits(open_steps=4),
                    cuts=RoundCuts(
                        cuts,
                        lambda round, num_targets, number=(stage, slot): replicas[number[0]][number[1]].member.cut(
                            round, num_targets
                        ),
                    ),
                )
                contents = Contents(endpoint, clock)
                state = ReplicaState(
                    compute,
                    OUTER,
                    ring.codec,
                    resets_inner=inner.resets,
                    num_fragments=cuts.num_fragments,
                    merge=merge,
                )
                ahead = PayloadsAhead(
                    contents,
                    stage,
                    view=lambda stage=stage: SwarmView(
                        replicas=tuple(SeenReplica(r.endpoint.hop, 0.0, stage=stage) for r in replicas[stage])
                    ),
                    base=lambda stage=stage, slot=slot: replicas[stage][slot].member.base,
                    limit_bytes=lambda _round: 1 << 20,
                )
                sync = StateSync(contents, stage, view=SwarmView, settings=TransferSettings())
                source = StateSource(sync, StateDonor(contents, stage))
                member = RoundMember(
                    endpoint=endpoint,
                    unseal=unsealer("test", client.peer_id),
                    genesis=GENESIS,
                    stage=stage,
                    steps=worker,
                    state=state,
                    device=device,
                    source=source,
                    ring=ring,
                    ahead=None if merge is None else ahead,
                )
                worker.start_round(1, GENESIS)
                tasks.start_soon(worker.run)
                tasks.start_soon(member.run)
                tasks.start_soon(contents.run)
                tasks.start_soon(dispatch, endpoint, [contents, worker, member])
                replicas[stage].append(Replica(stage, endpoint, compute, worker, member))
        drivers: list[StepDriver] = []
        for slot in range(num_slots):
            endpoint = network.endpoint(PeerId(f"T{slot}"))
            driver = StepDriver(
                endpoint=endpoint,
                trainer=slot,
                generation=1,
                window=num_stages + 1,
                max_grad_norm=MAX_NORM,
                clock=clock,
                step_timeout_s=30.0,
            )
            tasks.start_soon(dispatch, endpoint, [driver])
            drivers.append(driver)
        endpoint = network.endpoint(client.peer_id)
        coordinator = RoundCoordinator(
            endpoint=endpoint,
            signer=Signer(client, client, "test"),
            generation=1,
            settings=RoundSettings("test", num_stages, GENESIS, cuts=cuts),
            clock=clock,
            journal=_no_journal,
        )
        tasks.start_soon(dispatch, endpoint, [coordinator])
        tasks.start_soon(coordinator.run)
        coordinator.replicas({r.endpoint.peer_id: r.endpoint.hop for stage in replicas for r in stage})
        leading = await lead(coordinator)
        assert leading.tip.round == 0
        yield Swarm(replicas, drivers, coordinator)
        tasks.cancel_scope.cancel()


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


# Sizes of the microbatches of each step, for each slot: equal work, a short last batch and a step less, nothing at all.
EQUAL = [[[3, 2], [3, 2]]] * 3
UNEQUAL = [[[3, 2], [3, 2], [2]], [[3, 2]], [[1], [3, 1]]]
IDLE = [[[3, 2]], [], [[2, 2], [1]]]

MODELS = {
    "gpt": (gpt(), text_batch),
    "masked": (gpt(), masked_batch),
    "resnet": (resnet(), image_batch),
    "resnet18": (resnet18(), image_batch),
}
SEGMENT_BYTES = {"resnet": 1 << 15, "resnet18": 1 << 20}
"""Of models that are not as small as the others."""
CODEC_OF = {None: PLAIN, torch.bfloat16: BF16, torch.float16: FP16}


@pytest.mark.usual(
    "gpt-2-2-work0-None-1f1b-inner0",
    "gpt-2-3-work6-wire6-1f1b-inner6",
    "gpt-3-2-work8-None-zero_bubble-inner8",
    "masked-2-3-work9-None-1f1b-inner9",
)
@pytest.mark.parametrize(
    ("model", "num_stages", "num_slots", "work", "wire", "schedule", "inner"),
    [
        ("gpt", 2, 2, EQUAL, None, Schedule.ONE_F_ONE_B, ADAM),
        ("gpt", 2, 3, EQUAL, None, Schedule.ONE_F_ONE_B, ADAM),
        ("gpt", 3, 2, UNEQUAL, None, Schedule.ONE_F_ONE_B, ADAM),
        ("gpt", 2, 3, UNEQUAL, None, Schedule.ONE_F_ONE_B, Inner("muon")),
        ("gpt", 1, 3, IDLE, None, Schedule.ONE_F_ONE_B, ADAM),
        ("gpt", 2, 1, EQUAL, None, Schedule.ONE_F_ONE_B, ADAM),
        ("gpt", 2, 3, UNEQUAL, torch.float16, Schedule.ONE_F_ONE_B, ADAM),
        ("resnet18", 2, 2, UNEQUAL, None, Schedule.ONE_F_ONE_B, ADAM),
        ("gpt", 3, 2, UNEQUAL, None, Schedule.ZERO_BUBBLE, Inner("muon", resets=True)),
        ("masked", 2, 3, UNEQUAL, None, Schedule.ONE_F_ONE_B, Inner(resets=True)),
        ("resnet", 2, 3, IDLE, None, Schedule.ONE_F_ONE_B, ADAM),
        ("resnet", 2, 3, UNEQUAL, torch.bfloat16, Schedule.ONE_F_ONE_B, ADAM),
    ],
)
async def test_pipelines_are_bit_equal_to_plain_diloco(
    model: str,
    num_stages: int,
    num_slots: int,
    work: Sequence[Sequence[Sequence[int]]],
    wire: torch.dtype | None,
    schedule: Schedule,
    inner: Inner,
) -> None:
    await check_bits(model, num_stages, num_slots, work, wire, schedule, inner)


@pytest.mark.usual("gpt-1-3-work1-None-inner1-4")
@pytest.mark.parametrize(
    ("model", "num_stages", "num_slots", "work", "wire", "inner", "fragments"),
    [
        ("gpt", 1, 2, UNEQUAL, None, ADAM, 2),
        ("gpt", 1, 3, IDLE, None, ADAM, 4),
        ("masked", 2, 3, UNEQUAL, torch.bfloat16, Inner("muon"), 2),
        ("resnet", 2, 2, UNEQUAL, None, ADAM, 2),
        ("resnet", 2, 3, IDLE, torch.float16, Inner(resets=True), 4),
    ],
)
async def test_rounds_of_a_fragment_are_bit_equal_to_plain_diloco(
    model: str,
    num_stages: int,
    num_slots: int,
    work: Sequence[Sequence[Sequence[int]]],
    wire: torch.dtype | None,
    inner: Inner,
    fragments: int,
) -> None:
    await check_bits(model, num_stages, num_slots, work, wire, Schedule.ONE_F_ONE_B, inner, CutRule(fragments))


@pytest.mark.parametrize(
    ("model", "num_stages", "work", "codec", "cuts", "merge"),
    [
        ("gpt", 2, UNEQUAL, "int8", CutRule(1, cut_after=2), Merge.CARRY),
        ("gpt", 1, UNEQUAL, "2bit", CutRule(2, cut_after=1, last_round=6), Merge.MEAN),
        ("masked", 2, EQUAL, "sparse", CutRule(1, cut_after=1, last_round=3), Merge.CARRY),
    ],
)
async def test_rounds_that_overlap_with_steps_are_bit_equal_to_plain_diloco(
    model: str, num_stages: int, work: Sequence[Sequence[Sequence[int]]], codec: str, cuts: CutRule, merge: Merge
) -> None:
    feedback = 0.0 if codec == "int8" else 0.95
    coding = Coding(coded_by(codec), feedback, over_senders=codec == "sparse")
    ring = RingSettings(256, codec=codec_of(CodecSettings(codec, feedback)), over_senders=codec == "sparse")
    await check_bits(model, num_stages, 3, work, None, Schedule.ONE_F_ONE_B, ADAM, cuts, merge, ring, coding)


async def check_bits(
    model: str,
    num_stages: int,
    num_slots: int,
    work: Sequence[Sequence[Sequence[int]]],
    wire: torch.dtype | None,
    schedule: Schedule,
    inner: Inner,
    cuts: CutRule = EVERY_STEP,
    merge: Merge | None = None,
    ring: RingSettings | None = None,
    coding: Coding | None = None,
) -> None:
    """Train both, and compare all that there is after each round."""
    family, make_batch = MODELS[model]
    fragments = cuts.num_fragments
    ring = ring or RingSettings(segment_bytes=SEGMENT_BYTES.get(model, 256), codec=CODEC_OF[wire])
    generator = torch.Generator().manual_seed(1)
    plain = PlainDiloco(
        family,
        num_stages,
        num_slots,
        seed=SEED,
        max_norm=MAX_NORM,
        outer_lr=OUTER.lr,
        outer_momentum=OUTER.momentum,
        wire=wire,
        muon=inner.type == "muon",
        resets=inner.resets,
        fragments=fragments,
        coding=coding,
        cut_after=cuts.cut_after,
        last_round=cuts.last_round,
        carries=merge is not Merge.MEAN,
    )
    # What each slot has trained in the rounds that a fragment has waited for.
    waiting: list[list[int]] = []
    # Whatever puts gradients off may as well compute activations again.
    checkpoints = schedule == Schedule.ZERO_BUBBLE
    async with make_swarm(family, num_stages, num_slots, ring, schedule, checkpoints, inner, cuts, merge) as swarm:
        for round in range(1, (3 if fragments == 1 else 2 * fragments + 2) + 1):
            batches = [[make_batch(generator, sizes) for sizes in work[slot]] for slot in range(num_slots)]
            plain.round(batches, first_number=10 * round, lr=LR)
            outcome = await swarm.round(round, 10 * round, batches)
            waiting.append([sum(num_targets(labels) for batch in own for _, labels in batch) for own in batches])
            weights = tuple(map(sum, zip(*waiting[-fragments:], strict=True)))
            for stage, expected in enumerate(plain.outer):
                named = outcome.record.stages[stage]
                assert named.hashes.parameters == sha(expected.outer)
                assert named.hashes.momentum == sha(expected.momentum)
                assert named.weights == expected.weights
                assert named.weights == weights or merge is not None
                assert named.steps_lost == 0
                for slot, replica in enumerate(swarm.replicas[stage]):
                    assert replica.member.base_round == round
                    assert replica.member.hashes == named.hashes
                    reference = plain.workers[slot].stages[stage]
                    local = replica.compute.averaged.parameters.flat()
                    assert torch.equal(local, flat(reference.parameters()))
                    assert torch.equal(local, expected.outer) or cuts.keeps_own
                    if inner == ADAM:
                        assert_same_moments(replica.compute, plain.workers[slot].optimizers[stage][0])
                    for (name, want), (_, got) in zip(
                        reference.named_buffers(), replica.compute.module.named_buffers(), strict=True
                    ):
                        assert torch.equal(want, got), name
            samples = sum(item.stop - item.start for item in outcome.record.samples)
            assert samples == sum(sum(sizes) for slot in range(num_slots) for sizes in work[slot])
        assert not torch.equal(flat(build_stage(family, 0, num_stages, seed=SEED).parameters()), plain.outer[0].outer)


def assert_same_moments(compute: StageCompute, plain: torch.optim.Optimizer) -> None:
    parameters = [p for group in plain.param_groups for p in group["params"]]
    theirs = {id(p): plain.state[p] for p in parameters}
    assert sum("exp_avg" in state for state in theirs.values()) == len(compute.optimizer.state)
    mine = sorted(state["exp_avg"].double().sum().item() for state in compute.optimizer.state.values())
    assert mine == sorted(state["exp_avg"].double().sum().item() for state in theirs.values() if state)
