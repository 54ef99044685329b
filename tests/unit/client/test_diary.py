"""What a client leaves to its next start, whole, cut off in the middle, and damaged."""

from __future__ import annotations

import errno
import math
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tests.hung_disk import far_disk, hung_disk
from tests.unit.client.noted import totals_of

from shoal.client import service
from shoal.client.diary import FILE_NAME, Diary, Saved
from shoal.client.ledger import Ledger
from shoal.client.totals import RunTotals
from shoal.clock import SystemClock
from shoal.control.records import StageRecord, VerifiedRecord
from shoal.errors import RecordRejected, StorageError
from shoal.events.losses import (
    DataServerBack,
    DataServerLost,
    LossFound,
    ServerBack,
    ServerHeard,
    ServerLost,
    TrainerLost,
    TrainerReady,
)
from shoal.events.run import (
    ClientStarted,
    DataSized,
    RoleCounted,
    RoundBegun,
    RoundRecorded,
    RunLaunched,
    RunPaused,
    RunResumed,
    ShareEvaluated,
    StepReported,
    TrainerFinished,
)
from shoal.events.stages import ChainLost, MoveEnded, StageBeganAnew, StageStands
from shoal.ids import PeerId
from shoal.swarm.round_boundary import RunTime
from shoal.swarm.routing import Pipeline
from shoal.swarm.run_effects import RoundPlan
from shoal.wire.messages.base import Hop, SampleRange, StepRange

A = PeerId("a")
STEP = StepReported(1, 8, 2, 4, 4, math.inf, True, 0.5, 12.5)
EVENTS = (
    RunLaunched(2.0),
    STEP,
    ShareEvaluated(0, 1, 3.5, 10, 10),
    TrainerFinished(0, 2, 2, {"control": 3}),
    ServerLost(A, "server 0", 1, 0.5, "07:00:00Z", ("server 1",), (0, 1), 13.0),
    TrainerLost(1, 0.0, "07:00:00Z", 13.0),
    DataServerLost((0, 1), 13.5),
    LossFound("client", "the client", (0, 1), 14.0, 15.0),
    RoleCounted(A, {"refused": 2}),
    ServerHeard(A, "server 0", 2.0),
    ServerBack(A, "server 0", 1, 3.0, 15.5),
    TrainerReady(1, 2, 14.0),
    DataServerBack(2, 14.5),
    STEP,
    StageBeganAnew(1, 3, 0, "ab"),
    StageBeganAnew(0, 3, 0, "cd"),
    StageStands(1, 3),
    MoveEnded(A, "server 0", 1, 0),
    ChainLost(2, "ef", 1, 40, 6, 3, "01"),
    RunPaused("me", 16.0),
    RunResumed("you", 18.0),
    RunPaused("you", 20.0),
    ShareEvaluated(1, 1, 6.5, 10, 10),
)
BEFORE = (DataSized(100, 20), RoundBegun(1, 4, 1, 1, 2), RoundRecorded(1, 2.5, {0: "ab"}, True, {"control": 1}, 1.5))
"""What the plan of the second round has put down."""


def saved() -> Saved:
    path = (Hop(A, ("memory:a",)), Hop(PeerId("b"), ("memory:b",)))
    return Saved(
        run_id="run",
        totals=totals_of(*BEFORE),
        plan=RoundPlan(2, StepRange(4, 8), (Pipeline(0, path),), {0: 1}, 7.5),
        recorded=(SampleRange(0, 0, 8),),
        servers=(VerifiedRecord("stage.0", A, 5, math.inf, StageRecord(("memory:a",), 1.0, stage=0)),),
    )


def write(directory: Path) -> None:
    diary = Diary(directory, "run")
    diary.save(saved())
    for event in EVENTS:
        diary.note(event)
    diary.close()


def again(directory: Path, run_id: str = "run") -> Diary:
    diary = Diary(directory, run_id)
    diary.close()
    return diary


def test_a_first_start_has_nothing_to_go_on_from(tmp_path: Path) -> None:
    diary = again(tmp_path)
    assert (diary.generation, diary.is_resumed, diary.saved, diary.events) == (1, False, Saved("run", RunTotals()), ())


def test_the_next_start_reads_what_was_saved_and_what_was_noted_since(tmp_path: Path) -> None:
    write(tmp_path)
    diary = again(tmp_path)
    assert (diary.generation, diary.is_resumed) == (2, True)
    assert diary.saved == saved()
    assert diary.events == (*EVENTS, ClientStarted())


@pytest.mark.parametrize("number", range(len(EVENTS) + 1))
def test_a_client_that_dies_after_any_event_is_followed_by_one_with_the_same_totals(
    tmp_path: Path, number: int
) -> None:
    diary = Diary(tmp_path, "run")
    ledger = Ledger(SystemClock(), diary)
    for event in BEFORE:
        ledger.note(event)
    diary.save(Saved("run", ledger.totals))
    for event in EVENTS[:number]:
        ledger.note(event)
    diary.close()
    following = Ledger(SystemClock(), again(tmp_path)).totals
    counted = ledger.totals.counted
    counted.started_again(PeerId(""))
    assert following == ledger.totals
    assert number < len(EVENTS) or (following.servers_moved, following.progress.eval_losses) == (1, {1: 0.5})
    assert number < len(EVENTS) or (following.time, following.paused_by) == (RunTime(2.0, 20.0), "you")


def test_a_disk_that_does_not_answer_keeps_no_client_and_gets_what_it_was_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_disk(monkeypatch)
    diary = Diary(tmp_path, "run")
    with hung_disk(monkeypatch):
        diary.note(EVENTS[0])
        diary.save(saved())
        diary.note(EVENTS[1])
    diary.close()
    following = again(tmp_path)
    assert (following.saved, following.events) == (saved(), (EVENTS[1], ClientStarted()))


def test_a_disk_that_fails_after_long_is_known_with_the_next_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_disk(monkeypatch)
    diary = Diary(tmp_path, "run")
    with hung_disk(monkeypatch) as disk:
        diary.save(saved())
        disk.error = OSError(errno.EIO, "Input/output error")
    diary.close()
    with pytest.raises(StorageError, match="Input/output error"):
        diary.note(EVENTS[1])


def _copied(directory: Path) -> Path:
    place = directory.with_name(f"{directory.name}-copied")
    shutil.copytree(directory, place)
    return place


class FullDisk:
    """Stands in for `os.write`: takes so many bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int) -> None:
        self._write = os.write
        self.left = left
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor: int, content: bytes | bytearray) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, content[: self.left])
        self.left -= written
        return written


def test_events_wait_for_a_disk_that_is_full_and_none_is_lost_or_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = Diary(tmp_path, "run")
    diary.save(saved())
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, 5)
        for event in EVENTS[:3]:
            diary.note(event)
        assert diary.failure == errno.ENOSPC
        assert again(_copied(tmp_path)).events == (ClientStarted(),), "as a client that is killed then leaves it"
        disk.left = 7
        diary.note(EVENTS[3])
        disk.left = 100_000
        diary.note(EVENTS[4])
    assert diary.failure == 0
    diary.close()
    assert again(tmp_path).events[:5] == EVENTS[:5]


def test_how_things_stand_replaces_what_was_there_only_as_a_whole_and_what_waits_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = Diary(tmp_path, "run")
    diary.note(EVENTS[0])
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, 20)
        with pytest.raises(StorageError, match=r"\(No space left on device\): .*; free space there, or start again"):
            diary.save(saved())
        diary.note(EVENTS[1])
        disk.left = 100_000
        diary.note(EVENTS[2])
        disk.left = 0
        diary.note(EVENTS[3])
        assert diary.failure == errno.ENOSPC
        disk.left = 100_000
        diary.save(saved())
    assert diary.failure == 0
    diary.note(EVENTS[4])
    diary.close()
    found = again(tmp_path)
    assert (found.saved, found.events) == (saved(), (EVENTS[4], ClientStarted()))
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_a_file_of_an_older_version_is_refused_and_not_taken_for_a_run_without_a_step(tmp_path: Path) -> None:
    body = msgspec.msgpack.encode({"run_id": "run", "generation": 1, "rounds": 3, "servers_moved": 1})
    (tmp_path / FILE_NAME).write_bytes(len(body).to_bytes(4) + body)
    with pytest.raises(RecordRejected, match=r"client\.state does not say .*`totals`.*start a new run"):
        Diary(tmp_path, "run")


def test_starts_are_counted_also_when_they_save_nothing(tmp_path: Path) -> None:
    assert [again(tmp_path).generation for _ in range(3)] == [1, 2, 3]
    diary = Diary(tmp_path, "run")
    diary.save(Saved("run", RunTotals(), generation=diary.generation))
    diary.close()
    assert diary.generation == 4
    diary = again(tmp_path)
    assert (diary.generation, diary.events) == (5, (ClientStarted(),))


def test_what_one_round_has_noted_is_gone_with_the_next_plan(tmp_path: Path) -> None:
    write(tmp_path)
    size_bytes = (tmp_path / FILE_NAME).stat().st_size
    diary = Diary(tmp_path, "run")
    diary.save(saved())
    diary.close()
    assert (tmp_path / FILE_NAME).stat().st_size < size_bytes
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_an_event_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / FILE_NAME
    for missing_bytes in (1, 3):
        os.truncate(path, path.stat().st_size - missing_bytes)
        assert again(tmp_path).events[:3] == EVENTS[:3]


def test_what_is_noted_after_a_torn_end_is_read(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / FILE_NAME
    os.truncate(path, path.stat().st_size - 1)
    diary = Diary(tmp_path, "run")
    diary.note(STEP)
    diary.close()
    assert again(tmp_path).events == (*EVENTS[:-1], ClientStarted(), STEP, ClientStarted())


@pytest.mark.parametrize("content", [b"", b"\0\0", b"\0\0\0\3abc", b"\0\0\0\1\x80"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(RecordRejected, match=r"client\.state .*start a new run"):
        Diary(tmp_path, "run")


def test_a_damaged_event_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes() + b"\0\0\0\1\x80")
    with pytest.raises(RecordRejected, match=r"client\.state"):
        Diary(tmp_path, "run")


def test_a_file_that_is_gone_is_missed_once_there_are_records(tmp_path: Path) -> None:
    (tmp_path / "rounds").mkdir()
    (tmp_path / "rounds/round_0000.json").write_text("{}")
    again(tmp_path)
    (tmp_path / FILE_NAME).unlink()
    (tmp_path / "rounds/round_0010.json").write_text("{}")
    with pytest.raises(RecordRejected, match="is gone"):
        Diary(tmp_path, "run")


def test_the_file_of_another_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(RecordRejected, match="is of run run, this is run other"):
        Diary(tmp_path, "other")


async def test_the_disk_that_has_what_an_earlier_start_has_left_is_named_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_disk(monkeypatch)
    again(tmp_path)
    monkeypatch.setattr(service, "_SLOW_S", 0.0)
    answers, notices = threading.Event(), list[str]()

    def opened(directory: Path, run_id: str) -> Diary:
        answers.wait()
        return Diary(directory, run_id)

    def notice(text: str) -> None:
        notices.append(text)
        answers.set()

    monkeypatch.setattr(service, "Diary", opened)
    control: Any = SimpleNamespace(notice=notice)
    diary = await service.opened_diary(tmp_path, "run", control)
    assert diary.generation == 2
    diary.close()
    assert f"{tmp_path} does not answer" in notices[0]
    answers.clear()
    monkeypatch.setattr(service, "_DISK_PATIENCE_S", 0.0)
    with pytest.raises(StorageError, match=f"{tmp_path} does not answer"):
        await service.opened_diary(tmp_path, "run", control)
    answers.set()
    [thread.join() for thread in threading.enumerate() if thread.name == "diary"]


async def test_what_is_wrong_with_what_an_earlier_start_has_left_is_said_as_such(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"")
    with pytest.raises(RecordRejected, match=r"client\.state"):
        await service.opened_diary(tmp_path, "run", cast(Any, SimpleNamespace(notice=print)))
