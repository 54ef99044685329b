"""What the user hears while a stage is served by nobody, and what the summary says afterwards."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from shoal.client.diary import RestoredStage
from shoal.client.stage_watch import StageWatch
from shoal.clock import SystemClock
from shoal.ids import PeerId
from shoal.swarm.round_effects import ReplicaIn, Restored, Stuck
from shoal.wire.messages.round import Basis, StageHashes

pytestmark = pytest.mark.anyio


def watch(notices: list[str], repeat_s: float = 60.0, **options: Any) -> StageWatch:
    return StageWatch(clock=SystemClock(), notice=notices.append, repeat_s=repeat_s, **options)


async def test_what_is_restored_is_written_down_whenever_it_changes() -> None:
    noted: list[tuple[RestoredStage, ...]] = []
    stages = watch([], note=noted.append)
    basis = Basis(0, StageHashes("p", "m", "b"))
    stages.take(Restored(1, 2, basis))
    stages.take(Restored(0, 2, basis))
    stages.take(Restored(1, 2, None))
    first, second = RestoredStage(1, 3, (1, 2), "p"), RestoredStage(0, 3, (1, 2), "p")
    assert noted == [(first,), (second, first), (second,)]


async def test_a_stop_and_its_end_are_said_by_name() -> None:
    notices: list[str] = []
    stages = watch(notices)
    stages.take(ReplicaIn(PeerId("a")))
    stages.take(Stuck((1,)))
    assert stages.missing == (1,)
    await stages.incomplete()
    stages.take(Stuck(()))
    await stages.complete()
    assert notices == [
        "training has stopped: no replica serves stage 1; it waits for servers",
        "stage 1 is served again: training goes on",
    ]
    assert stages.as_json() == []


async def test_that_training_has_stopped_is_said_once_however_many_stages_follow() -> None:
    notices: list[str] = []
    stages = watch(notices)
    for missing in ((1,), (0, 1), (0,), ()):
        stages.take(Stuck(missing))
    assert notices == [
        "training has stopped: no replica serves stage 1; it waits for servers",
        "training waits for servers of stages 0, 1 now",
        "training waits for servers of stage 0 now",
        "stage 0 is served again: training goes on",
    ]


async def test_it_is_said_again_while_it_lasts() -> None:
    notices: list[str] = []
    stages = watch(notices, repeat_s=0.01)
    with anyio.fail_after(240):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stages.run)
            stages.take(Stuck((0, 2)))
            while len(notices) < 3:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert notices[2] == "no replica serves stages 0, 2 since 0 s; training waits for servers"


@pytest.mark.parametrize(
    ("basis_round", "round", "rounds", "origin"),
    [
        (0, 1, "round 1", "its initial parameters"),
        (0, 4, "rounds 1 to 4", "its initial parameters"),
        (3, 4, "round 4", "its state after round 3"),
    ],
)
async def test_what_is_lost_is_said_precisely(basis_round: int, round: int, rounds: str, origin: str) -> None:
    notices: list[str] = []
    stages = watch(notices)
    stages.take(Restored(1, round, Basis(basis_round, StageHashes("p", "m", "b"))))
    assert (
        f"the state of stage 1 is lost: no server holds it any more; what it learnt in {rounds} is gone" in notices[0]
    )
    assert f"it starts again from {origin}" in notices[0]
    assert stages.as_json() == [
        {"stage": 1, "in_round": round + 1, "lost_rounds": [basis_round + 1, round], "parameters": "p"}
    ]
    again = watch([])
    again.resume(stages.restored)
    assert again.as_json() == stages.as_json()
    stages.take(Restored(1, round, None))
    assert "come back with the state of stage 1" in notices[1]
    assert stages.as_json() == []
