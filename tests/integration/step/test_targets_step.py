"""Microbatches weigh what they have targets: however a batch is cut, its gradient is that of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.families import gpt
from torch import Tensor

from shoal.codec.raw import to_wire
from shoal.config.diloco import InnerOptimConfig
from shoal.data.fields import Fields
from shoal.data.microbatch import Microbatch
from shoal.errors import NoPipeline
from shoal.ids import PeerId
from shoal.model.stage import StageModule, build_stage
from shoal.swarm.step_trainer import StepPlan, TrainerEffect

SEED = 7
MakeSwarm = Callable[..., Any]
Batch = Sequence[tuple[Tensor, Tensor]]
SGD = InnerOptimConfig(type="sgd", sgd_momentum=0.0, sgd_nesterov=False)
LR = 0.5


def batch() -> Batch:
    """Three microbatches of 8 samples of 8 tokens: with 3 targets, with 61, and with none."""
    generator = torch.Generator().manual_seed(3)
    made: list[tuple[Tensor, Tensor]] = []
    for num_targets in (3, 61, 0):
        inputs, labels = (torch.randint(32, (8, 8), generator=generator) for _ in range(2))
        ignored = torch.randperm(64, generator=generator)[num_targets:]
        labels.view(-1)[ignored] = -100
        made.append((inputs, labels))
    return made


def whole_gradients() -> tuple[float, dict[str, Tensor]]:
    """The loss and the gradients of all targets at once, in an uncut model."""
    model = build_stage(gpt(0.0), 0, 1, seed=SEED, dtype=torch.float64)
    inputs, labels = (torch.cat(parts) for parts in zip(*batch(), strict=True))
    loss = model.loss(model(inputs), labels)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def gradients_of(module: StageModule, num_stages: int) -> dict[str, Tensor]:
    """What one step of plain SGD has taken from the parameters of a stage."""
    before = build_stage(gpt(0.0), module.stage, num_stages, seed=SEED, dtype=torch.float64)
    pairs = zip(before.named_parameters(), module.parameters(), strict=True)
    return {name: (old - new).detach() / LR for (name, old), new in pairs}


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("cap", [None, 3])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_any_path_gives_the_gradient_of_the_whole_batch(
    make_swarm: MakeSwarm, num_stages: int, cap: int | None, home: int
) -> None:
    loss, expected = whole_gradients()
    caps = {} if cap is None else {PeerId(f"R{num_stages - 1}.{home}"): cap}
    async with make_swarm(
        gpt(0.0),
        num_stages,
        seed=SEED,
        num_replicas=2,
        dtype=torch.float64,
        optim=SGD,
        max_grad_norm=None,
        caps=caps,
    ) as swarm:
        result = await swarm.train(batch(), 0, LR, home=home)
        assert result.num_targets == 64
        assert result.loss == pytest.approx(loss, rel=1e-12)
        found: dict[str, Tensor] = {}
        for stage in swarm.replicas:
            replica = stage[home]
            found |= gradients_of(replica.compute.module, num_stages)
            assert replica.worker.log[-1].num_targets == 64
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-12, atol=1e-14), name


async def test_an_evaluation_is_the_mean_over_targets(make_swarm: MakeSwarm) -> None:
    loss, _ = whole_gradients()
    async with make_swarm(gpt(0.0), 2, seed=SEED, dtype=torch.float64) as swarm:
        microbatches = [Microbatch(Fields(to_wire(x), to_wire(y)), len(y)) for x, y in batch()]
        total, num_targets = await swarm.drivers[0].evaluate(
            evaluation=1, base_round=0, microbatches=microbatches, path=swarm.refs()
        )
    assert num_targets == 64
    assert total / num_targets == pytest.approx(loss, rel=1e-12)


async def test_labels_that_do_not_have_the_targets_that_were_said_are_refused(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_swarm(gpt(0.0), 2, seed=SEED) as swarm:
        machine = swarm.drivers[0]._machine
        start = machine.start

        def lies(plan: StepPlan, now_s: float) -> list[TrainerEffect]:
            doubled = tuple(tuple(2 * count for count in targets) for targets in plan.microbatch_targets)
            return start(replace(plan, microbatch_targets=doubled), now_s)

        monkeypatch.setattr(machine, "start", lies)
        with pytest.raises(NoPipeline):
            await swarm.train(batch(), 0, LR)
        assert not swarm.replicas[0][0].worker.log
