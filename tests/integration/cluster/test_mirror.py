"""A mirror holds the newest state of every stage: a stage that loses all its servers goes on from it."""

from __future__ import annotations

from collections.abc import Callable

from tests.alongside import until

from shoal.testing import Cluster
from shoal.wire.messages.control import StartRound

from .conftest import MakeCluster, make_config, run_noticed
from .test_lost_stage import STAGE_1, check, kill, restored

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
