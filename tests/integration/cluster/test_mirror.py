"""A mirror holds the newest state of every stage: a stage that loses all its servers goes on from it."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from tests.alongside import until

from shoal.client import checkpoints
from shoal.events.mirror import LastCheckpointLacks, MirrorsBehind
from shoal.swarm import run_client
from shoal.swarm.round_effects import Fetch
from shoal.wire.messages.control import StartRound
from shoal.wire.messages.step import Forward
from shoal_lab import Cluster

from .conftest import MakeCluster, make_config, run_noticed, run_undisturbed
from .test_lost_stage import STAGE_1, check, kill, later, restored

CONFIG = make_config(diloco={"inner_steps": 4, "outer_steps": 5}, health={"lost_state_after_s": 0.3})


def at_rest(cluster: Cluster, is_due: Callable[[], bool], act: Callable[[], None]) -> Callable[[], None]:
    """Let the run stand still until something is so, do something, and let it go on."""

    async def wait() -> None:
        await until(is_due)
        act()
        assert cluster.client._pausing.resume("me")

    def pause() -> None:
        assert cluster.client._pausing.pause("me")
        cluster._tasks.start_soon(wait)

    return pause


def holds(cluster: Cluster, round: int) -> Callable[[], bool]:
    return lambda: cluster.mirrors[0].mirror.held_rounds == {0: round, 1: round}


async def test_newcomers_of_a_stage_that_lost_everybody_go_on_from_what_a_mirror_holds(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(CONFIG) as cluster:
        cluster.start_mirror()
        pause = at_rest(cluster, holds(cluster, 2), kill(cluster, STAGE_1))
        cluster.when(StartRound, action=pause, round=3)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    # Without it the stage goes on from D_0, see test_lost_stage.
    assert restored(result) == []
    assert result.summary["stages_restored"] == []
    assert not any("is lost" in notice for notice in notices)
    assert result.audit.steps_lost == {0: 0, 1: 0}


async def test_a_mirror_that_has_only_the_record_before_saves_all_rounds_but_the_last(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(CONFIG) as cluster:
        mirror = cluster.start_mirror()
        stage_1 = [cluster.servers[index].peer for index in STAGE_1]

        def cut() -> None:
            for peer in stage_1:
                cluster.network.cut(mirror.peer, peer)

        def lose() -> None:
            for peer in stage_1:
                cluster.network.heal(mirror.peer, peer)
            kill(cluster, STAGE_1)()

        def is_behind() -> bool:
            return mirror.mirror.held_rounds == {0: 2, 1: 1}

        cluster.when(StartRound, action=at_rest(cluster, holds(cluster, 1), cut), round=2)
        cluster.when(StartRound, action=at_rest(cluster, is_behind, lose), round=3)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    assert restored(result) == [(3, 1, 1)]
    assert any("it starts again from its state after round 1" in notice for notice in notices)
    assert result.summary["stages_restored"][0]["lost_rounds"] == [2, 2]


async def test_servers_stay_until_a_mirror_that_can_be_reached_has_the_last_record(make_cluster: MakeCluster) -> None:
    async with make_cluster(CONFIG) as cluster:
        copies, saving = cluster.start_mirror().mirror._copies, cluster.client.rounds.saving
        take, end, held_at_the_end = copies._take, saving.run_ends, list[bool]()

        async def take_late(stage: int, order: Fetch) -> None:
            if order.record.round == 5:
                await until(lambda: 5 in cluster.client.reports.progress.eval_losses)
            await take(stage, order)

        async def end_and_look(base: str) -> None:
            held_at_the_end.append(holds(cluster, 5)())
            await end(base)

        copies._take = take_late  # type: ignore[method-assign]
        saving.run_ends = end_and_look  # type: ignore[method-assign]
        await cluster.run()
        assert held_at_the_end == [True]


async def test_a_mirror_that_comes_late_takes_what_stands_and_so_does_a_second_one_from_it(
    make_cluster: MakeCluster,
) -> None:
    async with make_cluster(CONFIG) as cluster:

        def second() -> None:
            # All that has the state of stage 1 is the first mirror.
            kill(cluster, STAGE_1, start_again=False)()
            cluster.start_mirror()
            cluster._tasks.start_soon(third)

        async def third() -> None:
            await until(lambda: cluster.mirrors[1].mirror.held_rounds == {0: 2, 1: 2})
            cluster.kill_mirror(0)
            for index in STAGE_1:
                await cluster.restart_server(index)

        cluster.when(StartRound, action=cluster.start_mirror, round=3)
        cluster.when(StartRound, action=at_rest(cluster, holds(cluster, 2), second), round=3)
        result, _ = await run_noticed(cluster)
        check(cluster, result)
    assert restored(result) == []


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_without_the_only_mirror_a_lost_stage_is_lost(make_cluster: MakeCluster, fault: str) -> None:
    async with make_cluster(CONFIG) as cluster:
        cluster.start_mirror()

        async def noticed() -> None:
            # As long as nobody has lost it, it may still give what it has said that it holds.
            await anyio.sleep(0.2)
            cluster.kill_mirror()

        def act() -> None:
            kill(cluster, STAGE_1)()
            later(cluster, noticed)()

        take_away = cluster.kill_mirror if fault == "killed" else cluster.freeze_mirror
        cluster.when(StartRound, action=take_away, round=3)
        cluster.when(Forward, action=act, receiver=cluster.servers[3].peer, number=14)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    assert len(restored(result)) == 1
    assert any("the state of stage 1 is lost" in notice for notice in notices)


async def test_a_run_comes_to_the_same_with_a_mirror_that_is_frozen_and_one_that_dies(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_client, "NO_FURTHER_S", 0.2)  # of the frozen one: here no heartbeat finds it
    monkeypatch.setattr(checkpoints, "_MOST_S", 0.2)
    undisturbed = await run_undisturbed(make_cluster, CONFIG)
    async with make_cluster(CONFIG) as cluster:
        for _ in range(3):
            cluster.start_mirror()
        cluster.when(StartRound, action=lambda: cluster.freeze_mirror(0), round=2)
        cluster.when(StartRound, action=lambda: cluster.kill_mirror(1), round=3)
        result, notices = await run_noticed(cluster)
        check(cluster, result)
    assert [outcome.hashes for record in result.records for outcome in record.stages] == [
        outcome.hashes for record in undisturbed.records for outcome in record.stages
    ]
    silent = LastCheckpointLacks(5, "its mirror has said nothing for 0.2 s")
    told = (MirrorsBehind(5, 1, 0.2), silent)
    assert notices == [line for each in told for line in (each.say(), f"  {each.do}")]
