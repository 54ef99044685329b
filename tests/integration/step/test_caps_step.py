"""Replicas that take few samples at a time: the same batch in more microbatches, and the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.codec.raw import to_wire
from shoal.config.training import InnerOptimConfig
from shoal.errors import NoPipeline, RoundAborted
from shoal.ids import PeerId
from shoal.model.stage import build_stage
from shoal.pipeline.microbatch import Microbatch
from shoal.trainer.baseline import PlainLoop
from shoal.wire.messages.step import Open

from .test_equality_step import SCHEDULE, SEED, assert_same_state, gpt, text_batches, train_uncut

pytestmark = pytest.mark.anyio

MakeSwarm = Callable[..., Any]
HEAD, TAIL = PeerId("R0.0"), PeerId("R1.0")


def parts(batch: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    inputs, labels = (torch.cat(list(column)) for column in zip(*batch, strict=True))
    return list(zip(inputs.split(list(sizes)), labels.split(list(sizes)), strict=True))


@pytest.mark.parametrize("caps", [{HEAD: 1}, {TAIL: 2}, {HEAD: 3, TAIL: 2}])
async def test_the_gradients_of_a_cut_batch_are_those_of_the_uncut_model(
    make_swarm: MakeSwarm, caps: dict[PeerId, int]
) -> None:
    batches = text_batches((5, 3))
    model, losses = train_uncut(gpt(0.0), batches, 0.5)
    optim = InnerOptimConfig(adam_weight_decay=0.1)
    async with make_swarm(
        gpt(0.0), 2, seed=SEED, max_grad_norm=0.5, dtype=torch.float64, optim=optim, caps=caps
    ) as swarm:
        for number, batch in enumerate(batches):
            result = await swarm.train(batch, number, SCHEDULE.lr(number))
            assert result.loss == pytest.approx(losses[number], abs=1e-9)
            assert (result.num_samples, result.attempts) == (8, 1)
        trained = {n: p for [r] in swarm.replicas for n, p in r.compute.module.named_parameters()}
    for name, tensor in model.named_parameters():
        assert (trained[name] - tensor).abs().max().item() <= 1e-9, name


@pytest.mark.parametrize(("caps", "sizes"), [({TAIL: 2}, (2, 2, 1, 2, 1)), ({HEAD: 1}, (1,) * 8), ({HEAD: 5}, (5, 3))])
async def test_each_part_is_a_microbatch_with_seeds_of_its_own(
    make_swarm: MakeSwarm, caps: dict[PeerId, int], sizes: tuple[int, ...]
) -> None:
    batches = text_batches((5, 3))[:5]
    plain = PlainLoop([build_stage(gpt(0.1), s, 2, seed=SEED) for s in range(2)], InnerOptimConfig(), 0.5, SEED, 0)
    async with make_swarm(gpt(0.1), 2, seed=SEED, max_grad_norm=0.5, caps=caps) as swarm:
        asked: list[tuple[int, ...]] = []
        swarm.network.before_delivery = lambda _sender, to, message: (
            asked.append(message.microbatch_samples) if isinstance(message, Open) and to == HEAD else None
        )
        for number, batch in enumerate(batches):
            result = await swarm.train(batch, number, 1e-3)
            assert (result.loss, result.grad_norm) == plain.step(parts(batch, sizes), number, 1e-3)
        assert asked == [sizes] * len(batches)
        for stage, [replica] in zip(plain.stages, swarm.replicas, strict=True):
            assert_same_state(stage, replica.compute.module)


async def test_a_replay_over_another_path_is_cut_for_that_path(make_swarm: MakeSwarm) -> None:
    [batch, *_] = text_batches((4,))
    caps = {HEAD: 4, PeerId("R0.1"): 1}
    async with make_swarm(gpt(0.1), 2, seed=SEED, num_replicas=2, caps=caps) as swarm:
        swarm.network.kill(HEAD)
        result = await swarm.train(batch, 0, 1e-3)
        assert result.path[0] == PeerId("R0.1")
        plain = PlainLoop([build_stage(gpt(0.1), s, 2, seed=SEED) for s in range(2)], InnerOptimConfig(), 1.0, SEED, 0)
        assert (result.loss, result.grad_norm) == plain.step(parts(batch, (1,) * 4), 0, 1e-3)


async def test_a_trainer_that_does_not_know_the_cap_is_refused_and_changes_nothing(make_swarm: MakeSwarm) -> None:
    [batch, *_] = text_batches((4,))
    async with make_swarm(gpt(0.1), 2, seed=SEED, caps={TAIL: 2}) as swarm:
        caps, swarm.caps = swarm.caps, {}
        with pytest.raises(NoPipeline):
            await swarm.train(batch, 0, 1e-3)
        assert all(not replica.worker.log for [replica] in swarm.replicas)
        # When it has heard of it, the same step goes on.
        swarm.caps = caps
        assert (await swarm.train(batch, 0, 1e-3)).committed


async def test_an_evaluation_is_cut_as_well_and_refused_where_it_is_not(make_swarm: MakeSwarm) -> None:
    [batch, *_] = text_batches((5, 2))
    microbatches = [Microbatch(to_wire(x), to_wire(y), len(y)) for x, y in batch]
    plain = PlainLoop([build_stage(gpt(0.1), s, 2, seed=SEED) for s in range(2)], InnerOptimConfig(), 0.5, SEED, 0)
    async with make_swarm(gpt(0.1), 2, seed=SEED, caps={TAIL: 2}) as swarm:

        async def evaluate(number: int, caps: dict[PeerId, int]) -> tuple[float, int]:
            return await swarm.drivers[0].evaluate(
                evaluation=number, held=0, microbatches=microbatches, path=swarm.path(), caps=caps
            )

        assert await evaluate(0, {TAIL: 2}) == plain.evaluate(parts(batch, (2, 2, 1, 2)))
        with pytest.raises(RoundAborted, match="a microbatch of 5 samples is above this replica's cap of 2"):
            await evaluate(1, {})
