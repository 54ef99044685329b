"""Servers of a cluster go where they are needed: ordered once, in the same process, with the state of that stage."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.alongside import until

from shoal.averaging.state_sync import StateSync
from shoal.ids import PeerId
from shoal.server.replica import LocalReplica
from shoal.swarm.move_orders import MoveOrders
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.round import Move, Moving
from shoal.wire.messages.step import Commit
from shoal_lab import Cluster, ClusterResult

from .conftest import MakeCluster, make_config


class Orders:
    """What the client and the servers of a cluster say about moves, in order."""

    def __init__(self, cluster: Cluster) -> None:
        self.said: list[tuple[object, ...]] = []
        deliver = cluster.network.before_delivery
        assert deliver is not None

        def look(sender: PeerId, receiver: PeerId, message: object) -> None:
            match message:
                case Move(_, _, stage, urgent):
                    self.said.append(("move", receiver, stage, urgent))
                case Moving(_, stage, refused):
                    self.said.append(("refuses" if refused else "goes", sender, stage))
            deliver(sender, receiver, message)

        cluster.network.before_delivery = look

    @property
    def sent(self) -> list[tuple[object, ...]]:
        return list(dict.fromkeys(entry for entry in self.said if entry[0] == "move"))


def members(result: ClusterResult, round: int, stage: int) -> set[str]:
    return set(result.records[round - 1].stages[stage].members)


def kill_in_round(cluster: Cluster, index: int, round: int) -> None:
    """Kill a server in the middle of its round."""
    peer = cluster.servers[index].peer
    cluster.when(Commit, action=lambda: cluster.kill_server(index), receiver=peer, number=4 * (round - 1) + 1)


def check_agreement(cluster: Cluster, result: ClusterResult) -> None:
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    for server in cluster.servers:
        if server.process.running:
            assert server.replica.member.hashes.parameters == result.hashes[server.stage]


async def test_a_gap_is_closed_by_one_server_of_the_strongest_stage_after_the_record(
    make_cluster: MakeCluster,
) -> None:
    config = make_config(diloco={"outer_steps": 10})
    async with make_cluster(config, replicas=[0, 0, 0, 1, 1], pinned=False) as cluster:
        old = [weakref.ref(server.replica.compute) for server in cluster.servers]
        orders = Orders(cluster)
        kill_in_round(cluster, 4, round=2)
        result = await cluster.run()
        assert [server.stage for server in cluster.servers[:4]] == [0, 0, 1, 1]
        check_agreement(cluster, result)
        gc.collect()
        # The youngest went, and only its memory of stage 0 is gone.
        assert [ref() is None for ref in old] == [False, False, True, False, False]
    assert orders.sent == [("move", "server2", 1, False)]
    assert result.summary["servers_moved"] == 1
    assert [members(result, round, 0) for round in (2, 3)] == [
        {"server0", "server1", "server2"},
        {"server0", "server1"},
    ]
    assert members(result, 10, 1) == {"server2", "server3"}
    # It lost nothing: it had joined the round before it went. And a move is no failure.
    assert result.audit.steps_lost[0] == 0
    assert [failover["kind"] for failover in result.summary["failovers"]] == ["server"]
    # There are two pipelines again, and both replicas of stage 1 train.
    assert {line.peer for line in result.steps[10] if line.stage == 1} == {"server2", "server3"}


async def test_servers_that_were_given_their_stage_stay(make_cluster: MakeCluster) -> None:
    config = make_config(diloco={"outer_steps": 4})
    async with make_cluster(config, replicas=[0, 0, 0, 1, 1], pinned=True) as cluster:
        orders = Orders(cluster)
        kill_in_round(cluster, 4, round=2)
        result = await cluster.run()
        check_agreement(cluster, result)
    assert orders.said == []
    assert members(result, 4, 0) == {"server0", "server1", "server2"}


async def test_a_server_moves_at_once_when_a_stage_has_nobody_and_training_goes_on_in_the_same_round(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(make_config(), replicas=[0, 0, 1], pinned=False) as cluster:
        orders = Orders(cluster)
        kill_in_round(cluster, 2, round=1)
        result = await cluster.run()
        assert [server.stage for server in cluster.servers[:2]] == [0, 1]
        check_agreement(cluster, result)
    # Everybody can compute D_0, so the mover has its state.
    assert orders.sent == [("move", "server1", 1, True)]
    assert members(result, 1, 1) == {"server1"}
    assert len(result.records) == 3
    assert result.progress.steps >= 3 * 4


async def test_a_mover_whose_stage_nobody_holds_waits_for_a_holder_that_comes_back(make_cluster: MakeCluster) -> None:
    config = make_config(diloco={"outer_steps": 5})
    async with make_cluster(config, replicas=[0, 0, 1], pinned=False) as cluster:
        orders = Orders(cluster)
        frozen = cluster.servers[2]
        others = [*(server.peer for server in cluster.servers[:2]), cluster.client_peer, cluster.trainer_peer(0)]

        def freeze() -> None:
            for peer in others:
                cluster.network.cut(frozen.peer, peer)

        async def wake() -> None:
            # It has built its replica and looks for the state; nobody takes it for a holder of either stage.
            await until(lambda: cluster.servers[1].stage == 1)
            assert cluster.servers[1].replica.member.offered_round == -1
            assert cluster.client._homes.usable({}).replica(cluster.servers[1].peer) is None
            for peer in others:
                cluster.network.heal(frozen.peer, peer)
            frozen.monitor.announcer.announce(frozen.replica)  # as it does every few seconds

        cluster.when(StartRound, action=freeze, round=3)
        cluster.when(StartRound, action=_task(cluster, wake), round=3)
        result = await cluster.run()
        assert [server.stage for server in cluster.servers] == [0, 1, 1]
        check_agreement(cluster, result)
    assert orders.sent == [("move", "server1", 1, True)]
    assert members(result, 5, 1) == {"server1", "server2"}
    assert members(result, 5, 0) == {"server0"}


async def test_a_server_into_which_the_stage_does_not_fit_stays_and_another_one_goes(
    make_cluster: MakeCluster,
) -> None:
    config = make_config(diloco={"outer_steps": 12})
    async with make_cluster(config, replicas=[0, 0, 0, 1, 1], pinned=False) as cluster:
        orders = Orders(cluster)

        async def no_memory(stage: int) -> LocalReplica:
            raise MemoryError("no room")

        cluster.servers[2].monitor.rebuild = no_memory
        kill_in_round(cluster, 4, round=2)
        result = await cluster.run()
        assert [server.stage for server in cluster.servers[:4]] == [0, 1, 0, 1]
        check_agreement(cluster, result)
    assert orders.sent == [("move", "server2", 1, False), ("move", "server1", 1, False)]
    assert ("refuses", "server2", 1) in orders.said
    # The one that stayed has missed nothing.
    assert all("server2" in members(result, round, 0) for round in range(1, 13))


async def test_a_server_that_sees_no_other_replica_of_its_stage_stays_once_it_has_trained(
    make_cluster: MakeCluster,
) -> None:
    config = make_config(diloco={"outer_steps": 12})
    cluster = make_cluster(config, replicas=[0, 0, 0, 1, 1], pinned=False)
    cluster.registry.is_hidden = lambda watcher, peer: watcher == "server2" and peer in ("server0", "server1")
    async with cluster:
        orders = Orders(cluster)
        kill_in_round(cluster, 4, round=2)
        result = await cluster.run()
        assert [server.stage for server in cluster.servers[:4]] == [0, 1, 0, 1]
        check_agreement(cluster, result)
    assert orders.sent == [("move", "server2", 1, False), ("move", "server1", 1, False)]
    assert ("refuses", "server2", 1) in orders.said


async def test_a_server_that_cannot_load_its_new_stage_goes_back_to_the_old_one(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(diloco={"outer_steps": 12})
    async with make_cluster(config, replicas=[0, 0, 0, 1, 1], pinned=False) as cluster:
        fetch = StateSync.fetch

        async def fails(self: StateSync, *arguments: object) -> object:
            if self.contents.endpoint.peer_id == "server2" and self.stage == 1:
                raise MemoryError("no room for the bytes")
            return await fetch(self, *arguments)

        monkeypatch.setattr(StateSync, "fetch", fails)
        kill_in_round(cluster, 4, round=2)
        result = await cluster.run()
        # Somebody else has gone meanwhile.
        assert [server.stage for server in cluster.servers[:4]] == [0, 1, 0, 1]
        check_agreement(cluster, result)
    assert "server2" in members(result, 12, 0)
    assert {line.peer for line in result.steps[12] if line.stage == 0} == {"server0", "server2"}


async def test_a_mover_that_dies_on_its_way_disturbs_nobody(make_cluster: MakeCluster) -> None:
    config = make_config(diloco={"outer_steps": 6})
    async with make_cluster(config, replicas=[0, 0, 0, 1, 1], pinned=False) as cluster:
        orders = Orders(cluster)
        kill_in_round(cluster, 4, round=2)
        cluster.when(Moving, action=lambda: cluster.kill_server(2), sender=cluster.servers[2].peer)
        result = await cluster.run()
        check_agreement(cluster, result)
    # No second one before it is certain that the first will not come.
    assert orders.sent == [("move", "server2", 1, False)]
    assert len(result.records) == 6
    assert members(result, 6, 0) == {"server0", "server1"}


def _task(cluster: Cluster, call: Callable[[], Awaitable[object]]) -> Callable[[], None]:
    return lambda: cluster._tasks.start_soon(call)


@pytest.mark.parametrize("see_each_other", [True, False])
@pytest.mark.parametrize(("replicas", "are_urgent"), [([0, 0, 0, 0], [True, False]), ([1, 0, 1, 1], [False])])
async def test_servers_that_have_taken_the_same_stage_are_spread_before_the_first_round(
    make_cluster: MakeCluster, replicas: list[int], are_urgent: list[bool], see_each_other: bool
) -> None:
    config = make_config(diloco={"outer_steps": 3})
    cluster = make_cluster(config, replicas=replicas, pinned=False)
    if not see_each_other:
        cluster.registry.is_hidden = lambda watcher, peer: watcher.startswith("server") and peer != watcher
    async with cluster:
        orders = Orders(cluster)
        result = await cluster.run()
        assert sorted(server.stage for server in cluster.servers) == [0, 0, 1, 1]
        check_agreement(cluster, result)
    assert [urgent for *_, urgent in orders.sent] == are_urgent
    # From the first step on there are two pipelines.
    assert [len(members(result, 1, stage)) for stage in (0, 1)] == [2, 2]
    assert {line.peer for line in result.steps[1]} == {server.peer for server in cluster.servers}
    assert result.summary["failovers"] == []


@pytest.mark.slow
async def test_a_server_that_dies_when_it_is_sent_before_the_first_round_does_not_keep_it_from_beginning(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(make_config(), replicas=[0, 0, 0, 1], pinned=False) as cluster:
        orders = Orders(cluster)
        cluster.when(Moving, action=lambda: cluster.kill_server(2), sender=cluster.servers[2].peer)
        result = await cluster.run()
        check_agreement(cluster, result)
    assert orders.sent == [("move", "server2", 1, False)]
    assert members(result, 1, 0) == {"server0", "server1"}
    assert members(result, 1, 1) == {"server3"}


async def test_looking_for_gaps_costs_nothing_while_nothing_changes(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_looks = num_messages = 0
    update = MoveOrders.update

    def counted(*arguments: Any) -> Any:
        nonlocal num_looks
        num_looks += 1
        return update(*arguments)

    monkeypatch.setattr(MoveOrders, "update", counted)
    async with make_cluster(make_config(), replicas=[0, 0, 1, 1], pinned=False) as cluster:
        deliver = cluster.network.before_delivery
        assert deliver is not None

        def count(sender: PeerId, receiver: PeerId, message: object) -> None:
            nonlocal num_messages
            num_messages += 1
            deliver(sender, receiver, message)

        cluster.network.before_delivery = count
        check_agreement(cluster, await cluster.run())
    assert 0 < num_looks < num_messages
