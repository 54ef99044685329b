"""Replicas that take few samples at a time: the same batch in more microbatches, and the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families import gpt
from torch import Tensor

from shoal.codec.raw import to_wire
from shoal.config import own_class
from shoal.config.diloco import InnerOptimConfig
from shoal.data.fields import Fields
from shoal.data.microbatch import Microbatch
from shoal.errors import NoPipeline, RoundAborted
from shoal.ids import PeerId
from shoal.model.stage import StageModule, build_stage
from shoal.pipeline.stage_compute import StageCompute
from shoal.trainer.baseline import PlainLoop
from shoal.wire.messages.step import Open

from .test_equality_step import SCHEDULE, SEED, assert_same_state, text_batches, train_uncut

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


async def test_a_trainer_that_does_not_know_the_cap_is_told_and_replays_in_smaller_microbatches(
    make_swarm: MakeSwarm,
) -> None:
    [batch, *_] = text_batches((4,))
    plain = PlainLoop([build_stage(gpt(0.1), s, 2, seed=SEED) for s in range(2)], InnerOptimConfig(), 1.0, SEED, 0)
    async with make_swarm(gpt(0.1), 2, seed=SEED, caps={TAIL: 2}) as swarm:
        swarm.caps = {}
        result = await swarm.train(batch, 0, 1e-3)
        assert (result.committed, result.attempts, result.path) == (True, 2, (HEAD, TAIL))
        assert (result.loss, result.grad_norm) == plain.step(parts(batch, (2, 2)), 0, 1e-3)


class SmallMemory:
    """Lets a replica's computation fail as torch does where memory is exhausted: with more than so many samples."""

    def __init__(self, compute: StageCompute, max_samples: int, error: Exception, operation: str) -> None:
        self.asked: list[int] = []
        self._run = getattr(compute, operation)
        self._max_samples = max_samples
        self._error = error
        setattr(compute, operation, self)

    def __call__(self, *args: Any, **named: Any) -> Any:
        [num_samples, *_] = [len(arg) for arg in args if isinstance(arg, Tensor)]
        self.asked.append(num_samples)
        if num_samples > self._max_samples:
            raise self._error
        return self._run(*args, **named)


ON_GPU = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
ON_CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: 9 bytes"
)


@pytest.mark.usual("0-forward-gpu", "1-loss-cpu")
@pytest.mark.parametrize("error", [ON_GPU, ON_CPU, MemoryError()], ids=["gpu", "cpu", "python"])
@pytest.mark.parametrize(("stage", "operation"), [(0, "forward"), (0, "backward"), (1, "loss")])
async def test_a_replica_whose_memory_is_too_small_takes_fewer_samples_and_the_step_goes_on(
    make_swarm: MakeSwarm, error: Exception, stage: int, operation: str
) -> None:
    batches = text_batches((8, 5))[:2]
    plain = PlainLoop([build_stage(gpt(0.1), s, 2, seed=SEED) for s in range(2)], InnerOptimConfig(), 1.0, SEED, 0)
    async with make_swarm(gpt(0.1), 2, seed=SEED) as swarm:
        replica = swarm.replicas[stage][0]
        memory = SmallMemory(replica.compute, 2, error, operation)
        results = [await swarm.train(batch, number, 1e-3) for number, batch in enumerate(batches)]
        # From 8 over 4 to 2, once for the whole run; the client has not said a word about it.
        assert [result.attempts for result in results] == [3, 1]
        assert replica.worker.cap == 2
        assert memory.asked[:3] == [8, 4, 2]
        assert replica.endpoint.metrics.counter("step.out_of_memory").value == 2
        for number, (batch, result) in enumerate(zip(batches, results, strict=True)):
            cut = plain.step(parts(batch, (2, 2, 2, 2, 2, 2, 1)), number, 1e-3)
            assert (result.loss, result.grad_norm) == cut
        for of_plain, [held] in zip(plain.stages, swarm.replicas, strict=True):
            assert_same_state(of_plain, held.compute.module)


async def test_one_sample_that_does_not_fit_is_a_refusal(make_swarm: MakeSwarm) -> None:
    [batch, *_] = text_batches((2,))
    async with make_swarm(gpt(0.1), 2, seed=SEED) as swarm:
        [replica] = swarm.replicas[1]
        memory = SmallMemory(replica.compute, 0, ON_GPU, "loss")
        with pytest.raises(NoPipeline):
            await swarm.train(batch, 0, 1e-3)
        assert (memory.asked[:2], set(memory.asked[1:]), replica.worker.cap) == ([2, 1], {1}, 1)
        assert all(not held.worker.log for [held] in swarm.replicas)


async def test_another_error_of_the_device_changes_no_cap(make_swarm: MakeSwarm) -> None:
    [batch, *_] = text_batches((4,))
    async with make_swarm(gpt(0.1), 2, seed=SEED) as swarm:
        [replica] = swarm.replicas[1]
        SmallMemory(replica.compute, 0, RuntimeError("CUDA error: device-side assert triggered"), "loss")
        said = r"^every replica of stage 1 refuses .*assert triggered \(\S+test_caps_step\.py line \d+\)$"
        with pytest.raises(NoPipeline, match=said) as refused:
            await swarm.train(batch, 0, 1e-3)
        assert not refused.value.is_model
        assert replica.worker.cap is None


async def test_a_model_that_fails_at_every_replica_is_told_as_that_after_one_try_of_each(make_swarm: MakeSwarm) -> None:
    [batch, *_] = text_batches((4,))
    async with make_swarm(gpt(0.1), 2, seed=SEED) as swarm:
        [replica] = swarm.replicas[1]
        model = SmallMemory(replica.compute, 0, NameError("name 'hiden_BTC' is not defined"), "loss")
        with pytest.raises(NoPipeline, match=r"refuses the step: NameError: .*\(\S+ line \d+\)$") as refused:
            await swarm.train(batch, 0, 1e-3)
        assert refused.value.is_model
        assert model.asked == [4]


async def test_a_model_that_pip_has_installed_is_the_users_own_as_any_other(
    make_swarm: MakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    [batch, *_] = text_batches((4,))
    # As if this file, which raises, were of a package that the configuration names.
    monkeypatch.setattr(own_class, "_INSTALLED", Path(__file__).parts)
    async with make_swarm(gpt(0.1), 2, seed=SEED) as swarm:
        [replica] = swarm.replicas[1]
        SmallMemory(replica.compute, 0, NameError("name 'hiden_BTC' is not defined"), "loss")
        with pytest.raises(NoPipeline, match=r"is not defined$") as refused:
            await swarm.train(batch, 0, 1e-3)
        assert not refused.value.is_model
        monkeypatch.setattr(StageModule, "family_name", f"{__name__}:Family")
        with pytest.raises(NoPipeline, match=r"is not defined \(\S+test_caps_step\.py line \d+\)$") as refused:
            await swarm.train(batch, 1, 1e-3)
        assert refused.value.is_model


class OddShape(Exception):
    """Of a model of somebody's own, whose errors may be of any class."""


async def test_an_error_of_a_class_of_the_users_own_is_a_refusal_of_its_step_and_of_an_evaluation(
    make_swarm: MakeSwarm,
) -> None:
    [batch, *_] = text_batches((4,))
    microbatches = [Microbatch(Fields(to_wire(x), to_wire(y)), len(y)) for x, y in batch]
    async with make_swarm(gpt(0.1), 2, seed=SEED) as swarm:
        [replica] = swarm.replicas[1]
        for operation in ("loss", "evaluate"):
            SmallMemory(replica.compute, 0, OddShape("too odd"), operation)
        with pytest.raises(NoPipeline, match=r"OddShape: too odd \(\S+test_caps_step\.py line \d+\)$") as refused:
            await swarm.train(batch, 0, 1e-3)
        assert refused.value.is_model
        with pytest.raises(RoundAborted, match=r"OddShape: too odd"):
            await swarm.drivers[0].evaluate(evaluation=0, base_round=0, microbatches=microbatches, path=swarm.refs())


async def test_an_evaluation_that_does_not_fit_lowers_the_cap_for_the_next(make_swarm: MakeSwarm) -> None:
    [batch, *_] = text_batches((6,))
    microbatches = [Microbatch(Fields(to_wire(x), to_wire(y)), len(y)) for x, y in batch]
    async with make_swarm(gpt(0.1), 2, seed=SEED) as swarm:
        [replica] = swarm.replicas[0]
        SmallMemory(replica.compute, 3, ON_CPU, "evaluate")

        async def evaluate(number: int, caps: dict[PeerId, int]) -> tuple[float, int]:
            swarm.caps = caps
            return await swarm.drivers[0].evaluate(
                evaluation=number, base_round=0, microbatches=microbatches, path=swarm.refs()
            )

        with pytest.raises(RoundAborted, match="can't allocate memory"):
            await evaluate(0, {})
        assert replica.worker.cap == 3
        _, num_targets = await evaluate(1, {HEAD: 3})
        assert num_targets == 6 * 8


async def test_an_evaluation_is_cut_as_well_and_refused_where_it_is_not(make_swarm: MakeSwarm) -> None:
    [batch, *_] = text_batches((5, 2))
    microbatches = [Microbatch(Fields(to_wire(x), to_wire(y)), len(y)) for x, y in batch]
    plain = PlainLoop([build_stage(gpt(0.1), s, 2, seed=SEED) for s in range(2)], InnerOptimConfig(), 0.5, SEED, 0)
    async with make_swarm(gpt(0.1), 2, seed=SEED, caps={TAIL: 2}) as swarm:

        async def evaluate(number: int, caps: dict[PeerId, int]) -> tuple[float, int]:
            swarm.caps = caps
            return await swarm.drivers[0].evaluate(
                evaluation=number, base_round=0, microbatches=microbatches, path=swarm.refs()
            )

        assert await evaluate(0, {TAIL: 2}) == plain.evaluate(parts(batch, (2, 2, 1, 2)))
        with pytest.raises(RoundAborted, match="a microbatch of 5 samples is above this replica's cap of 2"):
            await evaluate(1, {})
