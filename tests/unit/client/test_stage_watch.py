"""What the user hears while a stage is served by nobody, and what the summary says afterwards."""

from __future__ import annotations

import pytest
from tests.alongside import alongside, until
from tests.unit.client.noted import NotedLedger

from shoal.client.stage_watch import StageWatch
from shoal.events.stages import ChainLost, StageBeganAnew, StageStands, TrainingStands
from shoal.ids import PeerId
from shoal.swarm.records import Tip
from shoal.swarm.round_effects import ChainLeft, ReplicaIn, Restored, Stuck
from shoal.wire.messages.round import Basis, StageHashes

START = "  start servers on any machine of the swarm: they take the stage that has none"


async def test_a_stop_and_its_end_are_said_by_name() -> None:
    ledger = NotedLedger()
    stages = StageWatch(ledger)
    stages.take(ReplicaIn(PeerId("a")))
    stages.take(Stuck((1,)))
    assert stages.missing == (1,)
    stages.take(Stuck(()))
    assert ledger.said == [
        "training has stopped: no server serves stage 1; it waits for servers",
        START,
        "stage 1 is served again: training goes on",
    ]


async def test_that_training_has_stopped_is_said_once_however_many_stages_follow() -> None:
    ledger = NotedLedger()
    stages = StageWatch(ledger)
    for missing in ((1,), (0, 1), (0,), ()):
        stages.take(Stuck(missing))
    assert ledger.said == [
        "training has stopped: no server serves stage 1; it waits for servers",
        START,
        "training waits for servers of stages 0, 1 now",
        "training waits for servers of stage 0 now",
        "stage 0 is served again: training goes on",
    ]


async def test_stages_that_a_checkpoint_gives_their_state_have_not_stopped_training() -> None:
    ledger = NotedLedger()
    stages = StageWatch(ledger, is_resumed=True)
    for missing in ((0, 1), (1,), ()):
        stages.take(Stuck(missing))
    assert ledger.said == ["servers take the state of stages 0, 1 from the checkpoint"]
    stages.take(Stuck((1,)))
    assert ledger.said[1:] == ["training has stopped: no server serves stage 1; it waits for servers", START]


async def test_it_is_said_again_while_it_lasts() -> None:
    ledger = NotedLedger()
    stages = StageWatch(ledger, repeat_s=0.01)
    async with alongside(stages.run):
        stages.take(Stuck((0, 2)))
        await until(lambda: len(ledger.noted) >= 3)
    assert ledger.noted[2] == TrainingStands((0, 2), 0)
    assert ledger.said[3] == "training has stood still for 0 s: no server for stages 0, 2"


@pytest.mark.parametrize(
    ("basis_round", "round", "rounds", "origin"),
    [
        (0, 1, "round 1", "its initial parameters"),
        (0, 4, "rounds 1 to 4", "its initial parameters"),
        (3, 4, "round 4", "its state after round 3"),
    ],
)
async def test_what_is_lost_is_said_precisely(basis_round: int, round: int, rounds: str, origin: str) -> None:
    ledger = NotedLedger()
    stages = StageWatch(ledger)
    stages.take(Restored(1, round, Basis(basis_round, StageHashes("p", "m", "b"))))
    stages.take(Restored(1, round, None))
    assert ledger.noted == [StageBeganAnew(1, round + 1, basis_round, "p"), StageStands(1, round + 1)]
    lost, found = ledger.said
    assert f"the state of stage 1 is lost: no server holds it any more; what it learnt in {rounds} is gone" in lost
    assert f"it starts again from {origin}" in lost
    assert "come back with the state of stage 1" in found


async def test_a_chain_that_is_left_is_said_and_noted_once() -> None:
    ledger = NotedLedger()
    stages = StageWatch(ledger)
    for _ in range(2):
        stages.take(ChainLeft(Tip(5, "ab" * 32, None), Tip(7, "cd" * 32, None), 3, 40, 6))
    lost, _ = ledger.noted
    assert isinstance(lost, ChainLost)
    assert (lost.base_round, lost.common_round, lost.samples, lost.samples_freed, lost.kept_round) == (5, 3, 40, 6, 7)
    [said] = ledger.said
    assert "have gone on apart after round 3" in said
    assert "from record 7 (cdcdcdcd)" in said
    assert "in rounds 4 to 5 is lost (abababab), and 6 samples" in said
