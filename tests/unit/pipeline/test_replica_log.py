"""The log of one replica: what comes back, files of several generations, and what happens when it cannot be written."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.hung_disk import far_disk, hung_disk

from shoal.errors import RecordRejected
from shoal.ids import PeerId, StepKey
from shoal.pipeline import replica_log
from shoal.pipeline.replica_log import (
    _MAX_WAITING_BYTES,
    Applied,
    Began,
    Loaded,
    Place,
    ReplicaLog,
    Resumed,
    Started,
    generation_number,
    read_replica_log,
    replica_logs,
)
from shoal.swarm.step_operations import Decision, Operation, OperationKind, StepTotals
from shoal.telemetry.registry import MetricRegistry
from shoal.wire.messages.base import Hop, SampleRange
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.step import Open

KEY, OTHER = StepKey(0, 1, 2, 0), StepKey(1, 1, 2, 0)
HASHES = StageHashes("p", "m", "b")
PLACE = Place("cpu", 1, {"processor": "one"}, {"torch": "2"})
STARTED = Started("run", PeerId("A"), 0, PLACE)
COMMIT = Decision(0.5, 0.1, False)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ReplicaLog]:
    log = ReplicaLog(tmp_path, STARTED, lambda: HASHES)
    yield log
    log.close()


def begin(log: ReplicaLog, key: StepKey = KEY) -> None:
    log.begins(Open(key, 1, (Hop(PeerId("A"), ("x",)), Hop(PeerId("B"), ())), (2, 1), (64, 3), (SampleRange(0, 4, 7),)))


def test_lines_come_back_in_their_order(log: ReplicaLog, tmp_path: Path) -> None:
    log.loaded(0, "D", False)
    begin(log)
    begin(log, OTHER)
    log.done(Operation(OperationKind.FORWARD, KEY, 0), None)
    log.done(Operation(OperationKind.BACKWARD, KEY, 0), StepTotals(1 / 3, True, None))
    log.done(Operation(OperationKind.LOSS, OTHER, 0), StepTotals(math.nan, False, math.inf))
    log.done(Operation(OperationKind.COMMIT, KEY, decision=COMMIT), None)
    log.done(Operation(OperationKind.COMMIT, OTHER, decision=Decision(0.0, 0.1, True)), None)
    [path] = replica_logs(tmp_path)
    peers, samples = (PeerId("A"), PeerId("B")), (SampleRange(0, 4, 7),)
    assert read_replica_log(path) == [
        STARTED,
        Loaded(0, HASHES, "D"),
        Began(KEY, peers, samples, (2, 1), (64, 3)),
        Began(OTHER, peers, samples, (2, 1), (64, 3)),
        Applied(KEY, 0.5, 0.1, False, 1 / 3, None),
        Applied(OTHER, 0.0, 0.1, True, None, None),
    ]


def test_what_was_dropped_leaves_no_totals_for_a_later_step(log: ReplicaLog, tmp_path: Path) -> None:
    log.done(Operation(OperationKind.BACKWARD, KEY, 0), StepTotals(1.0, True, None))
    log.done(Operation(OperationKind.DROP, KEY), None)
    log.done(Operation(OperationKind.COMMIT, KEY, decision=COMMIT), None)
    [path] = replica_logs(tmp_path)
    assert read_replica_log(path)[-1] == Applied(KEY, 0.5, 0.1, False, None, None)


def test_each_life_of_a_peer_has_a_file_of_its_own(tmp_path: Path) -> None:
    for _ in range(11):
        ReplicaLog(tmp_path, STARTED, lambda: HASHES).close()
    assert [path.name for path in replica_logs(tmp_path)] == [f"A.{number}.jsonl" for number in range(1, 12)]


def test_a_line_that_a_kill_has_cut_off_is_none(log: ReplicaLog, tmp_path: Path) -> None:
    log.loaded(0, "D", False)
    [path] = replica_logs(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    assert read_replica_log(path) == [STARTED]
    path.write_bytes(whole.replace(b"loaded", b"landed"))
    with pytest.raises(RecordRejected, match="no log of a replica"):
        read_replica_log(path)


class FullDisk:
    """A disk that has taken a few bytes of a line and takes no more until there is space."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, left: int = 5) -> None:
        self._write = os.write
        self.left = left
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor: int, content: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(descriptor, content[: self.left])
        self.left -= written
        return written


def test_lines_wait_for_a_disk_that_is_full_and_none_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = MetricRegistry()
    log = ReplicaLog(tmp_path, STARTED, lambda: HASHES, metrics)
    disk = FullDisk(monkeypatch)
    log.loaded(0, "D", False)
    log.loaded(1, "E", False)
    [path] = replica_logs(tmp_path)
    assert read_replica_log(path) == [STARTED]
    assert metrics.gauges()["disk.failing{what=replica_log}"] == errno.ENOSPC
    disk.left = 10_000
    log.loaded(2, "F", False)
    assert read_replica_log(path) == [STARTED, Loaded(0, HASHES, "D"), Loaded(1, HASHES, "E"), Loaded(2, HASHES, "F")]
    assert metrics.gauges()["disk.failing{what=replica_log}"] == 0.0
    assert caplog.records == []
    log.close()


def test_a_disk_that_stays_full_ends_the_log_and_not_the_replica(
    log: ReplicaLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(monkeypatch)
    line = msgspec.json.encode(Loaded(0, HASHES, "D")) + b"\n"
    for _ in range(_MAX_WAITING_BYTES // len(line) + 2):
        log.loaded(0, "D", False)
    disk.left = 10_000
    log.loaded(1, "D", False)
    [path] = replica_logs(tmp_path)
    assert read_replica_log(path) == [STARTED], "a later line without the one before would be wrong"
    assert [record.message for record in caplog.records] == ["replica_log.ended"]


def test_lines_wait_for_a_disk_that_does_not_answer_and_no_step_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_disk(monkeypatch)
    metrics = MetricRegistry()
    log = ReplicaLog(tmp_path, STARTED, lambda: HASHES, metrics)
    [path] = replica_logs(tmp_path)
    with hung_disk(monkeypatch):
        log.loaded(0, "D", False)
        log.loaded(1, "E", False)
        assert read_replica_log(path) == [STARTED]
        assert metrics.gauges()["disk.failing{what=replica_log}"] == errno.ETIMEDOUT
    log.close()
    assert read_replica_log(path) == [STARTED, Loaded(0, HASHES, "D"), Loaded(1, HASHES, "E")]
    assert metrics.gauges()["disk.failing{what=replica_log}"] == 0.0


def test_a_disk_that_never_answers_ends_the_log_and_no_line_is_left_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    far_disk(monkeypatch)
    monkeypatch.setattr(replica_log, "_MAX_WAITING", 3)
    log = ReplicaLog(tmp_path, STARTED, lambda: HASHES)
    with hung_disk(monkeypatch):
        for round in range(9):
            log.loaded(round, "D", False)
        assert [record.message for record in caplog.records] == ["replica_log.ended"]
    log.loaded(9, "D", False)
    log.close()
    [path] = replica_logs(tmp_path)
    found = read_replica_log(path)
    assert found == [STARTED, *(Loaded(round, HASHES, "D") for round in range(len(found) - 1))]
    assert len(found) < 9


def test_a_disk_that_does_not_answer_when_a_replica_begins_keeps_it_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    far_disk(monkeypatch)
    folder, answers = tmp_path / "replicas", threading.Event()
    create = replica_log._create

    def hang(*of: object) -> tuple[int, int]:
        answers.wait()
        return create(folder, STARTED.peer)

    monkeypatch.setattr(replica_log, "_create", hang)
    log = ReplicaLog(tmp_path, STARTED, lambda: HASHES)
    log.loaded(0, "D", False)
    assert log.generation is None
    assert [record.message for record in caplog.records] == ["replica_log.ended"]
    answers.set()
    log.close()


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "replicas").write_text("a file")
    log = ReplicaLog(tmp_path, STARTED, lambda: HASHES)
    log.loaded(0, "D", False)
    log.close()
    assert [record.message for record in caplog.records] == ["replica_log.ended"]


def test_a_life_knows_its_number_and_whether_it_follows_one_of_its_stage(tmp_path: Path) -> None:
    moved = Started("run", PeerId("A"), 1, PLACE)
    found: list[tuple[int | None, bool]] = []
    for started in (STARTED, STARTED, moved, STARTED, Started("other", PeerId("A"), 0, PLACE)):
        log = ReplicaLog(tmp_path, started, lambda: HASHES)
        found.append((log.generation, log.follows))
        log.close()
    assert found == [(1, False), (2, True), (3, False), (4, False), (5, False)]
    assert [generation_number(path) for path in replica_logs(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_life_says_from_which_snapshot_it_goes_on(log: ReplicaLog, tmp_path: Path) -> None:
    log.loaded(3, "D", False)
    log.resumed(1, 4)
    [path] = replica_logs(tmp_path)
    assert read_replica_log(path)[-1] == Resumed(1, 4)


@pytest.mark.parametrize("number", ["²", "", "x", "-1"])
def test_a_file_whose_number_is_none_is_no_replica_s(log: ReplicaLog, tmp_path: Path, number: str) -> None:
    [path] = replica_logs(tmp_path)
    (path.parent / f"A.{number}.jsonl").touch()
    assert replica_logs(tmp_path) == [path]
