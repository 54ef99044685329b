"""What a client leaves to its next start, whole, cut off in the middle, and damaged."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest

from shoal.client.counters import Counted
from shoal.client.diary import (
    FILE_NAME,
    ClientStarted,
    Counts,
    Diary,
    Lost,
    RestoredStage,
    RoundPlan,
    Saved,
    ServersMoved,
    SlotDone,
    StagesRestored,
)
from shoal.client.failovers import Failovers
from shoal.client.progress import Progress
from shoal.control.records import StageRecord, VerifiedRecord
from shoal.errors import RecordRejected
from shoal.ids import PeerId, StepKey
from shoal.swarm.routing import Pipeline
from shoal.wire.messages.base import Hop, SampleRange, StepRange
from shoal.wire.messages.control import EvalReport, StepReport, TrainerDone

STEP = StepReport(1, 2, StepKey(1, 1, 8, 0), 4, math.inf, 1.0, 0.1, True, 0.5, 12.5)
RESTORED = (RestoredStage(1, 3, (1, 2), "ab"),)
EVENTS = (
    STEP,
    EvalReport(0, 1, 3.5, 10),
    SlotDone(2, TrainerDone(0, 2, 4, 16, {"control": 3})),
    Lost("server", (0,), 1.5),
    Counts(PeerId("a"), {"refused": 2}),
    StagesRestored(RESTORED),
    ServersMoved(2),
)


def saved() -> Saved:
    progress = Progress(steps=3, loss_last=2.5, eval_losses={0: 5.0})
    progress.step(STEP, 12.5)
    progress.evaluated(EvalReport(0, 1, 3.5, 10), 20)
    progress.done(TrainerDone(0, 1, 4, 16, {"activations": 7}), 1)
    failovers = Failovers()
    failovers.lost("trainer", {0, 1}, 2.0)
    path = (Hop(PeerId("a"), ("memory:a",)), Hop(PeerId("b"), ("memory:b",)))
    return Saved(
        run_id="run",
        plan=RoundPlan(2, StepRange(4, 8), (Pipeline(0, path),), {0: 1}, 7.5),
        rounds=1,
        durations_s=[1.5],
        hashes={0: "ab"},
        recorded=(SampleRange(0, 0, 8),),
        progress=progress,
        last_numbers={0: 3},
        failovers=failovers,
        servers=(VerifiedRecord("stage.0", PeerId("a"), 5, math.inf, StageRecord(("memory:a",), 1.0, stage=0)),),
        counted=Counted({PeerId("a"): {"refused": 1}}, {PeerId("b"): {"lost": 1}}),
        stages_restored=RESTORED,
        servers_moved=1,
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
    assert (diary.generation, diary.is_resumed, diary.saved, diary.events) == (1, False, Saved("run"), ())


def test_the_next_start_reads_what_was_saved_and_what_was_noted_since(tmp_path: Path) -> None:
    write(tmp_path)
    diary = again(tmp_path)
    assert (diary.generation, diary.is_resumed) == (2, True)
    assert diary.saved == saved()
    assert diary.events == EVENTS


def test_starts_are_counted_also_when_they_save_nothing(tmp_path: Path) -> None:
    assert [again(tmp_path).generation for _ in range(3)] == [1, 2, 3]
    diary = Diary(tmp_path, "run")
    diary.save(Saved("run", generation=diary.generation))
    diary.close()
    assert diary.generation == 4
    diary = again(tmp_path)
    assert (diary.generation, diary.events) == (5, ())


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
    assert again(tmp_path).events == (*EVENTS[:-1], ClientStarted(), STEP)


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
