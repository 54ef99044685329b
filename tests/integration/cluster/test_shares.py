"""Machines of different speed in one run: who is faster trains on more samples, and the run stays exact."""

from __future__ import annotations

import hashlib
import math
from typing import TypeVar

import anyio
import pytest

from shoal.ids import PeerId
from shoal.swarm import run_client
from shoal.swarm.sample_ranges import count, merge
from shoal.wire.messages import Message
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.feed import PlanRound
from shoal.wire.messages.round import Close
from shoal.wire.messages.step import Open
from shoal_lab import Cluster, ClusterResult
from shoal_lab.emulation.device_pace import DevicePace

from .conftest import SEQ_LEN, MakeCluster, make_config

Kind = TypeVar("Kind", PlanRound, StartRound)

STEPS = 8
BATCH = 8


def config(rounds: int, *, deterministic: bool = False):
    return make_config(
        run={"deterministic": deterministic},
        model_pipeline={"stages": 1, "microbatches": 2},
        diloco={"inner_steps": STEPS, "outer_steps": rounds, "batch_size_per_step": BATCH},
        servers={"replicas": 2},
    )


def paces(factor: float) -> dict[int, DevicePace]:
    """Two devices: one trains on 80 samples a second, the other one is slower by `factor`.

    A batch lasts long enough to outweigh what a busy machine adds to it.
    """
    return {
        index: DevicePace(forward_s=0.1, per_samples=BATCH, factor=each) for index, each in enumerate((1.0, factor))
    }


def ratio(result: ClusterResult, peers: list[PeerId], rounds: slice) -> float:
    """How many times as many samples the first server has trained as the second one."""
    weights = [dict(zip(r.stages[0].members, r.stages[0].weights, strict=True)) for r in result.records[rounds]]
    first, second = (sum(each[peer] for each in weights) for peer in peers)
    return first / second


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds end when their trainers are done: how late one may be says how busy the machine is."""
    monkeypatch.setattr(run_client, "boundary_s", lambda *_: math.inf)


def posted(cluster: Cluster, kind: type[Kind]) -> list[Kind]:
    """Collect the messages of a kind from now on."""
    found: list[Kind] = []
    deliver = cluster.network.before_delivery

    def look(sender: PeerId, to: PeerId, message: Message) -> None:
        if isinstance(message, kind):
            found.append(message)
        deliver(sender, to, message)

    cluster.network.before_delivery = look
    return found


def check(result: ClusterResult, rounds: int) -> None:
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert result.audit.steps == 2 * STEPS * rounds
    assert result.audit.samples == 2 * STEPS * BATCH * rounds
    for record in result.records:
        assert count(record.samples) == count(merge(record.samples)) == 2 * STEPS * BATCH, "each round is whole"
        assert sum(record.stages[0].weights) == count(record.samples) * SEQ_LEN, "the average is weighted by targets"


@pytest.mark.usefixtures("patient")
async def test_a_pipeline_that_is_four_times_slower_gets_a_fifth_of_the_samples(make_cluster: MakeCluster) -> None:
    rounds = 5
    async with make_cluster(config(rounds), num_train=2000, paces=paces(4.0)) as cluster:
        plans, starts = posted(cluster, PlanRound), posted(cluster, StartRound)
        with anyio.fail_after(180):
            result = await cluster.run()
        peers = [server.peer for server in cluster.servers]
        held = {hashlib.sha256(server.parameters().numpy().tobytes()).hexdigest() for server in cluster.servers}
    check(result, rounds)
    assert held == {result.hashes[0]}
    assert 2 < ratio(result, peers, slice(2, None)) < 8
    shares = [values for values in cluster.monitor.values if "share/0" in values]
    assert len(shares) == rounds
    assert all(sum(values.values()) == pytest.approx(1) for values in shares)
    assert plans[0].speeds == (0, 0)
    assert all(fast > 1.5 * slow > 0 for fast, slow in (plan.speeds for plan in plans[2:]))
    evaluated = {(each.round, each.slot): each.evaluation for each in starts if each.evaluation is not None}
    assert [evaluated[rounds, slot].stop - evaluated[rounds, slot].start for slot in (0, 1)] in ([5, 1], [4, 2])
    assert list(result.progress.eval_losses) == list(range(rounds + 1))


@pytest.mark.usefixtures("patient")
async def test_shares_follow_a_pipeline_that_becomes_fast_in_the_middle(make_cluster: MakeCluster) -> None:
    rounds = 7
    slow_and_fast = paces(4.0)
    async with make_cluster(config(rounds), num_train=2000, paces=slow_and_fast) as cluster:

        def become_fast() -> None:
            slow_and_fast[1].factor = 1.0

        cluster.when(Close, action=become_fast, round=3)
        with anyio.fail_after(180):
            result = await cluster.run()
        peers = [server.peer for server in cluster.servers]
    check(result, rounds)
    assert ratio(result, peers, slice(2, 3)) > 2
    assert 0.5 < ratio(result, peers, slice(5, None)) < 2


async def test_in_a_deterministic_run_shares_are_fixed_and_equal(make_cluster: MakeCluster) -> None:
    async with make_cluster(config(2, deterministic=True), num_train=2000, paces=paces(4.0)) as cluster:
        plans, starts = posted(cluster, PlanRound), posted(cluster, StartRound)
        with anyio.fail_after(180):
            result = await cluster.run()
        peers = [server.peer for server in cluster.servers]
    check(result, 2)
    assert ratio(result, peers, slice(None)) == 1
    assert [plan.speeds for plan in plans] == [(), ()]
    assert {each.evaluation.stop - each.evaluation.start for each in starts if each.evaluation is not None} == {3}
    assert {item.num_samples for lines in result.steps.values() for item in (line.entry for line in lines)} == {BATCH}


async def test_the_last_round_waits_for_who_has_become_slow_since_nobody_would_train_its_samples(
    make_cluster: MakeCluster,
) -> None:
    rounds = 6
    devices = {index: DevicePace(forward_s=0.01, per_samples=BATCH) for index in (0, 1)}

    def slow_down() -> None:
        devices[0].forward_s = 1.0

    async with make_cluster(config(rounds), replicas=[0, 0], paces=devices) as cluster:
        cluster.when(Open, action=slow_down, receiver=cluster.servers[0].peer, number=STEPS * rounds - 2)
        result = await cluster.run()
    # One of the rounds before may have ended without a late step: on a busy machine the deadline of this test is close.
    assert count(result.records[-1].samples) == 2 * STEPS * BATCH
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
