"""A replica that goes on from a snapshot is what it was then, before anything is computed or averaged with it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from tests.families import gpt

from shoal.config.diloco import InnerOptimConfig
from shoal.wire.messages.step import StepEntry

from .test_equality_step import SEED, assert_same_state, text_batches

MakeSwarm = Callable[..., Any]


@pytest.mark.parametrize("optim", ["adam", "sgd", "muon"])
async def test_a_stage_that_goes_on_from_its_snapshot_ends_where_one_ends_that_never_stopped(
    make_swarm: MakeSwarm, optim: str
) -> None:
    batches = text_batches((4, 2))[:4]
    config = InnerOptimConfig(type=optim)
    async with make_swarm(gpt(0.1), 2, seed=SEED, optim=config) as undisturbed:
        for number, batch in enumerate(batches):
            await undisturbed.train(batch, number, 0.05)
        async with make_swarm(gpt(0.1), 2, seed=SEED, optim=config) as stopped:
            made: list[tuple[torch.Tensor, tuple[StepEntry, ...]]] = []
            for number, batch in enumerate(batches[:2]):
                await stopped.train(batch, number, 0.05)
            for [replica] in stopped.replicas:
                made.append((await stopped.device.run(replica.compute.snapshot), replica.worker.log))
        async with make_swarm(gpt(0.1), 2, seed=SEED, optim=config) as resumed:
            for [replica], (content, log) in zip(resumed.replicas, made, strict=True):
                replica.worker.start_round(1)
                assert replica.worker.resume(log, content, 1)
            for number, batch in enumerate(batches[2:], 2):
                await resumed.train(batch, number, 0.05)
            for [mine], [theirs] in zip(resumed.replicas, undisturbed.replicas, strict=True):
                assert_same_state(mine.compute.module, theirs.compute.module)
                assert mine.worker.log == theirs.worker.log


async def test_a_step_that_waits_while_a_round_begins_twice_is_computed_after_the_second_beginning(
    make_swarm: MakeSwarm,
) -> None:
    batch = text_batches((4, 2))[0]
    async with make_swarm(gpt(0.0), 2, seed=SEED) as undisturbed, make_swarm(gpt(0.0), 2, seed=SEED) as swarm:
        await undisturbed.train(batch, 0, 0.05)
        goes_on = threading.Event()
        holds = swarm.device.begin(goes_on.wait)
        for _ in range(2):
            for [replica] in swarm.replicas:
                replica.worker.start_round(1)
            await anyio.wait_all_tasks_blocked()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(swarm.train, batch, 0, 0.05)
            await anyio.wait_all_tasks_blocked()
            goes_on.set()
        await holds
        for [mine], [theirs] in zip(swarm.replicas, undisturbed.replicas, strict=True):
            assert_same_state(mine.compute.module, theirs.compute.module)


async def test_a_round_that_ends_at_once_averages_what_the_snapshot_has(make_swarm: MakeSwarm) -> None:
    async with make_swarm(gpt(0.0), 2, seed=SEED) as swarm:
        [replica] = swarm.replicas[0]
        before = replica.compute.averaged.parameters.flat()
        await swarm.train(text_batches((4, 2))[0], 0, 0.05)
        log, content = replica.worker.log, await swarm.device.run(replica.compute.snapshot)
        trained = replica.compute.averaged.parameters.flat()
        await swarm.device.run(replica.compute.averaged.parameters.load, before)
        replica.worker.start_round(1)
        assert replica.worker.resume(log, content, 1)
        closed = await replica.worker.close(1)
        assert closed.log == log
        found = await swarm.device.run(replica.compute.averaged.parameters.flat)
        assert torch.equal(found, trained)
        assert not torch.equal(found, before)


async def test_one_that_has_denied_a_step_of_it_begins_the_round_anew(make_swarm: MakeSwarm) -> None:
    async with make_swarm(gpt(0.0), 2, seed=SEED) as swarm:
        [replica] = swarm.replicas[0]
        await swarm.train(text_batches((4, 2))[0], 0, 0.05)
        log, content = replica.worker.log, await swarm.device.run(replica.compute.snapshot)
        async with make_swarm(gpt(0.0), 2, seed=SEED) as other:
            [new] = other.replicas[0]
            new.worker._machine._ledger.deny(log[0].key)
            new.worker.start_round(1)
            assert not new.worker.resume(log, content, 1)
            assert new.worker.log == ()
            assert (await new.worker.close(1)).num_samples == 0
