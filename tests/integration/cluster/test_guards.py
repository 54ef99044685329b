"""Replicas that bring what they should not: it costs their stage their share at most, they are named, and come back."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.config import Config
from shoal.ids import StepKey
from shoal.model.stage import StageModule
from shoal.pipeline.configured_stage import configured_stage
from shoal.swarm.sample_ranges import count
from shoal.wire.messages.round import Close
from shoal_lab import Cluster, ClusterResult
from shoal_lab.cluster import ClusterServer

from .conftest import MakeCluster, make_config, run_undisturbed

ROUNDS = 4
CONFIG = make_config(diloco={"outer_steps": ROUNDS}, servers={"replicas": 3})
STEPS = CONFIG.diloco.inner_steps


async def run(cluster: Cluster) -> ClusterResult:
    result = await cluster.run()
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    for server in cluster.servers:
        parameters = server.parameters()
        assert parameters.isfinite().all()
        assert hashlib.sha256(parameters.numpy().tobytes()).hexdigest() == result.hashes[server.stage]
        assert server.replica.member.base_round == len(result.records)
    return result


def named(cluster: Cluster, result: ClusterResult) -> list[tuple[Any, ...]]:
    """Who is named in the summary; the counters say as many."""
    suspects = result.summary["suspects"]
    counters = result.summary["counters"]
    for kind in ("not_finite", "clipped", "differed"):
        counted = counters.get(f"round.suspects{{suspicion={kind}}}", 0)
        assert counted == sum(suspect["suspicion"] == kind for suspect in suspects)
    number = {server.peer: index for index, server in enumerate(cluster.servers)}
    for suspect in suspects:
        assert suspect["name"] == f"server {number[suspect['peer']]}@cluster"
    return [(s["round"], s["stage"], number[s["peer"]], s["suspicion"], s["is_member"]) for s in suspects]


def at_close(cluster: Cluster, index: int, round: int, spoil: Callable[[Tensor], None]) -> None:
    """Change a server's parameters when it has done the steps of a round."""
    server = cluster.servers[index]

    def act() -> None:
        parameters = server.parameters()
        spoil(parameters)
        server.replica.compute.averaged.parameters.load(parameters)

    cluster.when(Close, action=act, receiver=server.peer, round=round)


def poison(server: ClusterServer, number: int) -> list[StepKey]:
    """Have a last stage get an input that is not finite in one microbatch of a step; returns where that was."""
    compute, done = server.replica.compute, list[StepKey]()
    loss = compute.loss

    def poisoned(
        key: StepKey, microbatch: int, input: Tensor | None, labels: Tensor, weight: float, *, loss_scale: float
    ) -> Tensor:
        if key.number == number and microbatch == 1 and input is not None:
            done.append(key)
            input = torch.full_like(input, math.nan)
        return loss(key, microbatch, input, labels, weight, loss_scale=loss_scale)

    compute.loss = poisoned  # type: ignore[method-assign]
    return done


@pytest.mark.wrong_arithmetic
async def test_a_microbatch_that_is_not_finite_skips_its_step_everywhere(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:
        hit = poison(cluster.servers[3], number=STEPS + 1)
        result = await run(cluster)
        members = {server.peer: server.stage for server in cluster.servers}
    [key] = hit
    entries = [line for line in result.steps[2] if line.entry.key == key]
    assert [members[line.peer] for line in entries] == [0, 1]
    assert all(line.entry.skipped and line.entry.scale == 0 for line in entries)
    assert not any(line.entry.skipped for lines in result.steps.values() for line in lines if line.entry.key != key)
    assert result.summary["steps_skipped"] == 1
    assert result.summary["suspects"] == []
    # Its samples are recorded, as skipped, and never trained on again.
    [entry, _] = [line.entry for line in entries]
    assert result.records[1].skipped == entry.samples
    assert count(record_range for record in result.records for record_range in record.skipped) == 4
    assert result.audit.skipped == 4
    assert result.audit.steps_lost == {0: 0, 1: 0}


@pytest.mark.wrong_arithmetic
async def test_a_pseudo_gradient_out_of_bounds_is_clipped_and_its_peer_named(make_cluster: MakeCluster) -> None:
    undisturbed = await run_undisturbed(make_cluster, CONFIG)
    async with make_cluster(CONFIG) as cluster:
        at_close(cluster, 2, 2, lambda parameters: parameters.mul_(1e4))
        result = await run(cluster)
        assert named(cluster, result) == [(2, 0, 2, "clipped", True)]
        outcome = result.records[1].stages[0]
        scale = dict(zip(outcome.members, outcome.scales, strict=True))
        assert 0 < scale.pop(cluster.servers[2].peer) < 1e-2
        assert set(scale.values()) == {1.0}
    # It has been carried away by no more than ten lengths of what the others have learnt, and the weights stay.
    assert len(set(outcome.weights)) == 1
    assert [record.stages[1].scales for record in result.records] == [()] * ROUNDS
    assert [stage.hashes for stage in result.records[0].stages] == [s.hashes for s in undisturbed.records[0].stages]
    assert max(result.progress.eval_losses.values()) < 3 * max(undisturbed.progress.eval_losses.values())
    assert result.audit.steps_lost == {0: 0, 1: 0}


@pytest.mark.wrong_arithmetic
async def test_where_no_ratio_is_configured_a_pseudo_gradient_of_any_length_counts(make_cluster: MakeCluster) -> None:
    config = make_config(diloco={"outer_steps": 2, "max_pseudo_gradient_ratio": None}, servers={"replicas": 3})
    async with make_cluster(config) as cluster:
        at_close(cluster, 2, 1, lambda parameters: parameters.mul_(20.0))
        result = await run(cluster)
        assert named(cluster, result) == []
    assert [stage.scales for record in result.records for stage in record.stages] == [()] * 4


@pytest.mark.usual("1")
@pytest.mark.wrong_arithmetic
@pytest.mark.parametrize("replicas", [1, 3])
async def test_a_pseudo_gradient_that_is_not_finite_does_not_count_and_its_replica_takes_the_others_bytes(
    make_cluster: MakeCluster, replicas: int
) -> None:
    config: Config = make_config(diloco={"outer_steps": ROUNDS}, servers={"replicas": replicas})
    async with make_cluster(config) as cluster:
        at_close(cluster, 0, 2, lambda parameters: parameters[:1].fill_(math.nan))
        result = await run(cluster)
        assert named(cluster, result) == [(2, 0, 0, "not_finite", True)]
        peer = cluster.servers[0].peer
    weights = [dict(zip(r.stages[0].members, r.stages[0].weights, strict=True))[peer] for r in result.records]
    assert [weight > 0 for weight in weights] == [True, False, True, True]
    # Its share of the round is lost to its stage, is said to be, and is not trained on again.
    assert result.records[1].stages[0].steps_lost == STEPS
    assert result.audit.steps_lost == {0: STEPS, 1: 0}
    assert result.summary["steps_lost"] == {"0": STEPS, "1": 0}
    assert result.audit.steps == STEPS * replicas * ROUNDS
    # Where it is the only one, its stage stays as it was.
    held = [record.stages[0].hashes for record in result.records]
    assert (held[1] == held[0]) == (replicas == 1)


async def test_a_replica_that_flips_a_bit_again_and_again_is_left_out_named_and_fetches_the_right_bytes(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(CONFIG) as cluster:
        server = cluster.servers[4]
        state = server.replica.member.state
        stage, flips = state.stage, 0

        def flipping(average: Any, *arguments: Any) -> Any:
            nonlocal flips
            if server.replica.member.base_round == 1:
                flips += 1
                average.parameters_M.view(torch.int32)[7] ^= 1 << 22
            return stage(average, *arguments)

        state.stage = flipping  # type: ignore[method-assign]
        result = await run(cluster)
        assert flips == 2, "what differs once is computed once more"
        assert named(cluster, result) == [(2, 0, 4, "differed", False)]
    members = [set(record.stages[0].members) for record in result.records]
    assert [server.peer in each for each in members] == [True, False, True, True]
    assert result.records[1].stages[0].steps_lost == STEPS
    assert result.audit.steps_lost == {0: STEPS, 1: 0}


async def test_a_bit_that_flips_once_costs_nothing_and_is_named(make_cluster: MakeCluster) -> None:
    undisturbed = await run_undisturbed(make_cluster, CONFIG)
    async with make_cluster(CONFIG) as cluster:
        state = cluster.servers[1].replica.member.state
        stage = state.stage

        def flipping(average: Any, *arguments: Any) -> Any:
            state.stage = stage  # type: ignore[method-assign]
            average.parameters_M.view(torch.int32)[7] ^= 1 << 22
            return stage(average, *arguments)

        state.stage = flipping  # type: ignore[method-assign]
        result = await run(cluster)
        assert named(cluster, result) == [(1, 1, 1, "differed", True)]
    assert result.hashes == undisturbed.hashes
    assert result.audit.steps_lost == {0: 0, 1: 0}


@pytest.mark.wrong_arithmetic
async def test_a_server_whose_d_0_is_another_trains_from_the_first_record_on(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[StageModule] = []

    def other_version(*arguments: Any) -> StageModule:
        """The third server to start has libraries that draw other numbers."""
        module = configured_stage(*arguments)
        built.append(module)
        if len(built) == 3:
            with torch.no_grad():
                next(module.parameters()).add_(1e-3)
        return module

    monkeypatch.setattr("shoal.server.replica.configured_stage", other_version)
    async with make_cluster(CONFIG, replicas=[0, 1, 0, 1, 0]) as cluster:
        odd = cluster.servers[2]
        result = await run(cluster)
    members = [outcome.members for record in result.records for outcome in record.stages if outcome.stage == odd.stage]
    assert odd.peer not in members[0]
    assert all(odd.peer in later for later in members[1:])
    assert not [line for line in result.steps[1] if line.peer == odd.peer]
    assert len(set(members[0])) == 2
