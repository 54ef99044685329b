"""Routers train in every stage, with the weight of a microbatch's targets, however a step is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.unit.model.hf.families import TOKENS, forward_of, own_class, values_of
from torch import Tensor
from torch.nn import functional as F

from shoal.config.diloco import InnerOptimConfig
from shoal.model.hf.family import HfFamily
from shoal.model.stage import StageModule, build_stage
from shoal.swarm.step_operations import Schedule
from shoal.trainer.baseline import PlainLoop

SEED = 7
COEFFICIENT = 0.5
LR = 0.5
SGD = InnerOptimConfig(type="sgd", sgd_momentum=0.0, sgd_nesterov=False)
MakeSwarm = Callable[..., Any]
Batch = Sequence[tuple[Tensor, Tensor]]


def family(kind: str = "mixtral", is_tied: bool = False) -> HfFamily:
    more = {"router_aux_loss_coef": COEFFICIENT, "vocab_size": 256, "tie_word_embeddings": is_tied}
    return HfFamily(values_of(kind, **more), TOKENS)


def batch(*num_targets: int) -> Batch:
    """Microbatches of 8 samples with so many targets each."""
    generator = torch.Generator().manual_seed(3)
    made: list[tuple[Tensor, Tensor]] = []
    for number in num_targets:
        inputs, labels = (torch.randint(256, (8, TOKENS), generator=generator) for _ in range(2))
        ignored = torch.randperm(8 * TOKENS, generator=generator)[number:]
        labels.view(-1)[ignored] = -100
        made.append((inputs, labels))
    return made


def weighted_mean() -> tuple[list[float], dict[str, Tensor]]:
    """The routers' losses and all gradients by transformers' own class: 3 of 64 of one microbatch, 61 of the other."""
    theirs, names = own_class(family(), torch.float64)
    sums = [0.0] * theirs.config.num_hidden_layers
    for (inputs, labels), weight in zip(batch(3, 61), (3 / 64, 61 / 64), strict=True):
        logits, routers = forward_of(theirs.train(), inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * weight
        (loss + sum(router * (COEFFICIENT * weight) for router in routers)).backward()
        sums = [total + router.item() * weight for total, router in zip(sums, routers, strict=True)]
    found = dict(theirs.named_parameters())
    return sums, {ours: found[name].grad for ours, name in names.items()}


def taken(module: StageModule, num_stages: int) -> dict[str, Tensor]:
    """The parameters of a stage after one step of plain SGD, less what they were before."""
    before = build_stage(family(), module.stage, num_stages, seed=SEED, dtype=torch.float64)
    pairs = zip(before.named_parameters(), module.parameters(), strict=True)
    return {name: (old - new).detach() / LR for (name, old), new in pairs}


@pytest.mark.parametrize("num_stages", [1, 2, 3])
async def test_microbatches_of_3_and_61_targets_give_the_weighted_mean(make_swarm: MakeSwarm, num_stages: int) -> None:
    losses, expected = weighted_mean()
    options = {"seed": SEED, "dtype": torch.float64, "optim": SGD, "max_grad_norm": None}
    async with make_swarm(family(), num_stages, **options) as swarm:
        result = await swarm.train(batch(3, 61), 0, LR)
        assert [router.loss for router in result.routers] == pytest.approx(losses, rel=1e-12)
        assert all(0 < router.load_cv < 2 for router in result.routers)
        found: dict[str, Tensor] = {}
        for [replica] in swarm.replicas:
            found |= taken(replica.compute.module, num_stages)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-12, atol=1e-13), name


@pytest.mark.usual("zero_bubble-True-bfloat16-untied", "1f1b-False-float32-tied")
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("schedule", list(Schedule))
async def test_any_way_to_compute_a_step_has_the_bits_of_a_plain_loop(
    make_swarm: MakeSwarm, schedule: Schedule, checkpointing: bool, autocast: torch.dtype | None, is_tied: bool
) -> None:
    model = family("qwen3_moe", is_tied)
    stages = [build_stage(model, s, 3, seed=SEED, autocast=autocast) for s in range(3)]
    plain = PlainLoop(stages, InnerOptimConfig(), 0.5, SEED, 0)
    options = {"schedule": schedule, "activation_checkpointing": checkpointing, "autocast": autocast}
    reported: list[Any] = []
    async with make_swarm(model, 3, seed=SEED, max_grad_norm=0.5, **options) as swarm:
        for number, each in enumerate([batch(3, 61, 0), batch(96, 5, 7)]):
            # A power of two rounds nothing.
            result = await swarm.train(each, number, 1e-2, loss_scale=2.0 ** (8 * number))
            assert (result.loss, result.grad_norm) == plain.step(each, number, 1e-2)
            reported.append(result.routers)
        for stage, [replica] in zip(plain.stages, swarm.replicas, strict=True):
            pairs = zip(stage.named_parameters(), replica.compute.module.parameters(), strict=True)
            assert [name for (name, one), other in pairs if not torch.equal(one, other)] == []
            assert replica.compute._splits == (schedule == Schedule.ZERO_BUBBLE)
    assert [len(routers) for routers in reported] == [4, 4]
    # Computed twice or not, a forward counts once.
    assert all(0.9 < router.loss < 2 for routers in reported for router in routers)
