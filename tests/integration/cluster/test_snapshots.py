"""A server that is killed goes on from the snapshot that a buddy keeps: its steps are not lost, nor trained twice."""

from __future__ import annotations

import hashlib

import anyio
import pytest

from shoal.testing import Cluster, ClusterResult
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.round import Swapped
from shoal.wire.messages.snapshot import SnapshotChunk, SnapshotKept

from .conftest import MakeCluster, make_config, make_text, reproduces

pytestmark = pytest.mark.anyio

STEPS = 6
EVERY = 2


def config(every: int = EVERY, outer: int = 2):  # type: ignore[no-untyped-def]
    return make_config(diloco={"inner_steps": STEPS, "outer_steps": outer, "snapshot_every_steps": every})


async def run(cluster: Cluster) -> ClusterResult:
    with anyio.fail_after(60):
        return await cluster.run()


def check(cluster: Cluster, result: ClusterResult) -> None:
    """Every sample once, survivors agree, and the run can be computed again."""
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    for server in cluster.servers:
        if server.process.running:
            held = hashlib.sha256(server.parameters().numpy().tobytes()).hexdigest()
            assert held == result.hashes[server.stage]


async def test_the_only_server_of_a_stage_dies_before_the_first_record(make_cluster: MakeCluster) -> None:
    async with make_cluster(config(), replicas=[0, 1]) as cluster:
        peer = cluster.servers[1].peer

        def kill() -> None:
            cluster.kill_server(1)
            cluster._tasks.start_soon(cluster.restart_server, 1)

        cluster.when(SnapshotKept, action=kill, receiver=peer, after=1)
        result = await run(cluster)
        check(cluster, result)
        print(result.audit)
        print(reproduces(cluster._log_dir, config(), make_text(1000)))
