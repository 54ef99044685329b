"""All replicas of a stage are lost: training stops, says so, and goes on with what is left, which the record names."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable

import anyio
import pytest

from shoal.ids import PeerId
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.round import Join, PrepareRecord, RecordPrepared, Restore, Staged
from shoal.wire.messages.step import Forward
from shoal_lab import Cluster, ClusterResult

from .conftest import MakeCluster, make_config, run_noticed

CONFIG = make_config(diloco={"inner_steps": 4, "outer_steps": 5}, health={"lost_state_after_s": 0.3})
STAGE_1 = (1, 3)
"""Server i serves stage i % 2."""


def later(cluster: Cluster, call: Callable[[], Awaitable[object]]) -> Callable[[], None]:
    return lambda: cluster._tasks.start_soon(call)


def kill(cluster: Cluster, indices: Iterable[int], *, start_again: bool = True) -> Callable[[], None]:
    """End servers at once, and start them again as the same peers."""

    async def restart() -> None:
        for index in indices:
            await cluster.restart_server(index)

    def act() -> None:
        for index in indices:
            cluster.kill_server(index)
        if start_again:
            cluster._tasks.start_soon(restart)

    return act


class Holder:
    """The second server of stage 1, which can be cut off from everybody while it lives."""

    def __init__(self, cluster: Cluster) -> None:
        self.peer = cluster.servers[3].peer
        self._cluster = cluster
        self._others = [server.peer for server in cluster.servers if server.peer != self.peer]
        self._others += [cluster.client_peer, cluster.trainer_peer(0), cluster.trainer_peer(1)]

    def cut(self) -> None:
        for other in self._others:
            self._cluster.network.cut(self.peer, other)

    def heal(self) -> None:
        for other in self._others:
            self._cluster.network.heal(self.peer, other)
        self._cluster.client._membership.found(self.peer)


def check(cluster: Cluster, result: ClusterResult) -> None:
    """Every sample once, and every server that is there has the last record's bytes."""
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert len(result.records) == 5
    for server in cluster.servers:
        if server.process.running and server.replica.member.base_round == 5:
            held = hashlib.sha256(server.parameters().numpy().tobytes()).hexdigest()
            assert held == result.hashes[server.stage]


def restored(result: ClusterResult) -> list[tuple[int, int, int]]:
    """(round, stage, the round that the stage's bytes were from) of each restoration that a record names."""
    return [
        (record.round, outcome.stage, outcome.restored.round)
        for record in result.records
        for outcome in record.stages
        if outcome.restored is not None
    ]


def check_said(result: ClusterResult, notices: list[str], stage: int, rounds: str) -> None:
    text = "\n".join(notices)
    assert f"training has stopped: no server serves stage {stage}" in text
    assert f"the state of stage {stage} is lost" in text
    assert f"what it learnt in {rounds} is gone, and it starts again from its initial parameters" in text
    assert f"stage {stage} is served again: training goes on" in text


async def test_all_replicas_of_a_stage_die_in_training_and_come_back_empty(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:
        initial = cluster.servers[1].replica.member.hashes
        cluster.when(Forward, action=kill(cluster, STAGE_1), receiver=cluster.servers[3].peer, number=10)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    assert restored(result) == [(3, 1, 0)]
    outcome = result.records[2].stages[1]
    assert outcome.restored is not None
    assert outcome.restored.hashes == initial
    check_said(result, notices, 1, "rounds 1 to 2")
    [said] = result.summary["stages_restored"]
    assert (said["stage"], said["in_round"], said["lost_rounds"]) == (1, 3, [1, 2])
    # Two rounds of eight steps, and what was trained in round 3 before: nothing of it is trained again.
    assert result.audit.steps_lost == {0: 0, 1: 16 + outcome.steps_lost}
    assert outcome.steps_lost > 0
    assert result.audit.samples == 5 * 8 * 4


@pytest.mark.usual("Staged", "RecordPrepared")
@pytest.mark.parametrize("kind", [Join, Staged, PrepareRecord, RecordPrepared])
async def test_all_replicas_of_a_stage_die_in_the_averaging(make_cluster: MakeCluster, kind: type) -> None:
    async with make_cluster(CONFIG) as cluster:
        ends = {"receiver" if kind is PrepareRecord else "sender": cluster.servers[3].peer}
        which = {"after": 2} if kind is PrepareRecord else {"round": 3}
        cluster.when(kind, action=kill(cluster, STAGE_1), **ends, **which)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    # After PrepareRecord the record may have been committed: it is finished, and the stage is restored on top of it.
    finished = kind in (PrepareRecord, RecordPrepared)
    assert restored(result) == [(4, 1, 0) if finished else (3, 1, 0)]
    check_said(result, notices, 1, "rounds 1 to 3" if finished else "rounds 1 to 2")
    assert result.audit.samples == 5 * 8 * 4
    assert result.audit.steps_lost == {0: 0, 1: 24}


async def test_a_stage_is_lost_before_the_first_record(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:
        cluster.when(Forward, action=kill(cluster, STAGE_1), receiver=cluster.servers[3].peer, number=2)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    # The state of D_0 follows from the configuration: nothing is lost but steps.
    assert restored(result) == []
    assert not any("is lost" in notice for notice in notices)
    assert result.audit.steps_lost[1] > 0


async def test_every_server_dies_and_the_run_goes_on_from_the_initial_parameters(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:
        cluster.when(Forward, action=kill(cluster, range(4)), receiver=cluster.servers[3].peer, number=10)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    assert restored(result) == [(3, 0, 0), (3, 1, 0)]
    # Said of both at once, or of the one after the other: whose loss is heard first is chance.
    assert any("has stopped: no server serves stage" in notice for notice in notices)
    assert any("stages 0, 1" in notice for notice in notices)


async def test_servers_that_nobody_knows_take_the_place_of_a_lost_stage_after_a_while(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(CONFIG) as cluster:

        async def join() -> None:
            await cluster.start_server(1)
            await cluster.start_server(1)

        def act() -> None:
            kill(cluster, STAGE_1, start_again=False)()
            later(cluster, join)()

        cluster.when(Forward, action=act, receiver=cluster.servers[3].peer, number=10)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    assert restored(result) == [(3, 1, 0)]
    check_said(result, notices, 1, "rounds 1 to 2")
    assert {PeerId("server4"), PeerId("server5")} == set(result.records[-1].stages[1].members)


@pytest.mark.parametrize("is_in_time", [True, False])
async def test_a_holder_that_comes_back_gives_its_state_unless_the_next_record_is_there(
    make_cluster: MakeCluster, is_in_time: bool
) -> None:
    patience_s = 30.0 if is_in_time else 0.3
    config = CONFIG.model_copy(update={"health": CONFIG.health.model_copy(update={"lost_state_after_s": patience_s})})
    async with make_cluster(config) as cluster:
        holder = Holder(cluster)

        async def restart() -> None:
            await cluster.restart_server(1)
            if is_in_time:
                await anyio.sleep(0.1)
                holder.heal()

        def act() -> None:
            holder.cut()
            cluster.kill_server(1)
            cluster._tasks.start_soon(restart)

        cluster.when(Forward, action=act, receiver=holder.peer, number=10)
        if not is_in_time:
            cluster.when(StartRound, action=holder.heal, round=4)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    assert restored(result) == ([] if is_in_time else [(3, 1, 0)])
    assert any("the state of stage 1 is lost" in notice for notice in notices) is not is_in_time
    if is_in_time:
        assert result.audit.steps_lost[1] <= 3  # those of the one that was killed
    else:
        assert result.audit.steps_lost[1] >= 16


async def test_a_holder_that_comes_back_before_the_quorums_puts_its_state_in_the_place_of_the_initial_one(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(CONFIG) as cluster:
        holder = Holder(cluster)

        def act() -> None:
            holder.cut()
            kill(cluster, [1])()

        cluster.when(Forward, action=act, receiver=holder.peer, number=10)
        cluster.when(Restore, action=holder.heal)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    assert restored(result) == []
    assert any("the state of stage 1 is lost" in notice for notice in notices)
    assert any("come back with the state of stage 1" in notice for notice in notices)
    assert result.summary["stages_restored"] == []


async def test_a_second_newcomer_of_the_round_starts_from_the_same_bytes(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:

        async def second() -> None:
            await cluster.restart_server(3)

        def act() -> None:
            kill(cluster, STAGE_1, start_again=False)()
            later(cluster, first)()

        async def first() -> None:
            await cluster.restart_server(1)

        cluster.when(Forward, action=act, receiver=cluster.servers[3].peer, number=10)
        cluster.when(Forward, action=later(cluster, second), receiver=cluster.servers[1].peer, number=11)
        result, _ = await run_noticed(cluster)
        check(cluster, result)
    assert restored(result)[0][:2] == (3, 1)
