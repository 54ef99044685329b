"""A pipeline trains exactly what a plain loop trains: bit for bit, and against an uncut model in float64 to 1e-9."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.families import gpt, resnet, resnet18, tied_gpt
from torch import Tensor, nn

from shoal.codec.raw import to_wire
from shoal.config.diloco import InnerOptimConfig
from shoal.data.fields import Fields
from shoal.data.microbatch import Microbatch
from shoal.model.stage import Family, StageModule, build_stage
from shoal.optim.loss_scale import LossScale
from shoal.optim.schedule import LrSchedule
from shoal.swarm import flight_window
from shoal.swarm.step_operations import OperationKind, Schedule
from shoal.trainer.baseline import PlainLoop

SEED = 7
NUM_STEPS = 20
MakeSwarm = Callable[..., Any]
Batch = Sequence[tuple[Tensor, Tensor]]


def text_batches(sizes: Sequence[int]) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        [
            (torch.randint(32, (n, 8), generator=generator), torch.randint(32, (n, 8), generator=generator))
            for n in sizes
        ]
        for _ in range(NUM_STEPS)
    ]


def image_batches(sizes: Sequence[int]) -> list[Batch]:
    generator = torch.Generator().manual_seed(2)
    return [
        [(torch.randn(n, 1, 8, 8, generator=generator), torch.randint(4, (n,), generator=generator)) for n in sizes]
        for _ in range(NUM_STEPS)
    ]


CASES = {
    # Two accumulated batches of 5 in two microbatches each: unequal microbatches, one of a single sample.
    "gpt": (lambda: gpt(0.1), lambda: text_batches((3, 2, 3, 1))),
    # The first stage has the head as well.
    "tied": (lambda: tied_gpt(0.1), lambda: text_batches((3, 2, 3, 1))),
    # Chunks of the loss go over the borders of samples.
    "chunks": (lambda: gpt(0.1, loss_chunk=5), lambda: text_batches((3, 2, 3, 1))),
    "tied-chunks": (lambda: tied_gpt(0.0, loss_chunk=5), lambda: text_batches((3, 2, 3, 1))),
    "resnet": (resnet, lambda: image_batches((3, 2, 3))),
    # Most of what can differ does so in the first steps.
    "resnet18": (resnet18, lambda: image_batches((3, 2, 3))[:5]),
}
SIZES = (("gpt", 3, 6), ("tied", 3, 6), ("chunks", 3, 3), ("tied-chunks", 3, 3), ("resnet", 3, 3), ("gpt", 1, 6))
"""Case, number of stages, number of steps."""
SCHEDULE = LrSchedule("cosine", 3e-3, warmup_steps=5, total_steps=NUM_STEPS, min_lr_ratio=0.1)


@pytest.mark.usual("gpt-2", "tied-2", "chunks-2", "resnet-2")
@pytest.mark.parametrize(
    ("case", "num_stages"),
    [
        ("gpt", 1),
        ("gpt", 2),
        ("gpt", 3),
        ("tied", 2),
        ("tied", 3),
        ("chunks", 1),
        ("chunks", 2),
        ("tied-chunks", 3),
        ("resnet", 2),
        ("resnet", 3),
        pytest.param("resnet18", 3, marks=pytest.mark.slow),
    ],
)
async def test_a_pipeline_is_bit_equal_to_a_plain_loop(make_swarm: MakeSwarm, case: str, num_stages: int) -> None:
    family, batches = CASES[case][0](), CASES[case][1]()
    plain = PlainLoop(
        [build_stage(family, s, num_stages, seed=SEED) for s in range(num_stages)], InnerOptimConfig(), 0.5, SEED, 0
    )
    clipped = 0
    async with make_swarm(family, num_stages, seed=SEED, max_grad_norm=0.5) as swarm:
        for number, batch in enumerate(batches):
            result = await swarm.train(batch, number, SCHEDULE.lr(number))
            loss, norm = plain.step(batch, number, SCHEDULE.lr(number))
            clipped += norm > 0.5
            assert (result.loss, result.grad_norm) == (loss, norm)
            assert result.committed
            assert result.attempts == 1
        assert clipped > 0
        for stage, [replica] in zip(plain.stages, swarm.replicas, strict=True):
            assert_same_state(stage, replica.compute.module)
            assert len(replica.worker.log) == len(batches)
            assert [entry.version for entry in replica.worker.log] == list(range(len(batches)))


@pytest.mark.usual(
    "gpt-3-6-gpipe-True",
    "gpt-3-6-1f1b-False",
    "gpt-3-6-zero_bubble-True",
    "tied-3-6-gpipe-False",
    "tied-3-6-1f1b-True",
    "tied-3-6-zero_bubble-False",
    "chunks-3-3-zero_bubble-True",
)
@pytest.mark.parametrize(
    ("case", "num_stages", "num_steps", "schedule", "activation_checkpointing"),
    [
        # Each model with each schedule and both ways, each schedule both ways.
        (*model, schedule, (number + place) % 2 == 0)
        for number, model in enumerate(SIZES)
        for place, schedule in enumerate(Schedule)
    ],
)
async def test_every_schedule_trains_the_same_bits(
    make_swarm: MakeSwarm,
    case: str,
    num_stages: int,
    num_steps: int,
    schedule: Schedule,
    activation_checkpointing: bool,
) -> None:
    family, batches = CASES[case][0](), CASES[case][1]()[:num_steps]
    plain = PlainLoop(
        [build_stage(family, s, num_stages, seed=SEED) for s in range(num_stages)], InnerOptimConfig(), 0.5, SEED, 0
    )
    clipped = 0
    async with make_swarm(
        family,
        num_stages,
        seed=SEED,
        max_grad_norm=0.5,
        schedule=schedule,
        activation_checkpointing=activation_checkpointing,
    ) as swarm:
        for number, batch in enumerate(batches):
            result = await swarm.train(batch, number, SCHEDULE.lr(number))
            loss, norm = plain.step(batch, number, SCHEDULE.lr(number))
            clipped += norm > 0.5
            assert (result.loss, result.grad_norm, result.attempts) == (loss, norm, 1)
        assert clipped > 0
        for stage, [replica] in zip(plain.stages, swarm.replicas, strict=True):
            assert_same_state(stage, replica.compute.module)
        counts = [replica.endpoint.metrics.counts() for [replica] in swarm.replicas]
    for stage, counted in enumerate(counts):
        busy = {
            kind: counted.get(f"device.busy_us{{kind={kind.name.lower()},stage={stage}}}", 0) for kind in OperationKind
        }
        assert (busy[OperationKind.WEIGHTS] > 0) == (schedule == Schedule.ZERO_BUBBLE)
        assert busy[OperationKind.COMMIT] > 0
        assert sum(busy.values()) <= counted[f"device.open_us{{stage={stage}}}"]


@pytest.mark.usual("tied-3-1f1b-1", "gpt-2-zero_bubble-grows", "resnet-3-1f1b-grows")
@pytest.mark.parametrize("window", [1, 4, "grows"])
@pytest.mark.parametrize(
    ("case", "num_stages", "schedule"),
    [
        ("gpt", 1, Schedule.ONE_F_ONE_B),
        ("gpt", 2, Schedule.ZERO_BUBBLE),
        ("tied", 3, Schedule.ONE_F_ONE_B),
        ("tied-chunks", 3, Schedule.ZERO_BUBBLE),
        ("resnet", 3, Schedule.ONE_F_ONE_B),
    ],
)
async def test_every_window_trains_the_same_bits(
    make_swarm: MakeSwarm,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    num_stages: int,
    schedule: Schedule,
    window: int | str,
) -> None:
    """Also one that grows in the middle of it, as over a long line."""
    monkeypatch.setattr(flight_window, "held", lambda *_: 12)
    family, batches = CASES[case][0](), [[*one, *other] for one, other in pairwise(CASES[case][1]()[:7])]
    plain = PlainLoop(
        [build_stage(family, s, num_stages, seed=SEED) for s in range(num_stages)], InnerOptimConfig(), 0.5, SEED, 0
    )
    flow = {"further": 6} if window == "grows" else {"window": window}
    sizes = set[float]()
    async with make_swarm(family, num_stages, seed=SEED, max_grad_norm=0.5, schedule=schedule, **flow) as swarm:
        for number, batch in enumerate(batches):
            result = await swarm.train(batch, number, SCHEDULE.lr(number))
            sizes.add(swarm.drivers[0]._machine._flight.size)
            expected = plain.step(batch, number, SCHEDULE.lr(number))
            assert (result.loss, result.grad_norm, result.attempts) == (*expected, 1)
        for stage, [replica] in zip(plain.stages, swarm.replicas, strict=True):
            assert_same_state(stage, replica.compute.module)
    assert (len(sizes) > 1) == (window == "grows")


@pytest.mark.usual("gpt-3-1f1b", "tied-chunks-3-zero_bubble")
@pytest.mark.parametrize(
    ("case", "num_stages", "schedule"),
    [
        ("gpt", 1, Schedule.GPIPE),
        ("gpt", 3, Schedule.ONE_F_ONE_B),
        ("tied", 2, Schedule.ZERO_BUBBLE),
        ("chunks", 2, Schedule.GPIPE),
        ("tied-chunks", 3, Schedule.ZERO_BUBBLE),
        ("resnet", 3, Schedule.ONE_F_ONE_B),
    ],
)
async def test_a_loss_that_is_scaled_up_trains_the_same_bits(
    make_swarm: MakeSwarm, case: str, num_stages: int, schedule: Schedule
) -> None:
    """Powers of two round nothing in float32, whatever the place where the scale comes in and goes out again."""
    family, batches = CASES[case][0](), CASES[case][1]()[:4]
    plain = PlainLoop(
        [build_stage(family, s, num_stages, seed=SEED) for s in range(num_stages)], InnerOptimConfig(), 0.5, SEED, 0
    )
    async with make_swarm(family, num_stages, seed=SEED, max_grad_norm=0.5, schedule=schedule) as swarm:
        for number, batch in enumerate(batches):
            result = await swarm.train(batch, number, SCHEDULE.lr(number), loss_scale=2.0 ** (5 * number))
            assert (result.loss, result.grad_norm) == plain.step(batch, number, SCHEDULE.lr(number))
        for stage, [replica] in zip(plain.stages, swarm.replicas, strict=True):
            assert_same_state(stage, replica.compute.module)


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_step_whose_gradient_is_not_finite_in_one_stage_changes_none_and_halves_the_scale(
    make_swarm: MakeSwarm, stage: int
) -> None:
    scale = LossScale(is_needed=True)

    def overflow(gradient: Tensor) -> Tensor:
        return torch.where(gradient == gradient, math.inf, gradient) if scale.value > 2.0**14 else gradient

    def prepare(module: StageModule) -> None:
        if module.stage == stage:
            next(module.parameters()).register_hook(overflow)

    async with make_swarm(gpt(0.0), 2, autocast=torch.float16, prepare=prepare) as swarm:
        modules = [replica.compute.module for [replica] in swarm.replicas]
        before = [[parameter.clone() for parameter in module.parameters()] for module in modules]

        def are_as_before() -> list[bool]:
            return [
                all(map(torch.equal, old, module.parameters())) for old, module in zip(before, modules, strict=True)
            ]

        for number, batch in enumerate(text_batches((3, 2))[:3]):
            result = await swarm.train(batch, number, 0.01, loss_scale=scale.value)
            scale.ended(skipped=result.skipped)
            assert result.skipped == (number < 2)
            assert are_as_before() == [number < 2] * 2
    assert scale.value == 2.0**14


async def test_a_loss_that_float16_cannot_be_scaled_by_is_skipped_until_it_can(make_swarm: MakeSwarm) -> None:
    scale = LossScale(is_needed=True)
    scale.value = 2.0**28
    async with make_swarm(gpt(0.0), 2, autocast=torch.float16) as swarm:
        skipped: list[bool] = []
        for number, batch in enumerate(text_batches((3, 2))):
            result = await swarm.train(batch, number, 0.001, loss_scale=scale.value)
            scale.ended(skipped=result.skipped)
            skipped.append(result.skipped)
    assert skipped == sorted(skipped, reverse=True)
    assert skipped[0]
    assert not skipped[-1]


@pytest.mark.usual("gpt-2-20-bf16", "gpt-2-20-fp16")
@pytest.mark.parametrize(
    ("case", "num_stages", "num_steps", "autocast"),
    [
        pytest.param("gpt", 1, NUM_STEPS, torch.bfloat16, id="gpt-1-20-bf16"),
        pytest.param("gpt", 2, NUM_STEPS, torch.bfloat16, id="gpt-2-20-bf16"),
        pytest.param("gpt", 2, NUM_STEPS, torch.float16, id="gpt-2-20-fp16"),
        pytest.param("tied", 2, NUM_STEPS, torch.bfloat16, id="tied-2-20-bf16"),
        pytest.param("tied", 2, NUM_STEPS, torch.float16, id="tied-2-20-fp16"),
        # Convolutions in float16 take processors a hundred times as long.
        pytest.param("resnet", 1, 3, torch.bfloat16, id="resnet-1-3-bf16"),
        pytest.param("resnet", 2, NUM_STEPS, torch.bfloat16, id="resnet-2-20-bf16"),
    ],
)
async def test_a_pipeline_in_mixed_precision_is_bit_equal_to_a_plain_loop(
    make_swarm: MakeSwarm, case: str, num_stages: int, num_steps: int, autocast: torch.dtype
) -> None:
    family, batches = CASES[case][0](), CASES[case][1]()[:num_steps]
    mixed = {"seed": SEED, "autocast": autocast}
    scale = LossScale(is_needed=autocast == torch.float16)
    stages = [build_stage(family, s, num_stages, **mixed) for s in range(num_stages)]
    plain = PlainLoop(stages, InnerOptimConfig(), 0.5, SEED, 0)
    exact_stages = [build_stage(family, s, num_stages, seed=SEED) for s in range(num_stages)]
    exact = PlainLoop(exact_stages, InnerOptimConfig(), 0.5, SEED, 0)
    async with make_swarm(family, num_stages, max_grad_norm=0.5, **mixed) as swarm:
        holdout = [Microbatch(Fields(to_wire(x), to_wire(y)), len(y)) for x, y in batches[0]]

        async def evaluate(number: int) -> tuple[float, int]:
            return await swarm.drivers[0].evaluate(
                evaluation=number, base_round=number, microbatches=holdout, path=swarm.refs()
            )

        assert await evaluate(0) == plain.evaluate(batches[0])
        for number, batch in enumerate(batches):
            result = await swarm.train(batch, number, SCHEDULE.lr(number), loss_scale=scale.value)
            scale.ended(skipped=result.skipped)
            # The norm of a step that is skipped may be no number.
            expected = pytest.approx(plain.step(batch, number, SCHEDULE.lr(number)), rel=0, abs=0, nan_ok=True)
            assert (result.loss, result.grad_norm) == expected
            in_full, _ = exact.step(batch, number, SCHEDULE.lr(number))
            assert result.loss != in_full
            if number == 0:
                assert result.loss == pytest.approx(in_full, rel=0.1)
        for stage, [replica] in zip(plain.stages, swarm.replicas, strict=True):
            assert_same_state(stage, replica.compute.module)
            assert {p.dtype for p in replica.compute.module.parameters()} == {torch.float32}
            replica.worker.start_round(2)
        assert await evaluate(1) == plain.evaluate(batches[0])


@pytest.mark.usual("gpt-2-20")
@pytest.mark.parametrize(
    ("case", "num_stages", "num_steps"),
    [
        ("gpt", 2, NUM_STEPS),
        ("gpt", 3, NUM_STEPS),
        ("tied", 3, NUM_STEPS),
        ("resnet", 2, NUM_STEPS),
    ],
)
async def test_a_pipeline_agrees_with_an_uncut_model(
    make_swarm: MakeSwarm, case: str, num_stages: int, num_steps: int
) -> None:
    family = {"gpt": gpt, "tied": tied_gpt}[case](0.0) if case != "resnet" else resnet()
    batches = (text_batches((3, 2)) if case != "resnet" else image_batches((8, 8)))[:num_steps]
    # Batch norm over fewer samples amplifies the last bit of a float64 beyond 1e-9 within 20 steps of Adam.
    optim = InnerOptimConfig(adam_weight_decay=0.1)
    model, losses = train_uncut(family, batches, 0.5)
    async with make_swarm(family, num_stages, seed=SEED, max_grad_norm=0.5, dtype=torch.float64, optim=optim) as swarm:
        for number, batch in enumerate(batches):
            result = await swarm.train(batch, number, SCHEDULE.lr(number))
            assert result.loss == pytest.approx(losses[number], abs=1e-9)
        uncut = dict(model.named_parameters()) | dict(model.named_buffers())
        cut: dict[str, Tensor] = {}
        for [replica] in swarm.replicas:
            cut |= dict(replica.compute.module.named_parameters()) | dict(replica.compute.module.named_buffers())
        assert cut.keys() == uncut.keys()
        for name, tensor in uncut.items():
            assert (cut[name] - tensor).abs().max().item() <= 1e-9, name


def train_uncut(family: Family, batches: Sequence[Batch], max_norm: float) -> tuple[nn.Module, list[float]]:
    """Ordinary torch code: one module, one optimizer, torch's own clipping."""
    model = build_stage(family, 0, 1, seed=SEED, dtype=torch.float64)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    losses: list[float] = []
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        total = sum(len(labels) for _, labels in batch)
        step_loss = 0.0
        for inputs, labels in batch:
            output = model(inputs.double() if inputs.is_floating_point() else inputs)
            loss = nn.functional.cross_entropy(output.reshape(-1, output.shape[-1]), labels.reshape(-1))
            (loss * len(labels) / total).backward()
            step_loss += loss.item() * len(labels) / total
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        for group in optimizer.param_groups:
            group["lr"] = SCHEDULE.lr(number)
        optimizer.step()
        losses.append(step_loss)
    return model, losses


def assert_same_state(expected: StageModule, actual: StageModule) -> None:
    for (name, want), (_, got) in zip(
        [*expected.named_parameters(), *expected.named_buffers()],
        [*actual.named_parameters(), *actual.named_buffers()],
        strict=True,
    ):
        assert torch.equal(want, got), name


@pytest.mark.parametrize("case", ["resnet", "tied"])
async def test_evaluation_is_that_of_the_parameters_that_the_round_started_from(
    make_swarm: MakeSwarm, case: str
) -> None:
    family, make_batches = CASES[case][0](), image_batches if case == "resnet" else text_batches
    holdout = make_batches((4, 3, 2))[5]
    plain = PlainLoop([build_stage(family, s, 2, seed=SEED) for s in range(2)], InnerOptimConfig(), 0.5, SEED, 0)
    expected = plain.evaluate(holdout)
    async with make_swarm(family, 2, seed=SEED, max_grad_norm=0.5) as swarm:
        for [replica] in swarm.replicas:
            flat = replica.compute.averaged.parameters.flat()
            replica.compute.base_parameters = lambda flat=flat: flat
        microbatches = [Microbatch(Fields(to_wire(x), to_wire(y)), len(y)) for x, y in holdout]

        async def evaluate(number: int) -> tuple[float, int]:
            return await swarm.drivers[0].evaluate(
                evaluation=number, base_round=number // 10, microbatches=microbatches, path=swarm.refs()
            )

        assert await evaluate(0) == expected
        await swarm.train(make_batches((3, 2))[0], 0, 1e-2)
        assert await evaluate(1) == expected
        for [replica] in swarm.replicas:
            replica.compute.base_parameters = replica.compute.averaged.parameters.flat
        assert await evaluate(2) != expected
        plain.step(make_batches((3, 2))[0], 0, 1e-2)
        for [replica] in swarm.replicas:
            replica.compute.base_parameters = None
            replica.worker.start_round(2)
        assert await evaluate(10) == plain.evaluate(holdout)
