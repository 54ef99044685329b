"""Servers that join a run that has records, or come back to it: they get the state of their stage and take part."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from shoal.ids import PeerId
from shoal.swarm.round_effects import RoundReady
from shoal.swarm.view import NO_BASE
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.step import Forward, Open
from shoal.wire.messages.transfer import Chunk
from shoal_lab import Cluster, ClusterResult

from .conftest import SEQ_LEN, MakeCluster, make_config

CONFIG = make_config(diloco={"inner_steps": 4, "outer_steps": 5})
CHUNK_BYTES = 1024


def later(cluster: Cluster, call: Callable[[], Awaitable[object]]) -> Callable[[], None]:
    """An action of a fault that takes its time."""
    return lambda: cluster._tasks.start_soon(call)


def check_agreement(cluster: Cluster, result: ClusterResult) -> None:
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert len(result.records) == 5
    for server in cluster.servers:
        if server.process.running:
            held = hashlib.sha256(server.parameters().numpy().tobytes()).hexdigest()
            assert held == result.hashes[server.stage]
            assert server.replica.member.base_round == 5
            assert server.replica.member.hashes == result.records[-1].stages[server.stage].hashes


def members(result: ClusterResult, round: int, stage: int) -> dict[PeerId, int]:
    outcome = result.records[round - 1].stages[stage]
    return dict(zip(outcome.members, outcome.weights, strict=True))


def start_of_round(cluster: Cluster, round: int, call: Callable[[], Awaitable[object]]) -> None:
    cluster.when(StartRound, action=later(cluster, call), round=round)


def hold_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, round: int, peers: tuple[PeerId, ...]) -> None:
    """Rounds of tests are shorter than a transfer may take: begin this one only when these peers hold the record."""
    records = cluster.client.rounds.records
    recorded = records.recorded

    async def held_up(ready: RoundReady, *options: Any) -> None:
        await recorded(ready, *options)
        while ready.tip.round == round - 1 and not (cluster.client._coordinator.holders or {}).keys() >= set(peers):
            await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(records, "recorded", held_up)


async def test_a_server_that_joins_in_round_3_holds_what_the_others_hold_after_round_4(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced: list[int] = []
    async with make_cluster(CONFIG, chunk_bytes=CHUNK_BYTES) as cluster:

        async def join() -> None:
            server = await cluster.start_server(0)
            announced.append(next(r.base_round for r in cluster.view.replicas if r.peer == server.peer))

        start_of_round(cluster, 3, join)
        hold_up(cluster, monkeypatch, 4, (PeerId("server4"),))
        result = await cluster.run()
        check_agreement(cluster, result)
        newcomer = cluster.servers[4]
        assert newcomer.replica.member.base_round == 5
        assert members(result, 4, 0)[newcomer.peer] == 0
        assert len(members(result, 4, 0)) == 3
    assert announced == [NO_BASE]


async def test_two_newcomers_make_a_pipeline_of_their_own(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_cluster(CONFIG, chunk_bytes=CHUNK_BYTES) as cluster:
        start_of_round(cluster, 3, lambda: cluster.start_server(0))
        start_of_round(cluster, 3, lambda: cluster.start_server(1))
        hold_up(cluster, monkeypatch, 5, (PeerId("server4"), PeerId("server5")))
        result = await cluster.run()
        check_agreement(cluster, result)
        for server in cluster.servers[4:]:
            # With inner moments that started fresh.
            assert members(result, 5, server.stage)[server.peer] == 16 * SEQ_LEN


async def test_the_first_donor_dies_in_the_middle_of_the_transfer(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_cluster(CONFIG, chunk_bytes=CHUNK_BYTES) as cluster:
        donors: list[PeerId] = []

        def kill(index: int) -> None:
            # Whoever of the two gives the first chunk: how they share the rest depends on how fast each is.
            if not donors:
                donors.append(cluster.servers[index].peer)
                cluster.kill_server(index)

        for index, server in enumerate(cluster.servers):
            cluster.when(Chunk, action=partial(kill, index), sender=server.peer)
        start_of_round(cluster, 3, lambda: cluster.start_server(0))
        hold_up(cluster, monkeypatch, 4, (PeerId("server4"),))
        result = await cluster.run()
        check_agreement(cluster, result)
        assert donors
        assert cluster.servers[4].peer in members(result, 4, 0)


async def test_a_server_restarts_with_its_old_identity(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_cluster(CONFIG, chunk_bytes=CHUNK_BYTES) as cluster:

        async def restart() -> None:
            cluster.kill_server(2)
            await cluster.restart_server(2)

        cluster.when(Forward, action=later(cluster, restart), receiver=cluster.servers[2].peer, number=9)
        hold_up(cluster, monkeypatch, 5, (cluster.servers[2].peer,))
        result = await cluster.run()
        check_agreement(cluster, result)
        assert members(result, 5, 0)[cluster.servers[2].peer] == 16 * SEQ_LEN


async def test_the_round_ends_while_a_newcomer_loads(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_cluster(CONFIG, chunk_bytes=CHUNK_BYTES) as cluster:
        donors = [cluster.servers[index].peer for index in (0, 2)]
        newcomer = PeerId("server4")
        seen: list[int] = []
        is_cut = anyio.Event()
        records = cluster.client.rounds.records
        recorded = records.recorded

        async def held_up(ready: RoundReady, *options: Any) -> None:
            if ready.tip.round == 3:
                await is_cut.wait()
            await recorded(ready, *options)

        def cut_off() -> None:
            is_cut.set()
            for donor in donors:
                cluster.network.cut(donor, newcomer)

        def reconnect() -> None:
            seen.append(cluster.servers[4].replica.member.base_round)
            for donor in donors:
                cluster.network.heal(donor, newcomer)

        # It is cut off with half of a state; that of a newer record is what it ends with.
        cluster.when(Chunk, action=cut_off, receiver=newcomer, after=5)
        cluster.when(StartRound, action=reconnect, round=5)
        start_of_round(cluster, 3, lambda: cluster.start_server(0))
        monkeypatch.setattr(records, "recorded", held_up)
        hold_up(cluster, monkeypatch, 6, (newcomer,))
        result = await cluster.run()
        assert seen == [0]
        assert newcomer not in members(result, 4, 0)
        check_agreement(cluster, result)


async def test_a_replica_that_was_left_out_gets_the_state_again(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_cluster(CONFIG, chunk_bytes=CHUNK_BYTES) as cluster:
        victim = cluster.servers[2]

        def flip() -> None:
            victim.replica.member.state.base.parameters_N[0] += 1

        cluster.when(Open, action=flip, receiver=victim.peer, number=6)
        hold_up(cluster, monkeypatch, 5, (victim.peer,))
        with caplog.at_level(logging.WARNING):
            result = await cluster.run()
        check_agreement(cluster, result)
        assert victim.peer not in members(result, 2, 0)
        assert victim.peer in members(result, 5, 0)
        named = [record for record in caplog.records if record.getMessage() == "replica.out"]
        warned = [record for record in named if record.levelno >= logging.WARNING]
        assert {getattr(record, "peer", None) for record in warned} == {victim.peer}, "the coordinator alone warns"


async def test_a_newcomer_serves_steps_of_the_round_in_which_it_joins(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG, replicas=[0, 1], chunk_bytes=CHUNK_BYTES) as cluster:
        home, newcomer = cluster.servers[0].peer, PeerId("server2")

        def replace() -> None:
            cluster.network.heal(home, newcomer)
            cluster.network.cut(home, cluster.trainer_peer(0))

        # The trainer cannot go on in the middle of round 3 but over the newcomer.
        cluster.network.cut(home, newcomer)
        start_of_round(cluster, 3, lambda: cluster.start_server(0))
        cluster.when(Open, action=replace, receiver=home, number=9)
        result = await cluster.run()
        check_agreement(cluster, result)
        assert members(result, 3, 0) == {home: 4 * SEQ_LEN, newcomer: 12 * SEQ_LEN}
