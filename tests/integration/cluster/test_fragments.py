"""Runs whose rounds average one fragment each: what deaths cost, what comes back, and that all of it is replayed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from shoal.config import Config
from shoal.pipeline.replica_log import Loaded, Resumed, read_replica_log
from shoal.wire.messages.snapshot import SnapshotKept
from shoal.wire.messages.step import Forward
from shoal_lab import Cluster, ClusterResult
from shoal_lab.emulation.device_pace import DevicePace

from .conftest import SEQ_LEN, MakeCluster, make_config, make_text, reproduces
from .test_resuming import good, lost_with_a_checkpoint, resumed

STEPS, ROUNDS, BATCH, NUM_TRAIN = 3, 6, 4, 1000
VICTIM = 3
"""A server of stage 1."""
PER_ROUND = STEPS * BATCH * SEQ_LEN
"""Targets of a trainer in a round."""


def fragments(count: int, **diloco: object) -> Config:
    return make_config(diloco={"inner_steps": STEPS, "outer_steps": ROUNDS, "fragments": count} | diloco)


def killer(cluster: Cluster, victim: int = VICTIM) -> Callable[[], None]:
    """Ends a server at once, and starts it again as the same peer."""

    def kill() -> None:
        cluster.kill_server(victim)
        cluster._tasks.start_soon(cluster.restart_server, victim)

    return kill


def check(cluster: Cluster, result: ClusterResult, config: Config) -> None:
    """Every sample once, survivors agree, and the run can be computed again from its files."""
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert len(result.records) == config.diloco.outer_steps
    for server in cluster.servers:
        if server.process.running:
            base = server.replica.state.base.parameters_N
            assert hashlib.sha256(base.numpy().tobytes()).hexdigest() == result.hashes[server.stage]
    reproduces(cluster._log_dir, config, make_text(NUM_TRAIN))


def weights(result: ClusterResult, stage: int, peer: str) -> list[int | None]:
    """What a server weighs, round by round; None where it is no member."""
    outcomes = [record.stages[stage] for record in result.records]
    return [dict(zip(outcome.members, outcome.weights, strict=True)).get(peer) for outcome in outcomes]


@pytest.mark.parametrize("codec", ["none", "sparse"])
async def test_a_member_weighs_what_it_has_trained_since_its_fragment_was_averaged(
    make_cluster: MakeCluster, codec: str
) -> None:
    config = fragments(2, averaging_compression=codec)
    async with make_cluster(config) as cluster:
        result = await cluster.run()
        check(cluster, result, config)
        sizes = [server.replica.state.base.parameters_N.numel() for server in cluster.servers]
        assert min(sizes) > 4096, "both fragments are there"
        for server in cluster.servers:
            assert weights(result, server.stage, server.peer) == [PER_ROUND] + [2 * PER_ROUND] * (ROUNDS - 1)
            # The last round is one of the first fragment: the second one is still the server's own.
            local, base = server.parameters(), server.replica.state.base.parameters_N
            assert local[:4096].equal(base[:4096])
            assert not local[4096:8192].equal(base[4096:8192])
    assert result.audit.lost_in_part == {}
    assert result.summary["steps_lost_in_part"] == {}


async def test_a_death_costs_what_was_not_averaged_of_earlier_rounds_as_well(make_cluster: MakeCluster) -> None:
    config = fragments(2)
    async with make_cluster(config) as cluster:
        peer = cluster.servers[VICTIM].peer
        cluster.when(Forward, action=killer(cluster), receiver=peer, number=3 * STEPS + 1)
        result = await cluster.run()
        check(cluster, result, config)
        log_dir = cluster._log_dir
    # It dies in round 4, with a step of that, and the fragment of round 4 lacks its steps of round 3.
    assert result.audit.steps_lost == {0: 0, 1: 1}
    assert result.summary["steps_lost_in_part"] == {"1": STEPS}
    found = weights(result, 1, peer)
    assert found[:3] == [PER_ROUND, 2 * PER_ROUND, 2 * PER_ROUND]
    assert found[3] in (None, 0), "it has nothing of what its earlier life has trained"
    generations = [read_replica_log(log_dir / f"replicas/server{VICTIM}.{number}.jsonl") for number in (1, 2)]
    loads = [[line.keeps_rest for line in lines if isinstance(line, Loaded)] for lines in generations]
    assert loads[0] == [False, True, True, True]
    assert loads[1][0] is False


async def test_a_snapshot_brings_back_what_was_not_averaged_yet(make_cluster: MakeCluster) -> None:
    config = fragments(2, inner_steps=8, outer_steps=4, snapshot_every_steps=2)
    paces = {number: DevicePace(forward_s=0.01, input_gradient_s=0.01) for number in range(3)}
    async with make_cluster(config, replicas=[0, 1, 1], paces=paces) as cluster:
        victim, holder, trainer = cluster.servers[1].peer, cluster.servers[2].peer, cluster.trainer_peer(0)
        # The other replica of the stage gives its state, and trains nothing: all wait for the victim.
        cluster.network.cut(trainer, holder)

        def kill_at_the_next() -> None:
            cluster.when(SnapshotKept, action=killer(cluster, 1), receiver=victim)

        cluster.when(Forward, action=kill_at_the_next, receiver=victim, number=2 * 8 + 2)
        result = await cluster.run()
        check(cluster, result, config)
        lines = read_replica_log(cluster._log_dir / "replicas/server1.2.jsonl")
    resumed = next(index for index, line in enumerate(lines) if isinstance(line, Resumed))
    assert lines[resumed - 1].round == 2
    assert result.summary["steps_lost_in_part"] == {}
    lost = result.audit.steps_lost[1]
    # In round 3, and with what it had trained in round 2.
    assert [weight // (BATCH * SEQ_LEN) for weight in weights(result, 1, victim)] == [8, 16, 16 - lost, 16 - lost]


async def test_a_resumed_run_goes_on_from_the_record_in_all_fragments_and_says_what_that_costs(
    make_cluster: MakeCluster,
) -> None:
    config = make_config(
        diloco={"inner_steps": 4, "outer_steps": ROUNDS, "fragments": 2, "averaging_compression": "2bit"},
        health={"lost_state_after_s": 0.3},
        param_mirror={"every_rounds": 1, "keep_last": 3},
    )
    async with make_cluster(config) as cluster:
        await lost_with_a_checkpoint(cluster, 5)
        log_dir = cluster._log_dir
    result, notices = await resumed(config, log_dir, good(log_dir))
    assert notices[-1] == "the inner optimizers of all servers go on from where they were after round 4"
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    per_round = 4 * BATCH * SEQ_LEN
    for stage in range(2):
        assert result.records[4].stages[stage].weights == (per_round, per_round)
        assert result.records[5].stages[stage].weights == (2 * per_round, 2 * per_round)
    # The fragment of round 5 lacks what both replicas of a stage had trained in round 4.
    assert result.summary["steps_lost_in_part"] == {"0": 8, "1": 8}
