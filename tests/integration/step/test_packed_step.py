"""Texts that share a sample are trained as if each were alone: over any stages, by any schedule, to the last digit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.integration.step.conftest import microbatch
from tests.unit.model.hf.families import values_of
from torch import Tensor

from shoal.config.diloco import InnerOptimConfig
from shoal.data.targets import IGNORED
from shoal.model.hf.family import HfFamily
from shoal.model.stage import build_stage
from shoal.swarm.step_operations import Schedule
from shoal.trainer.baseline import PlainLoop

MakeSwarm = Callable[..., Any]
SEED, LR, TOKENS = 7, 0.5, 12
SGD = InnerOptimConfig(type="sgd", sgd_momentum=0.0, sgd_nesterov=False)
LENGTHS = ((5, 4, 3), (12,), (7, 5), (2, 2, 8))
"""Of the texts of each sample; the last one of the first sample has no target."""


def family(kind: str = "qwen3", *, is_tied: bool = False, packs: bool = True) -> HfFamily:
    return HfFamily(values_of(kind, tie_word_embeddings=is_tied), TOKENS, packs=packs)


def samples() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens (1, T), labels and positions of each sample."""
    generator = torch.Generator().manual_seed(3)
    made: list[tuple[Tensor, Tensor, Tensor]] = []
    for number, lengths in enumerate(LENGTHS):
        inputs, labels = (torch.randint(3, 97, (1, TOKENS), generator=generator) for _ in range(2))
        labels[torch.rand(1, TOKENS, generator=generator) < 0.4] = IGNORED
        if number == 0:
            labels[:, -lengths[-1] :] = IGNORED
        positions = torch.cat([torch.arange(length) for length in lengths])[None].int()
        made.append((inputs, labels, positions))
    return made


def batch() -> list[tuple[Tensor, ...]]:
    """Two microbatches of two samples."""
    made = samples()
    return [tuple(torch.cat(parts) for parts in zip(*made[at : at + 2], strict=True)) for at in (0, 2)]


def apart() -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of an uncut model that is given each text alone, weighted by targets."""
    model = build_stage(family(packs=False), 0, 1, seed=SEED, dtype=torch.float64)
    total = sum(int((labels != IGNORED).sum()) for _, labels, _ in samples())
    loss_sum = 0.0
    for lengths, (inputs, labels, _) in zip(LENGTHS, samples(), strict=True):
        for tokens, wanted in zip(inputs.split(lengths, 1), labels.split(lengths, 1), strict=True):
            if count := int((wanted != IGNORED).sum()):
                loss = model.loss(model(tokens), wanted) * (count / total)
                loss.backward()
                loss_sum += loss.item()
    return loss_sum, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def taken(stages: Sequence[Any], num_stages: int) -> dict[str, Tensor]:
    """What one step of plain SGD has taken from the parameters of all stages."""
    found: dict[str, Tensor] = {}
    for stage, module in enumerate(stages):
        before = build_stage(family(), stage, num_stages, seed=SEED, dtype=torch.float64)
        pairs = zip(before.named_parameters(), module.parameters(), strict=True)
        found |= {name: (old - new).detach() / LR for (name, old), new in pairs}
    return found


@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("recomputes", [False, True])
async def test_three_stages_give_the_loss_and_gradients_of_texts_apart(
    make_swarm: MakeSwarm, schedule: Schedule, recomputes: bool
) -> None:
    loss, expected = apart()
    async with make_swarm(
        family(),
        3,
        seed=SEED,
        dtype=torch.float64,
        optim=SGD,
        max_grad_norm=None,
        schedule=schedule,
        activation_checkpointing=recomputes,
    ) as swarm:
        result = await swarm.train(batch(), 0, LR)
        found = taken([stage[0].compute.module for stage in swarm.replicas], 3)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-12, atol=1e-12), name


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("is_tied", [False, True])
async def test_a_swarm_equals_the_plain_loop_in_bits_also_where_the_head_is_with_the_embedding(
    make_swarm: MakeSwarm, kind: str, is_tied: bool
) -> None:
    model = family(kind, is_tied=is_tied)
    loop = PlainLoop(
        [build_stage(model, stage, 3, seed=SEED) for stage in range(3)], InnerOptimConfig(), 1.0, SEED, trainer=0
    )
    async with make_swarm(model, 3, seed=SEED) as swarm:
        for number in range(3):
            loss, _ = loop.step(batch(), number, 1e-2)
            result = await swarm.train(batch(), number, 1e-2)
            assert result.loss == loss
        for mine, theirs in zip(loop.stages, swarm.replicas, strict=True):
            for one, other in zip(mine.parameters(), theirs[0].compute.module.parameters(), strict=True):
                assert torch.equal(one, other)


async def test_an_evaluation_sees_texts_apart(make_swarm: MakeSwarm) -> None:
    loss, _ = apart()
    async with make_swarm(family(), 3, seed=SEED, dtype=torch.float64) as swarm:
        total, num_targets = await swarm.drivers[0].evaluate(
            evaluation=1,
            base_round=0,
            microbatches=[microbatch(*tensors) for tensors in batch()],
            path=swarm.refs(),
        )
    assert total / num_targets == pytest.approx(loss, rel=1e-12)


async def test_without_positions_a_stage_refuses_the_step_and_says_what_is_missing(make_swarm: MakeSwarm) -> None:
    async with make_swarm(family(), 2, seed=SEED) as swarm:
        with pytest.raises(Exception, match="every replica of stage 0 refuses the step: 2 tensors expected, got 1"):
            await swarm.train([tensors[:2] for tensors in batch()], 0, LR)
