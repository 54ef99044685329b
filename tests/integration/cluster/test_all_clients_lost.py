"""The host of the only client is lost at a chosen message; another host's client continues the run from the servers."""

from __future__ import annotations

import anyio
import pytest

from shoal.config import Config
from shoal.control.records import RunRecord
from shoal.errors import RoundAborted
from shoal.swarm.records import GENERATIONS_APART
from shoal.swarm.sample_ranges import merge
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.control import RunOver, StartRound, StepReport, TrainerDone
from shoal.wire.messages.feed import Lease
from shoal.wire.messages.round import Close, CommitRecord, Join, PrepareRecord, Propose, RecordPrepared, Staged, Swapped
from shoal.wire.messages.step import Commit, Open, Prepared
from shoal_lab import Cluster, ClusterResult
from shoal_lab.client_host import ClientHost

from .conftest import MakeCluster, make_config

INNER, OUTER, SAMPLES_PER_STEP = 4, 4, 4
# From the fourth round of a client on a boundary is not waited for longer than usual, and a busy machine stalls.


def config_of(*, deterministic: bool) -> Config:
    return make_config(run={"deterministic": deterministic}, diloco={"inner_steps": INNER, "outer_steps": OUTER})


async def check_end(cluster: Cluster, result: ClusterResult) -> None:
    """The run has come to its end, no sample was used twice or left out, and all servers agree."""
    summary = result.summary
    assert (summary["exit"], summary["outer_rounds"]) == ("done", OUTER)
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    for server in cluster.servers:
        assert server.replica.member.base_round == OUTER
        assert server.replica.member.hashes.parameters == summary["hashes"][str(server.stage)]


async def check(cluster: Cluster, result: ClusterResult, lost: ClientHost) -> None:
    """The same, and the records of both hosts together are one chain."""
    await check_end(cluster, result)
    before = (await lost.result("failed")).records
    together = {record.round: record for record in (*before, *result.records)}
    assert sorted(together) == list(range(1, OUTER + 1))
    used: list[SampleRange] = []
    for round, record in sorted(together.items()):
        assert record.round == 1 or record.ballot >= together[round - 1].ballot
        assert record.recorded == merge(used), "a record alone says which samples are used"
        used += [*record.samples, *record.skipped]
    assert sum(map(len, used)) == len({(u.pass_number, i) for u in used for i in range(u.start, u.stop)})
    assert result.summary["samples_before"] + result.audit.samples == sum(map(len, used))
    for server in cluster.servers:
        assert server.replica.member.coordinator == cluster.client_peer != lost.identity.peer_id


MOMENTS = [
    (StartRound, 0),  # nothing was ever trained
    (Open, 1),
    (Lease, 9),
    (Open, 9),
    (Prepared, 11),
    (Commit, 13),
    (StepReport, 6),
    (TrainerDone, 3),
    (Close, 4),
    (Join, 5),
    (Propose, 4),
    (Staged, 5),
    (PrepareRecord, 6),
    (RecordPrepared, 5),
    (RecordPrepared, 7),
    (CommitRecord, 5),  # some have heard that it is committed
    (Swapped, 7),
    (StartRound, 8),
    (TrainerDone, 9),
]


@pytest.mark.usual("False-Commit-13", "False-CommitRecord-5")
@pytest.mark.parametrize(("kind", "after"), MOMENTS, ids=[f"{kind.__name__}-{after}" for kind, after in MOMENTS])
@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_another_host_continues_a_run_whose_client_host_is_lost(
    make_cluster: MakeCluster, kind: type, after: int, deterministic: bool
) -> None:
    async with make_cluster(config_of(deterministic=deterministic)) as cluster:
        lost = cluster.host
        cluster.when(kind, action=cluster.kill_client_host, after=after)
        result = await cluster.run()
        assert cluster.host is not lost
        await check(cluster, result, lost)


async def test_the_summary_says_which_rounds_it_is_about(make_cluster: MakeCluster) -> None:
    async with make_cluster(config_of(deterministic=True)) as cluster:
        lost = cluster.host
        cluster.when(Commit, action=cluster.kill_client_host, after=2 * INNER * 2 * 2 + 3)
        result = await cluster.run()
        await check(cluster, result, lost)
        records = {record.round: record for record in result.records}
    # Two rounds were the lost host's; the third ended with the steps that it had, and the next one is whole.
    assert result.summary["first_round_seen"] == 3
    assert result.summary["samples_before"] == 2 * 2 * INNER * SAMPLES_PER_STEP
    assert 0 < sum(map(len, records[3].samples)) < 2 * INNER * SAMPLES_PER_STEP
    assert sum(map(len, records[4].samples)) == 2 * INNER * SAMPLES_PER_STEP
    assert list(result.progress.eval_losses) == [3, 4]
    assert {line.entry.key.generation for line in result.steps[4]} == {GENERATIONS_APART + 2}
    assert not (cluster.host.log_dir / "steps" / "round_0002.jsonl").exists()


async def test_a_run_outlives_two_hosts_and_a_client_that_is_started_again(make_cluster: MakeCluster) -> None:
    async with make_cluster(config_of(deterministic=False)) as cluster:
        first = cluster.host
        cluster.when(Open, action=cluster.kill_client_host, number=5)
        cluster.when(Close, action=lambda: cluster.kill_client(), round=2)
        cluster.when(Open, action=cluster.kill_client_host, number=9)
        result = await cluster.run()
        await check_end(cluster, result)
    assert cluster.host.log_dir.name.endswith("host2")
    assert result.records[-1].ballot.peer == cluster.client_peer != first.identity.peer_id
    starts = [line.entry.key.generation // GENERATIONS_APART for line in result.steps[4]]
    assert set(starts) == {2}


async def wait_beside(cluster: Cluster, hosts: list[ClientHost], ended: list[ClientHost]) -> None:
    """Start another host's client beside the one that trains, and run it to its end."""
    hosts.append(cluster.start_client_host(len(hosts) + 1))
    if await hosts[-1].run_client():
        ended.append(hosts[-1])


async def test_a_client_that_waits_leaves_the_run_alone_and_ends_with_it(make_cluster: MakeCluster) -> None:
    async with make_cluster(config_of(deterministic=True)) as cluster:
        hosts: list[ClientHost] = []
        ended: list[ClientHost] = []
        cluster.when(Open, action=lambda: cluster._tasks.start_soon(wait_beside, cluster, hosts, ended), number=5)
        # It is killed while it waits, and waits again.
        cluster.when(Open, action=lambda: hosts[0].kill_client(), number=13)
        result = await cluster.run()
        await check_end(cluster, result)
        assert [record.ballot.number for record in result.records] == [1] * OUTER, "nobody else has taken a ballot"
        assert not hosts[0].client.has_turn
        assert not ended
        # The registry's word that it has ended would not do.
        cluster.announce(cluster.client_peer, RunRecord("cluster", 2, 0.0, ended=True))
        await anyio.wait_all_tasks_blocked()
        assert not ended
        cluster.host.client_process.endpoint.post(hosts[0].identity.peer_id, RunOver(False, ""))
        while not ended:
            await cluster.device.run(int)
        summary = (await hosts[0].result("done")).summary
    assert (summary["first_round_seen"], summary["outer_rounds"], summary["steps"]) == (0, 0, 0)


async def test_of_two_clients_that_wait_the_first_takes_over_and_then_the_second(make_cluster: MakeCluster) -> None:
    async with make_cluster(config_of(deterministic=False)) as cluster:
        hosts: list[ClientHost] = []
        ended: list[ClientHost] = []
        for number in (1, 2):
            cluster.when(
                Open, action=lambda: cluster._tasks.start_soon(wait_beside, cluster, hosts, ended), number=number
            )
        cluster.when(Open, action=lambda: cluster.host.kill(), number=6)
        cluster.when(Open, action=lambda: hosts[0].kill(), number=14)
        assert not await cluster.host.run_client()
        while not ended:
            await cluster.device.run(int)
        assert ended == [hosts[1]]
        cluster.host = hosts[1]
        result = await cluster.result()
        await check_end(cluster, result)
        ballots = [record.ballot.peer for record in (await hosts[0].result("failed")).records[1:]]
        assert set(ballots) == {hosts[0].identity.peer_id}


async def test_a_client_that_was_cut_off_steps_down_and_ends_nothing(make_cluster: MakeCluster) -> None:
    async with make_cluster(config_of(deterministic=False)) as cluster:
        first = cluster.host
        mine = [first.identity.peer_id, first.trainer_peer(0), first.trainer_peer(1)]
        others = [*(server.peer for server in cluster.servers)]
        second: list[ClientHost] = []
        ended: list[ClientHost] = []

        async def take_over() -> None:
            second.append(cluster.start_client_host(1))
            others.append(second[0].identity.peer_id)
            cluster.network.cut(mine[0], others[-1])
            assert await second[0].run_client()
            ended.append(second[0])

        def cut_off() -> None:
            for here in mine:
                for there in others:
                    cluster.network.cut(here, there)
            cluster._tasks.start_soon(take_over)

        def heal() -> None:
            for here in mine:
                for there in others:
                    cluster.network.heal(here, there)

        cluster.when(Open, action=cut_off, number=5)
        cluster.when(Open, action=heal, number=9)
        with pytest.raises(ExceptionGroup) as raised:
            await first.run_client()
        while not ended:
            await cluster.device.run(int)
        assert raised.group_contains(RoundAborted, match="has taken the run over")
        cluster.host = second[0]
        await check(cluster, await cluster.result(), first)
