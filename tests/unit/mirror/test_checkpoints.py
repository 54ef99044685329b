"""When a mirror writes a checkpoint, of what, and what becomes of one that cannot be written."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from tests.alongside import until
from tests.unit.checkpoint.checkpoints import LAYOUTS, RUN_ID, hashes, open_record, signed_record, vectors_of

from shoal.averaging.replica_state import OuterState
from shoal.checkpoint.store import Checkpoint, CheckpointStore, KeepPolicy, StagePart, Written
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.errors import StorageError
from shoal.mirror.checkpoints import CheckpointRule, Checkpoints, WholeRecord, kept_of
from shoal.wire.messages.mirror import RunCounts

INF = float("inf")


def config_of(outer_steps: int = 30, **mirror: Any) -> Config:
    values = {"model_pipeline": {"stages": 2}, "diloco": {"outer_steps": outer_steps}}
    return Config.model_validate({**values, "param_mirror": {"every_rounds": 10, "every_s": None, **mirror}})


def whole(round: int) -> WholeRecord:
    states = {stage: OuterState(*vectors_of(stage, round)) for stage in range(2)}
    signed = signed_record(round, [hashes(state) for state in states.values()])
    return WholeRecord(open_record(signed), signed, states)


def counted(record: WholeRecord) -> RunCounts:
    return RunCounts(record.hash, b'{"form": 2, "seed": 1}', b'{"steps": 3}')


class Store(CheckpointStore):
    """Fails where it is told to, and can be held in the middle of writing."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), RUN_ID, open_record, KeepPolicy(keep_last=9))
        self.problem = ""
        self.may_write = threading.Event()
        self.may_write.set()
        self.begun: list[int] = []

    def write(self, checkpoint: Checkpoint, parts: Iterable[StagePart]) -> Written:
        self.begun.append(open_record(checkpoint.signed).round)
        self.may_write.wait()
        if self.problem:
            raise StorageError(self.problem)
        return super().write(checkpoint, parts)


class Desk:
    """One mirror's checkpoints, and what its user is shown."""

    def __init__(self, path: Path, config: Config) -> None:
        self.store = Store(path)
        self.notices: list[str] = []
        self.checkpoints = Checkpoints(config, self.store, lambda: LAYOUTS, SystemClock(), self.notices.append)

    def hold(self, *rounds: int) -> None:
        for round in rounds:
            record = whole(round)
            self.checkpoints.counted(counted(record))
            self.checkpoints.held(record)

    async def written(self, *rounds: int) -> None:
        """Wait until there are exactly these; no limit of its own."""
        await until(lambda: self.store.rounds() == [*rounds])


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, config_of())


def test_the_first_record_those_of_every_so_many_rounds_and_the_last_one_are_kept() -> None:
    rule = CheckpointRule(every_rounds=10, every_s=INF, last_round=34)
    due: list[int] = []
    for round in (3, 4, 9, 10, 11, 19, 22, 29, 30, 33, 34):
        if rule.is_due(round, 0.0):
            rule.tried(round, 0.0)
            due.append(round)
    assert due == [3, 10, 22, 30, 34], "one that was missed is made up for by the next"


def test_a_checkpoint_is_also_due_when_the_last_one_is_old() -> None:
    rule = CheckpointRule(every_rounds=0, every_s=60.0, last_round=100)
    rule.tried(3, 100.0)
    assert not rule.is_due(50, 159.0)
    assert rule.is_due(51, 160.0)


def test_a_run_that_has_gone_back_is_kept_again() -> None:
    rule = CheckpointRule(every_rounds=10, every_s=INF, last_round=100)
    rule.tried(40, 0.0)
    assert rule.is_due(31, 0.0)


async def test_what_is_due_is_written_with_what_the_client_has_counted(desk: Desk) -> None:
    record = whole(10)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        desk.checkpoints.held(record)
        await anyio.lowlevel.checkpoint()
        assert desk.store.begun == [], "the client has not begun the next round"
        desk.checkpoints.counted(counted(record))
        await desk.written(10)
        tasks.cancel_scope.cancel()
    kept = desk.store.open(10)
    assert kept.manifest.record == record.hash
    assert kept.client == b'{"steps": 3}'
    assert kept.manifest.stages[0].members == record.record.stages[0].members
    assert desk.notices == []


async def test_a_newer_one_takes_the_place_of_one_that_waits(desk: Desk) -> None:
    desk.store.may_write.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        desk.hold(10)
        await until(lambda: bool(desk.store.begun))
        desk.hold(11, 20, 25, 30)
        desk.store.may_write.set()
        await desk.written(10, 30)
        tasks.cancel_scope.cancel()
    assert desk.store.begun == [10, 30]


async def test_a_disk_that_fails_is_said_once_and_tried_again_when_the_next_is_due(desk: Desk) -> None:
    desk.store.problem = "there is no room: free space"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        desk.hold(10)
        await until(lambda: desk.store.begun == [10])
        desk.hold(20)
        await until(lambda: desk.store.begun == [10, 20])
        desk.store.problem = ""
        desk.hold(21)
        desk.hold(30)
        await desk.written(30)
        tasks.cancel_scope.cancel()
    assert desk.notices[0] == "no checkpoint of round 10: there is no room: free space"
    assert "--resume goes on from the last good one" in desk.notices[1]
    assert len(desk.notices) == 2


async def test_at_the_end_the_newest_record_is_written_and_none_twice(desk: Desk) -> None:
    desk.hold(10)
    await desk.checkpoints.finish()
    assert desk.store.rounds() == [10]
    desk.hold(13)
    await desk.checkpoints.finish()
    await desk.checkpoints.finish()
    assert desk.store.begun == [10, 13]


async def test_at_the_end_what_is_being_written_is_waited_for(desk: Desk) -> None:
    desk.store.may_write.clear()
    ended: list[int] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        desk.hold(10)
        await until(lambda: bool(desk.store.begun))

        async def finish() -> None:
            await desk.checkpoints.finish()
            ended.extend(desk.store.rounds())
            tasks.cancel_scope.cancel()

        tasks.start_soon(finish)
        await anyio.lowlevel.checkpoint()
        assert ended == []
        desk.store.may_write.set()
    assert ended == [10]
    assert desk.store.begun == [10]


async def test_the_checkpoint_from_which_a_run_was_resumed_is_not_written_again(desk: Desk, tmp_path: Path) -> None:
    desk.hold(10)
    await desk.checkpoints.finish()
    next_start = Desk(tmp_path, config_of())
    next_start.hold(10)
    await next_start.checkpoints.finish()
    assert next_start.store.begun == []
    (tmp_path / RUN_ID / "round_000010" / "manifest.json").unlink()
    other = Desk(tmp_path, config_of())
    other.hold(10)
    await other.checkpoints.finish()
    assert other.store.begun == [10], "what is damaged is"


async def test_states_of_several_records_are_no_checkpoint(desk: Desk) -> None:
    desk.hold(10)
    await desk.checkpoints.finish()
    desk.checkpoints.held(None)
    await desk.checkpoints.finish()
    assert desk.store.begun == [10]


async def test_without_d_0_nothing_can_be_kept(desk: Desk) -> None:
    desk.checkpoints.held(whole(10))
    await desk.checkpoints.finish()
    assert desk.store.begun == []


def test_the_keys_of_param_mirror_are_the_rule(tmp_path: Path) -> None:
    config = config_of(outer_steps=7, every_rounds=4, every_s=90.0)
    assert cast(Any, Desk(tmp_path, config).checkpoints)._rule == CheckpointRule(4, 90.0, 7)
    assert cast(Any, Desk(tmp_path, config_of(every_s=None)).checkpoints)._rule.every_s == INF


def test_the_keys_of_param_mirror_say_what_stays() -> None:
    assert kept_of(config_of()) == KeepPolicy(keep_last=2, keep_every_rounds=0, max_bytes=0)
    config = config_of(keep_last=5, keep_every_rounds=100, max_bytes="2GB")
    assert kept_of(config) == KeepPolicy(keep_last=5, keep_every_rounds=100, max_bytes=2_000_000_000)
