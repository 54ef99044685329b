"""Servers that leave politely: the last ones of a stage leave its state with the client, and nothing of it is lost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest

import shoal
from shoal.runtime.launcher_messages import LastOfStage, ServerMayLeave
from shoal.wire.messages.control import Leave
from shoal.wire.messages.round import Close, CommitRecord, PrepareRecord
from shoal.wire.messages.step import Forward
from shoal.wire.messages.transfer import Chunk
from shoal_lab import Cluster, ClusterResult

from .conftest import MakeCluster, make_config, run_noticed

CONFIG = make_config(diloco={"inner_steps": 4, "outer_steps": 5}, health={"lost_state_after_s": 0.3})
ENDLESS = make_config(diloco={"inner_steps": 4, "outer_steps": 500})
STAGE_1 = (1, 3)
"""Server i serves stage i % 2."""


def soon(cluster: Cluster, call: Callable[[], Awaitable[object]]) -> Callable[[], None]:
    return lambda: cluster._tasks.start_soon(call)


def kept(cluster: Cluster) -> list[tuple[str, int]]:
    """Who may leave since the client keeps its stage, and as of which round."""
    return [(str(peer), said.round) for peer, said in cluster.said if isinstance(said, ServerMayLeave) and said.is_kept]


def check(result: ClusterResult) -> None:
    assert (result.summary["stages_restored"], result.audit.duplicates, result.audit.missing) == ([], 0, 0)
    assert all(stage.restored is None for record in result.records for stage in record.stages)
    assert len(result.records) == 5
    assert result.summary["model_round"] == 5


@pytest.mark.usual("leaving0-True")
@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("leaving", [STAGE_1, (0, 1, 2, 3)])
async def test_a_stage_whose_last_servers_have_left_goes_on_from_what_the_client_keeps(
    make_cluster: MakeCluster, leaving: tuple[int, ...], comes_back: bool
) -> None:
    async with make_cluster(CONFIG) as cluster:

        async def leave() -> None:
            await cluster.leave_servers(*leaving)
            for index in leaving:
                # As the same peers, which have it no more, or as new ones.
                await (cluster.restart_server(index) if comes_back else cluster.start_server(index % 2))

        cluster.when(Forward, action=soon(cluster, leave), receiver=cluster.servers[3].peer, number=9)
        result, notices = await run_noticed(cluster)
    check(result)
    stages = {index % 2 for index in leaving}
    assert {
        stage for stage in (0, 1) if any(f"last servers of stage {stage} leave" in text for text in notices)
    } == stages
    assert not any("is lost" in notice for notice in notices)
    assert kept(cluster), (cluster.said, notices)


async def test_a_server_that_is_not_the_last_of_its_stage_leaves_at_once(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:

        async def leave() -> None:
            await cluster.leave_servers(1)

        cluster.when(Forward, action=soon(cluster, leave), receiver=cluster.servers[1].peer, number=9)
        result, notices = await run_noticed(cluster)
    check(result)
    assert [type(said) for _, said in cluster.said] == [ServerMayLeave]
    assert kept(cluster) == []
    [incident] = result.summary["incidents"]
    assert (incident["kind"], incident["cause"], incident["stage"]) == ("server", "left", 1)
    assert any("(stage 1) leaves: its user wants it to" in notice for notice in notices)
    assert any(" has left: " in notice for notice in notices)
    assert not any("is gone" in notice for notice in notices)
    assert not any("kept" in notice for notice in notices)


@pytest.mark.usual("PrepareRecord")
@pytest.mark.parametrize("kind", [Close, PrepareRecord, CommitRecord])
async def test_a_record_that_is_committed_while_a_stage_is_handed_over_is_the_one_that_is_kept(
    make_cluster: MakeCluster, kind: type
) -> None:
    async with make_cluster(CONFIG) as cluster:
        receiver = cluster.servers[3].peer

        async def leave() -> None:
            await cluster.leave_servers(*STAGE_1)
            await cluster.start_server(1)

        # The client's answer and its next order for the round are on their way at the same time.
        cluster.when(kind, action=soon(cluster, leave), receiver=receiver, after=2 if kind is Close else 1)
        result, _ = await run_noticed(cluster)
    check(result)
    [(_, round), *_] = kept(cluster)
    assert round >= 2


async def test_a_client_that_dies_with_what_it_keeps_has_lost_it_and_says_so(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:

        async def leave() -> None:
            await cluster.leave_servers(*STAGE_1)
            cluster.kill_client()
            await cluster.start_server(1)

        cluster.when(Forward, action=soon(cluster, leave), receiver=cluster.servers[3].peer, number=9)
        result = await cluster.run()
    [restored] = result.summary["stages_restored"]
    assert restored["stage"] == 1


async def test_a_run_that_ends_while_the_client_keeps_a_stage_leaves_its_model(make_cluster: MakeCluster) -> None:
    async with make_cluster(ENDLESS) as cluster:

        async def leave() -> None:
            await cluster.leave_servers(0, 1, 2, 3)
            cluster.client.stop()

        cluster.when(Forward, action=soon(cluster, leave), receiver=cluster.servers[3].peer, number=9)
        result, _ = await run_noticed(cluster)
        assert result.summary["model_round"] == result.records[-1].round
        shoal.load_model(cluster.host.log_dir / "model")


@pytest.mark.slow
async def test_without_a_client_the_last_server_says_that_its_state_would_be_lost(make_cluster: MakeCluster) -> None:
    async with make_cluster(ENDLESS) as cluster:
        client = cluster.client_peer

        async def leave() -> None:
            with anyio.move_on_after(5):
                await cluster.leave_servers(*STAGE_1)
            cluster.client.stop()

        def act() -> None:
            for index in STAGE_1:
                cluster.network.cut(cluster.servers[index].peer, client)
            cluster._tasks.start_soon(leave)

        cluster.when(Forward, action=act, receiver=cluster.servers[3].peer, number=9)
        await run_noticed(cluster)
    assert {type(said) for _, said in cluster.said} == {LastOfStage}
    assert {(said.stage, said.problem) for _, said in cluster.said} == {(1, "no client can be reached")}


async def test_a_donor_that_is_lost_in_the_hand_over_is_replaced_by_the_other_one(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:

        async def leave() -> None:
            with anyio.move_on_after(20):
                await cluster.leave_servers(*STAGE_1)
            await cluster.start_server(1)

        cluster.when(Chunk, action=lambda: cluster.kill_server(1), sender=cluster.servers[1].peer)
        cluster.when(Forward, action=soon(cluster, leave), receiver=cluster.servers[3].peer, number=9)
        cluster.when(Leave, action=lambda: None)
        result, _ = await run_noticed(cluster)
    check(result)
