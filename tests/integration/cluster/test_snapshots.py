"""A server that is killed goes on from the snapshot that a buddy keeps: its steps are not lost, nor trained twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.config import Config
from shoal.pipeline.replica_log import Applied, Line, Loaded, Resumed, read_replica_log
from shoal.wire.messages.snapshot import AskSnapshot, OfferSnapshot, SnapshotKept
from shoal.wire.messages.step import Forward
from shoal_lab import Cluster, ClusterResult
from shoal_lab.emulation.device_pace import DevicePace

from .conftest import SEQ_LEN, MakeCluster, make_config, make_text, reproduces

STEPS = 8
VICTIM = 1
NUM_TRAIN = 1000
PACES = {number: DevicePace(forward_s=0.01, input_gradient_s=0.01) for number in range(3)}
"""A step lasts long enough for a snapshot to be kept before the next ones are over."""


def snapshots(every: int, rounds: int = 2) -> Config:
    return make_config(diloco={"inner_steps": STEPS, "outer_steps": rounds, "snapshot_every_steps": every})


def killer(cluster: Cluster, then: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Ends the victim at once, and starts it again as the same peer."""

    def kill() -> None:
        cluster.kill_server(VICTIM)
        then()
        cluster._tasks.start_soon(cluster.restart_server, VICTIM)

    return kill


def check(cluster: Cluster, result: ClusterResult, config: Config) -> None:
    """Every sample once, survivors agree, and the run can be computed again from its files."""
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    for server in cluster.servers:
        held = hashlib.sha256(server.parameters().numpy().tobytes()).hexdigest()
        assert held == result.hashes[server.stage]
    reproduces(cluster._log_dir, config, make_text(NUM_TRAIN))


def generation(log_dir: Path, number: int) -> list[Line]:
    """What the victim has written down in one of its generations."""
    return read_replica_log(log_dir / f"replicas/server{VICTIM}.{number}.jsonl")


def resumed_after(log_dir: Path) -> int | None:
    """After how many steps of its round the second generation of the victim goes on."""
    return next((line.commits for line in generation(log_dir, 2) if isinstance(line, Resumed)), None)


def committed_in_round_of_death(log_dir: Path) -> int:
    lines = generation(log_dir, 1)
    last_load = max(index for index, line in enumerate(lines) if isinstance(line, Loaded))
    return sum(isinstance(line, Applied) for line in lines[last_load:])


@pytest.mark.usual("1")
@pytest.mark.parametrize("after", [0, 1])
async def test_a_server_goes_on_from_its_snapshot_as_if_it_had_not_died(make_cluster: MakeCluster, after: int) -> None:
    config = snapshots(every=2)
    async with make_cluster(config, replicas=[0, 1], paces=PACES) as cluster:
        cluster.when(SnapshotKept, action=killer(cluster), receiver=cluster.servers[VICTIM].peer, after=after)
        result = await cluster.run()
        check(cluster, result, config)
        log_dir = cluster._log_dir
    commits = resumed_after(log_dir)
    assert commits is not None
    assert commits >= 2 * (after + 1)
    # Only what came after the snapshot is lost: at most what was committed while it was on its way.
    lost = committed_in_round_of_death(log_dir) - commits
    assert result.audit.steps_lost == {0: 0, 1: lost}
    assert result.records[0].stages[1].weights == (4 * (STEPS - lost) * SEQ_LEN,)
    assert result.audit.samples == 2 * STEPS * 4
    async with make_cluster(config, replicas=[0, 1], paces=PACES) as other:
        undisturbed = await other.run()
    assert (result.hashes == undisturbed.hashes) == (lost == 0)


async def test_without_snapshots_all_steps_of_the_round_are_lost(make_cluster: MakeCluster) -> None:
    config = snapshots(every=0)
    async with make_cluster(config, replicas=[0, 1], paces=PACES) as cluster:
        cluster.when(Forward, action=killer(cluster), receiver=cluster.servers[VICTIM].peer, number=3)
        result = await cluster.run()
        check(cluster, result, config)
    assert result.audit.steps_lost == {0: 0, 1: 3}


async def test_a_server_that_dies_later_fetches_the_record_first(make_cluster: MakeCluster) -> None:
    config = snapshots(every=2, rounds=3)
    async with make_cluster(config, replicas=[0, 1, 1], paces=PACES) as cluster:
        victim, holder, trainer = cluster.servers[VICTIM].peer, cluster.servers[2].peer, cluster.trainer_peer(0)
        # The other replica of the stage gives its state, and trains nothing: all wait for the victim.
        cluster.network.cut(trainer, holder)

        def kill_at_the_next() -> None:
            cluster.when(SnapshotKept, action=killer(cluster), receiver=victim)

        cluster.when(Forward, action=kill_at_the_next, receiver=victim, number=STEPS + 2)
        result = await cluster.run()
        check(cluster, result, config)
        log_dir = cluster._log_dir
    commits = resumed_after(log_dir)
    assert commits is not None
    assert commits >= 2
    lines = generation(log_dir, 2)
    loaded = lines[lines.index(Resumed(1, commits)) - 1]
    assert isinstance(loaded, Loaded)
    assert loaded.round == 1
    assert result.audit.steps_lost == {0: 0, 1: committed_in_round_of_death(log_dir) - commits}


async def test_a_snapshot_whose_bytes_are_not_what_was_sealed_is_not_used(make_cluster: MakeCluster) -> None:
    config = snapshots(every=2)
    async with make_cluster(config, replicas=[0, 1], paces=PACES) as cluster:
        buddy, victim = cluster.servers[0], cluster.servers[VICTIM].peer

        def flip() -> None:
            assert buddy.replica.snapshots is not None
            buddy.replica.snapshots._whole[victim].content[-1] ^= 1

        cluster.when(SnapshotKept, action=killer(cluster, flip), receiver=victim)
        result = await cluster.run()
        check(cluster, result, config)
        log_dir = cluster._log_dir
    assert resumed_after(log_dir) is None
    assert result.audit.steps_lost == {0: 0, 1: committed_in_round_of_death(log_dir)}


@pytest.mark.usual("AskSnapshot")
@pytest.mark.parametrize("kind", [AskSnapshot, OfferSnapshot])
async def test_a_buddy_that_dies_when_it_is_asked_is_not_waited_for(make_cluster: MakeCluster, kind: type) -> None:
    config = snapshots(every=2)
    async with make_cluster(config, replicas=[0, 1, 0], paces=PACES) as cluster:
        victim = cluster.servers[VICTIM].peer
        is_answer = kind is OfferSnapshot

        def kill_buddy() -> None:
            for index in (0, 2):
                buddy = cluster.servers[index].replica.snapshots
                if buddy is not None and victim in buddy._whole:
                    cluster.kill_server(index)

        def wait_for_the_next_generation() -> None:
            ends = {"receiver" if is_answer else "sender": victim}
            cluster.when(kind, action=kill_buddy, **ends)

        cluster.when(SnapshotKept, action=killer(cluster, wait_for_the_next_generation), receiver=victim)
        result = await cluster.run()
        assert (result.audit.duplicates, result.audit.missing) == (0, 0)
        log_dir = cluster._log_dir
        reproduces(log_dir, config, make_text(NUM_TRAIN))
    assert resumed_after(log_dir) is None
    assert result.audit.steps_lost[1] == committed_in_round_of_death(log_dir)
