"""A pipeline whose host takes one sample at a time beside one that takes any number."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from shoal.client.counters import ask_again
from shoal.ids import PeerId, StepKey
from shoal.swarm.sample_ranges import count, merge
from shoal.wire.messages import Message
from shoal.wire.messages.round import CommitRecord
from shoal.wire.messages.step import Forward, Open
from shoal_lab import ClusterResult

from .conftest import MakeCluster, make_config


async def test_a_capped_server_gets_its_samples_one_by_one_and_the_run_stays_exact(make_cluster: MakeCluster) -> None:
    config = make_config(diloco={"inner_steps": 5})
    results: list[ClusterResult] = []
    for _ in range(2):
        sizes: dict[PeerId, set[tuple[int, ...]]] = {}
        async with make_cluster(config, num_train=100, replicas=[0, 1, 0, 1], caps={1: 1}) as cluster:
            deliver = cluster.network.before_delivery

            def look(sender: PeerId, to: PeerId, message: Message, deliver=deliver, sizes=sizes) -> None:
                if isinstance(message, Open):
                    sizes.setdefault(to, set()).add(message.microbatch_samples)
                deliver(sender, to, message)

            cluster.network.before_delivery = look
            results.append(await cluster.run())
            held = [hashlib.sha256(s.parameters().numpy().tobytes()).hexdigest() for s in cluster.servers]
            peers = [server.peer for server in cluster.servers]
        assert held == [results[-1].hashes[stage] for stage in (0, 1, 0, 1)]
        assert sizes[peers[1]] == {(1, 1, 1, 1)}
        assert sizes[peers[3]] == {(2, 2)}, "the other pipeline is not cut"
    first, second = results
    assert first.hashes == second.hashes, "the cut depends on nothing but the path's caps"
    # 3 rounds of 5 steps of 2 trainers with 4 samples each, over passes of 100.
    assert (first.audit.steps, first.audit.samples, first.audit.duplicates, first.audit.missing) == (30, 120, 0, 0)
    assert count(merge(part for record in first.records for part in record.samples)) == 120
    # A replica refuses evaluations above its cap: all of them have a result.
    assert list(first.progress.eval_losses) == [0, 1, 2, 3]


async def test_a_trainer_goes_on_over_a_capped_replica_when_its_own_dies(make_cluster: MakeCluster) -> None:
    config = make_config(diloco={"inner_steps": 5})
    async with make_cluster(config, num_train=100, replicas=[0, 1, 0, 1], caps={2: 1}) as cluster:
        cluster.when(Forward, action=lambda: cluster.kill_server(0), receiver=cluster.servers[0].peer, number=5)
        result = await cluster.run()
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert result.summary["exit"] == "done"


async def test_a_server_whose_memory_is_too_small_says_so_to_everybody_and_the_run_stays_exact(
    make_cluster: MakeCluster,
) -> None:
    config = make_config(diloco={"inner_steps": 5})
    async with make_cluster(config, num_train=100, replicas=[0, 1, 0, 1]) as cluster:
        compute = cluster.servers[1].replica.compute
        loss, asked = compute.loss, list[int]()

        def small(
            key: StepKey, microbatch: int, input: Tensor, labels: Tensor, weight: float, *, loss_scale: float
        ) -> Tensor:
            asked.append(len(labels))
            if len(labels) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss(key, microbatch, input, labels, weight, loss_scale=loss_scale)

        compute.loss = small  # type: ignore[method-assign]
        caps = list[dict[PeerId, int]]()

        def announced() -> dict[PeerId, int]:
            return {replica.peer: replica.cap for replica in cluster.view.replicas if replica.cap is not None}

        cluster.when(CommitRecord, action=lambda: caps.append(announced()))
        small_peer = cluster.servers[1].peer
        for after in (0, 5):
            cluster.when(CommitRecord, action=lambda: ask_again(cluster.client._endpoint, small_peer), after=after)
        result = await cluster.run()
        assert caps[0] == {cluster.servers[1].peer: 1}, "announced at once, not with the next record"
        assert announced() == caps[0]
        held = [hashlib.sha256(s.parameters().numpy().tobytes()).hexdigest() for s in cluster.servers]
    assert held == [result.hashes[stage] for stage in (0, 1, 0, 1)]
    [incident] = result.summary["incidents"]
    assert (incident["kind"], incident["cause"], incident["stage"]) == ("server", "out of memory", 1)
    assert incident["back_after_s"] > 0
    assert result.summary["failovers"] == []
    assert [num_samples for num_samples in asked if num_samples > 1] == [2], "nobody runs into it again"
    assert (result.audit.steps, result.audit.samples, result.audit.duplicates, result.audit.missing) == (30, 120, 0, 0)
    assert result.summary["exit"] == "done"
