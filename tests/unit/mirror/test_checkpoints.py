"""When a mirror writes a checkpoint, of what, and what becomes of one that cannot be written."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests.alongside import until
from tests.unit.checkpoint.checkpoints import LAYOUTS, RUN_ID, hashes, inner_of, open_record, signed_record, vectors_of
from torch import Tensor

from shoal.averaging.inner_fetch import InnerFetch
from shoal.averaging.replica_state import OuterState
from shoal.checkpoint.store import Checkpoint, CheckpointStore, KeepPolicy, StagePart, Written
from shoal.checkpoint.tensor_file import encode_tensors
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.errors import PlaceTaken, StorageError
from shoal.ids import PeerId
from shoal.mirror import checkpoints
from shoal.mirror.checkpoints import Checkpoints, WholeRecord, kept_of
from shoal.wire.messages.mirror import LastKept, RunCounts


def config_of(outer_steps: int = 30, **mirror: Any) -> Config:
    values = {"model_pipeline": {"stages": 2}, "diloco": {"outer_steps": outer_steps}}
    return Config.model_validate({**values, "param_mirror": {"every_rounds": 10, "every_s": None, **mirror}})


def whole(round: int) -> WholeRecord:
    """A record that asks for a checkpoint if its round is a multiple of 10."""
    states = {stage: OuterState(*vectors_of(stage, round)) for stage in range(2)}
    signed = signed_record(round, [hashes(state) for state in states.values()], keep=round % 10 == 0)
    return WholeRecord(open_record(signed), signed, states)


def counted(record: WholeRecord, *, is_last: bool = False) -> RunCounts:
    return RunCounts(record.hash, b'{"form": 2, "seed": 1}', b'{"steps": 3}', is_last)


class Store(CheckpointStore):
    """Fails where it is told to, and can be held in the middle of writing."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), RUN_ID, open_record, KeepPolicy(keep_last=9))
        self.problem = self.taken_by = ""
        self.may_write = threading.Event()
        self.may_write.set()
        self.begun: list[int] = []

    def write(self, checkpoint: Checkpoint, parts: Iterable[StagePart]) -> Written:
        self.begun.append(open_record(checkpoint.signed).round)
        self.may_write.wait()
        if self.taken_by:
            raise PlaceTaken(self.location, self.taken_by)
        if self.problem:
            raise StorageError(self.problem)
        return super().write(checkpoint, parts)


class Members(InnerFetch):
    """Some of which give what their inner optimizers knew."""

    def __init__(self) -> None:
        self.known: dict[tuple[PeerId, int], Tensor] = {}
        self.asked: list[tuple[PeerId, int]] = []
        self.reserved: list[tuple[PeerId, int]] = []

    def reserve(self, peer: PeerId, stage: int, record_hash: str) -> None:
        self.reserved.append((peer, stage))

    async def fetch(self, peer: PeerId, stage: int, record_hash: str, num_parameters: int) -> Tensor | None:
        self.asked.append((peer, stage))
        return self.known.get((peer, stage))


class Desk:
    """One mirror's checkpoints, and what its user is shown."""

    def __init__(self, path: Path, config: Config) -> None:
        self.store = Store(path)
        self.notices: list[str] = []
        self.members = Members()
        self.is_idle = False
        self.kept: list[LastKept] = []
        self.checkpoints = Checkpoints(
            config,
            self.store,
            lambda: LAYOUTS,
            SystemClock(),
            self.notices.append,
            self.members,
            lambda: self.is_idle,
            self.kept.append,
        )

    def hold(self, *rounds: int) -> None:
        for round in rounds:
            record = whole(round)
            self.checkpoints.counted(counted(record))
            self.checkpoints.held(record)

    async def written(self, *rounds: int) -> None:
        """Wait until there are exactly these, or the user is told something more; no limit of its own."""
        num_told = len(self.notices)
        await until(lambda: self.store.rounds() == [*rounds] or len(self.notices) > num_told)
        assert self.store.rounds() == [*rounds], self.notices


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path, config_of())


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


def knows(peer: PeerId, stage: int) -> Tensor:
    return encode_tensors(inner_of(stage, 0), {"replica": f"{peer}.1"})


async def test_a_checkpoint_has_what_members_still_give_in_the_places_of_their_slots(desk: Desk) -> None:
    record = whole(10)
    first, second = record.record.stages[0].members
    desk.members.known[second, 0] = knows(second, 0)
    desk.hold(10)
    await desk.checkpoints.finish()
    kept = desk.store.open(10)
    assert [kept.manifest.inner_slots(stage) for stage in range(2)] == [[1], []]
    assert kept.inner_content(0, 1) == knows(second, 0).numpy().tobytes()
    assert (first, 0) in desk.members.asked


@pytest.mark.parametrize(("inner", "places"), [("all", 2), ("first", 1), ("none", 0)])
async def test_whose_inner_states_a_checkpoint_has_is_configured_by_param_mirror_inner(
    tmp_path: Path, inner: str, places: int
) -> None:
    desk = Desk(tmp_path, config_of(inner=inner))
    desk.hold(10)
    await desk.checkpoints.finish()
    members = [outcome.members for outcome in whole(10).record.stages]
    assert desk.members.asked == [(peer, stage) for stage in range(2) for peer in members[stage][:places]]
    assert desk.members.reserved == desk.members.asked, "before the first one is fetched, which may take long"


async def test_a_mirror_that_misses_what_asks_for_a_checkpoint_writes_another_one_without_inner_states(
    desk: Desk,
) -> None:
    desk.hold(10)
    await desk.checkpoints.finish()
    desk.members.asked.clear()
    desk.hold(19)
    assert desk.checkpoints._due is None
    desk.hold(21)
    assert desk.checkpoints._due is not None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        await desk.written(10, 21)
        desk.checkpoints.counted(counted(whole(21), is_last=True))
        await until(lambda: desk.kept)
        tasks.cancel_scope.cancel()
    assert desk.members.asked == []
    assert desk.kept[0].lacks.startswith("it was due before the run ended, and lacks what inner optimizers knew")


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


async def test_a_folder_that_another_mirror_writes_to_is_told_as_that_and_not_as_a_disk_that_fails(
    desk: Desk, tmp_path: Path
) -> None:
    failing = desk.checkpoints.metrics.gauge("disk.failing", what="checkpoint")
    by = "by this mirror: process 7 on box2 writes to"
    desk.store.taken_by = "process 7 on box2"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        desk.hold(10)
        await until(lambda: desk.notices)
        assert failing.value == 0
        desk.hold(20)
        await until(lambda: desk.store.begun == [10, 20])
        desk.store.problem = "there is no room"
        desk.hold(30)
        await until(lambda: desk.store.begun == [10, 20, 30])
        desk.store.taken_by = ""
        desk.hold(40)
        await until(lambda: failing.value == 1)
        desk.store.taken_by = "process 7 on box2"
        desk.hold(50)
        await until(lambda: failing.value == 0)
        desk.checkpoints.counted(counted(whole(60), is_last=True))
        desk.checkpoints.held(whole(60))
        await until(lambda: desk.kept)
        tasks.cancel_scope.cancel()
    assert desk.kept[0].lacks.startswith(f"process 7 on box2 writes to {tmp_path} now")
    assert desk.notices[::2] == [
        f"no checkpoint of round 10 {by} {tmp_path} now",
        "no checkpoint of round 40: there is no room",
        f"no checkpoint of round 50 {by} {tmp_path} now",
    ]
    assert "another --checkpoint-dir" in desk.notices[1]


async def test_at_the_end_the_newest_record_is_written_and_none_twice(desk: Desk) -> None:
    desk.hold(10)
    await desk.checkpoints.finish()
    assert desk.store.rounds() == [10]
    desk.hold(13)
    await desk.checkpoints.finish()
    await desk.checkpoints.finish()
    assert desk.store.begun == [10, 13]


async def test_the_last_record_is_written_with_inner_states_though_it_does_not_ask_for_a_checkpoint(desk: Desk) -> None:
    last = whole(13)
    for stage, outcome in enumerate(last.record.stages):
        desk.members.known |= {(peer, stage): knows(peer, stage) for peer in outcome.members}
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        desk.hold(10)
        await desk.written(10)
        desk.hold(13)
        await anyio.lowlevel.checkpoint()
        assert desk.store.begun == [10]
        desk.checkpoints.counted(counted(last, is_last=True))
        await until(lambda: desk.kept)
        tasks.cancel_scope.cancel()
    kept = desk.store.open(13)
    assert [kept.manifest.inner_slots(stage) for stage in range(2)] == [[0, 1], [0, 1]]
    assert desk.kept == [LastKept(last.hash)]
    await desk.checkpoints.finish()
    assert desk.store.begun == [10, 13]


async def test_what_the_last_checkpoint_lacks_is_told(desk: Desk) -> None:
    last = whole(13)
    first, _ = last.record.stages[0].members
    desk.members.known[first, 0] = knows(first, 0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        desk.checkpoints.counted(counted(last, is_last=True))
        await anyio.lowlevel.checkpoint()
        assert desk.kept == [], "its bytes are on their way"
        desk.checkpoints.held(last)
        await until(lambda: desk.kept)
        assert desk.kept.pop().lacks.startswith("it lacks what the inner optimizers of 3 servers knew")
        desk.checkpoints.counted(counted(last, is_last=True))
        await until(lambda: desk.kept)
        assert desk.kept.pop().lacks.startswith("it lacks"), "of another client that ends, too"
        desk.checkpoints.counted(counted(whole(14), is_last=True))
        desk.is_idle = True
        desk.checkpoints.idle()
        await until(lambda: desk.kept)
        assert desk.kept == [LastKept(whole(14).hash, "its mirror could not get the state of every stage")]
        desk.kept.clear()
        desk.store.problem = "there is no room"
        desk.checkpoints.held(whole(15))
        desk.checkpoints.counted(counted(whole(15), is_last=True))
        await until(lambda: desk.kept)
        assert desk.kept == [LastKept(whole(15).hash, "there is no room")]
        tasks.cancel_scope.cancel()


async def test_what_was_counted_when_the_round_began_stays_what_a_checkpoint_has(desk: Desk) -> None:
    last = whole(13)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        desk.hold(13)
        await desk.written(13)
        desk.hold(14)
        desk.checkpoints.counted(RunCounts(whole(14).hash, b'{"form": 2, "seed": 1}', b'{"steps": 5}', is_last=True))
        await desk.written(13, 14)
        tasks.cancel_scope.cancel()
    assert desk.store.open(14).client == b'{"steps": 3}'
    assert last.record.round == 13


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


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks are not waited for at all."""
    monkeypatch.setattr(checkpoints, "_LOOK_S", 0.0)
    monkeypatch.setattr(checkpoints, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(checkpoints, "_SLOWEST_BYTES_PER_S", 1e12)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("is_finishing", [False, True])
async def test_a_disk_that_takes_nothing_is_said_and_at_the_end_not_waited_for(desk: Desk, is_finishing: bool) -> None:
    desk.store.may_write.clear()
    last, errors = whole(10), list[str]()

    async def finish() -> None:
        try:
            await desk.checkpoints.finish()
        except StorageError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as tasks:
        desk.hold(10)
        if is_finishing:
            tasks.start_soon(finish)
            await until(lambda: bool(desk.store.begun))
        else:
            desk.checkpoints.counted(counted(last, is_last=True))
        tasks.start_soon(desk.checkpoints.run)
        await until(lambda: bool(desk.notices))
        if not is_finishing:
            await finish()
        await until(lambda: bool(errors))
        tasks.cancel_scope.cancel()
    said = f"the disk of {desk.checkpoints.config.checkpoint_location} has taken nothing for 0 s"
    assert desk.kept == ([] if is_finishing else [LastKept(last.hash, said)])
    assert errors == [said]
    assert desk.notices[0] == f"no checkpoint is written: {said}"
    desk.store.may_write.set()


@pytest.mark.usefixtures("impatient")
async def test_a_disk_that_takes_something_again_is_waited_for(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.store.may_write.clear()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        desk.hold(10)
        await until(lambda: bool(desk.notices))
        monkeypatch.setattr(checkpoints, "_PATIENCE_S", 60.0)
        desk.store.may_write.set()
        await desk.written(10)
        await desk.checkpoints.finish()
        tasks.cancel_scope.cancel()
    assert desk.store.rounds() == [10]


async def test_while_a_member_is_silent_nothing_is_asked_of_the_disk(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    stirred_s: list[float] = []

    async def fetch(*_: object) -> None:
        stirred_s.append(desk.checkpoints._stirred_s)

    monkeypatch.setattr(desk.members, "fetch", fetch)
    desk.hold(10)
    await desk.checkpoints.finish()
    assert stirred_s == [math.inf] * 4


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


def test_the_keys_of_param_mirror_say_what_stays() -> None:
    assert kept_of(config_of()) == KeepPolicy(keep_last=2, keep_every_rounds=0, max_bytes=0)
    config = config_of(keep_last=5, keep_every_rounds=100, max_bytes="2GB")
    assert kept_of(config) == KeepPolicy(keep_last=5, keep_every_rounds=100, max_bytes=2_000_000_000)


async def test_an_older_checkpoint_that_cannot_be_removed_is_said_and_the_new_one_counts(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("read-only file system")

    desk.store.policy = KeepPolicy(keep_last=1)
    monkeypatch.setattr(desk.store._place, "remove", fails)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.checkpoints.run)
        for round in (10, 20):
            desk.hold(round)
            await until(lambda round=round: desk.store.rounds()[-1:] == [round])  # type: ignore[misc]
        await until(lambda: desk.notices)
        tasks.cancel_scope.cancel()
    assert "cannot be removed: read-only file system" in desk.notices[0]
    assert desk.store.rounds() == [10, 20]
