"""Runs whose rounds end while their averages are on their way already: weights, what deaths cost, and replays."""

from __future__ import annotations

import pytest

from shoal.averaging.member import RoundMember
from shoal.config import Config
from shoal.pipeline.replica_log import Resumed, read_replica_log
from shoal.wire.messages.snapshot import SnapshotKept
from shoal.wire.messages.step import Forward
from shoal_lab import ClusterResult
from shoal_lab.emulation.device_pace import DevicePace

from .conftest import SEQ_LEN, MakeCluster, make_config
from .test_fragments import BATCH, VICTIM, check, killer, weights
from .test_resuming import good, lost_with_a_checkpoint, resumed

STEPS, OVERLAP, ROUNDS = 4, 1, 5
PER_STEP = BATCH * SEQ_LEN
"""Targets of a trainer in a step."""


def overlapping(**diloco: object) -> Config:
    """A round of a replica is cut after three of its four steps."""
    values = {"inner_steps": STEPS, "outer_steps": ROUNDS, "overlap_steps": OVERLAP, "averaging_compression": "int8"}
    return make_config(diloco=values | diloco)


def steps_weighed(result: ClusterResult, stage: int, peer: str) -> list[int | None]:
    return [None if weight is None else weight // PER_STEP for weight in weights(result, stage, peer)]


@pytest.mark.parametrize(
    ("diloco", "due"),
    [
        ({}, [3, 4, 4, 4, 5]),
        ({"overlap_merge": "carry", "averaging_compression": "sparse"}, [3, 4, 4, 4, 5]),
        ({"fragments": 2, "overlap_steps": 3}, [1, 5, 8, 8, 11]),
    ],
)
async def test_a_round_averages_what_was_trained_up_to_its_cut_and_the_last_one_all(
    make_cluster: MakeCluster, diloco: dict[str, object], due: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = overlapping(**diloco)
    told: list[tuple[str, int]] = []
    cut = RoundMember.cut

    def tells(member: RoundMember, round: int, num_targets: int) -> None:
        told.append((member.endpoint.peer_id, round))
        cut(member, round, num_targets)

    monkeypatch.setattr(RoundMember, "cut", tells)
    async with make_cluster(config) as cluster:
        result = await cluster.run()
        check(cluster, result, config)
        for server in cluster.servers:
            assert steps_weighed(result, server.stage, server.peer) == due
            base = server.replica.state.base.parameters_N
            assert server.parameters().equal(base) is (config.diloco.fragments == 1), (
                "nothing is left of the last round"
            )
        peers = [server.peer for server in cluster.servers]
    assert sorted(told) == sorted((peer, round) for peer in peers for round in range(1, ROUNDS)), "each was cut once"
    assert result.audit.lost_in_part == {}


async def test_a_death_behind_the_cut_costs_the_round_and_what_was_behind_the_last_cut(
    make_cluster: MakeCluster,
) -> None:
    config = overlapping()
    async with make_cluster(config) as cluster:
        peer = cluster.servers[VICTIM].peer
        # Behind the cut of round 3: its first three steps are encoded, and the others may have them.
        cluster.when(Forward, action=killer(cluster), receiver=peer, number=2 * STEPS + 3)
        result = await cluster.run()
        check(cluster, result, config)
    # It has committed three steps of round 3, and has one of round 2 in no average.
    assert result.audit.steps_lost == {0: 0, 1: 3}
    assert result.summary["steps_lost_in_part"] == {"1": OVERLAP}
    found = steps_weighed(result, 1, peer)
    assert found[:2] == [3, 4]
    assert found[2] in (None, 0, 1), "it has nothing of what its earlier life has trained"


@pytest.mark.parametrize("is_cut", [False, True])
async def test_a_snapshot_is_of_before_the_cut_and_brings_back_what_was_behind_the_last_one(
    make_cluster: MakeCluster, is_cut: bool
) -> None:
    config = overlapping(inner_steps=8, outer_steps=4, overlap_steps=4, snapshot_every_steps=1)
    paces = {number: DevicePace(forward_s=0.01, input_gradient_s=0.01) for number in range(3)}
    async with make_cluster(config, replicas=[0, 1, 1], paces=paces) as cluster:
        victim, holder, trainer = cluster.servers[1].peer, cluster.servers[2].peer, cluster.trainer_peer(0)
        # The other replica of the stage gives its state, and trains nothing: all wait for the victim.
        cluster.network.cut(trainer, holder)
        kill = killer(cluster, 1)

        def kill_at_the_next() -> None:
            cluster.when(SnapshotKept, action=kill, receiver=victim)

        # Six steps later it is cut, and snapshots of before that are kept.
        number, action = (2 * 8 + 6, kill) if is_cut else (2 * 8 + 1, kill_at_the_next)
        cluster.when(Forward, action=action, receiver=victim, number=number)
        result = await cluster.run()
        check(cluster, result, config)
        lines = read_replica_log(cluster._log_dir / "replicas/server1.2.jsonl")
    [went_on] = [line for line in lines if isinstance(line, Resumed)]
    assert 0 < went_on.commits < 4
    assert result.summary["steps_lost_in_part"] == {}
    lost = result.audit.steps_lost[1]
    assert lost == 6 - went_on.commits if is_cut else lost <= 2
    # Four steps up to each cut, and four behind the last one.
    done = 8 - lost
    assert steps_weighed(result, 1, victim) == [4, 8, 4 + min(4, done), max(0, done - 4) + 8]


async def test_a_resumed_run_goes_on_without_what_was_behind_the_cut_and_says_so(make_cluster: MakeCluster) -> None:
    config = make_config(
        diloco={"inner_steps": 4, "outer_steps": 6, "overlap_steps": 2, "averaging_compression": "2bit"},
        health={"lost_state_after_s": 0.3},
        param_mirror={"every_rounds": 1, "keep_last": 3},
    )
    async with make_cluster(config) as cluster:
        await lost_with_a_checkpoint(cluster, 5)
        log_dir = cluster._log_dir
    result, _ = await resumed(config, log_dir, good(log_dir))
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    for stage in range(2):
        assert result.records[4].stages[stage].weights == (2 * PER_STEP, 2 * PER_STEP)
        assert result.records[5].stages[stage].weights == (6 * PER_STEP, 6 * PER_STEP)
    assert result.summary["steps_lost_in_part"] == {"0": 4, "1": 4}
