"""What takes its time at the end: a record on a disk that does not answer, a model that is fetched."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from tests.set_clock import ManualClock
from tests.unit.client.noted import NotedLedger

from shoal.averaging.audit import Audit
from shoal.averaging.coordinator import RoundOutcome
from shoal.averaging.journal import Genesis
from shoal.client import client, round_records, succession
from shoal.client.model_export import ModelExport, ModelLeft
from shoal.client.needed_files import NeededFiles
from shoal.client.round_records import RoundRecords
from shoal.config import Config
from shoal.errors import RecordRejected, StorageError
from shoal.events.base import Event
from shoal.events.hosts import DiskTakesAgain
from shoal.events.incidents import CostsUnknown, RecordUnread, StepsUncounted
from shoal.events.losses import LossFound
from shoal.events.run import (
    DiskTakesNothing,
    ModelFetching,
    RecordAwaited,
    RecordRestored,
    RoundNotWritten,
    RunTakenOver,
)
from shoal.wire.messages.round import Record


async def test_a_client_that_ends_does_not_wait_for_a_disk_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(round_records, "follows", lambda *_: answers.wait() and False)
    monkeypatch.setattr(round_records, "_PATIENCE_S", 0.01)
    ledger, standing = NotedLedger(), SimpleNamespace(record=SimpleNamespace(round=5), signed=None)
    try:
        needed = NeededFiles(ledger, ManualClock())
        assert not await round_records.write_last(cast(RoundOutcome, standing), tmp_path, ledger, needed)
    finally:
        answers.set()
    assert ledger.noted == [RoundNotWritten(5, 0.01)]


def refused(times: int) -> Callable[..., None]:
    """Return a way of writing that a full disk refuses so often."""
    left = iter(range(times))

    def write(*_: object) -> None:
        if next(left, None) is not None:
            raise StorageError("cannot write it")

    return write


async def test_a_client_that_ends_waits_a_little_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_records, "follows", lambda *_: True)
    monkeypatch.setattr(round_records, "write_round", refused(3))
    ledger, clock = NotedLedger(), ManualClock()
    standing = cast(RoundOutcome, SimpleNamespace(record=SimpleNamespace(round=5), signed=None))
    assert await round_records.write_last(standing, tmp_path, ledger, NeededFiles(ledger, clock))
    assert ledger.noted == [DiskTakesNothing("cannot write it", 5 / 60), DiskTakesAgain("the client")]
    assert ledger.said[0].endswith("cannot write it; in 5 s it ends")
    monkeypatch.setattr(round_records, "write_round", refused(1000))
    with pytest.raises(StorageError, match="cannot write it"):
        await round_records.write_last(standing, tmp_path, ledger, NeededFiles(ledger, clock))
    assert sum(clock.slept_s) < 20.0


async def test_the_beginning_of_a_run_waits_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_records, "write_genesis", refused(3))
    ledger, clock = NotedLedger(), ManualClock()
    await round_records.write_beginning(cast(Genesis, None), tmp_path, ledger, NeededFiles(ledger, clock))
    assert ledger.noted == [DiskTakesNothing("cannot write it", 30.0), DiskTakesAgain("the client")]
    assert len(clock.slept_s) == 3


async def test_a_disk_that_takes_long_for_a_record_is_named_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ledger, noted = threading.Event(), NotedLedger(), anyio.Event()
    written: list[object] = []

    def write_round(*arguments: object) -> None:
        answers.wait()
        written.append(arguments)

    def note(event: Event) -> None:
        ledger.noted.append(event)
        noted.set()

    monkeypatch.setattr(round_records, "write_round", write_round)
    monkeypatch.setattr(round_records, "_SLOW_S", 0.01)
    monkeypatch.setattr(ledger, "note", note)
    outcome = cast(RoundOutcome, SimpleNamespace(record=SimpleNamespace(round=5), signed=None))
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(round_records.write, outcome, tmp_path, ledger)
            await noted.wait()
            assert (ledger.noted, written) == ([RecordAwaited(5, str(tmp_path), 0.01)], [])
            tasks.cancel_scope.cancel()
            answers.set()
    finally:
        answers.set()
    assert len(written) == 1, "it is not left undone"
    monkeypatch.setattr(round_records, "_SLOW_S", 60.0)
    await round_records.write(outcome, tmp_path, ledger)
    assert len(ledger.noted) == 1


async def test_a_disk_that_takes_long_for_the_beginning_of_a_run_is_named_and_keeps_nobody_who_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, ledger, noted = threading.Event(), NotedLedger(), anyio.Event()
    monkeypatch.setattr(round_records, "write_genesis", lambda *_: answers.wait())
    monkeypatch.setattr(round_records, "_SLOW_S", 0.01)

    def note(event: Event) -> None:
        ledger.noted.append(event)
        noted.set()

    monkeypatch.setattr(ledger, "note", note)
    try:
        async with anyio.create_task_group() as tasks:
            needed = NeededFiles(ledger, ManualClock())
            tasks.start_soon(round_records.write_beginning, cast(Genesis, None), tmp_path, ledger, needed)
            await noted.wait()
            tasks.cancel_scope.cancel()
    finally:
        answers.set()
    assert ledger.noted == [RecordAwaited(0, str(tmp_path), 0.01)]


async def test_the_record_of_others_from_which_a_client_goes_on_waits_for_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, full = NotedLedger(), [StorageError("cannot write it")]

    async def inherit(*_: object) -> dict[int, str]:
        if full:
            raise full.pop()
        return {0: "p"}

    monkeypatch.setattr(round_records, "inherit", inherit)
    parts = {
        "ledger": ledger,
        "needed": NeededFiles(ledger, ManualClock()),
        "log_dir": tmp_path,
        "coordinator": SimpleNamespace(outcome=lambda _: None),
        "slots": None,
        "data": None,
    }
    ready: Any = SimpleNamespace(tip=SimpleNamespace(round=3, signed=b""), holders={})
    await RoundRecords.inherit(cast(RoundRecords, SimpleNamespace(**parts)), ready)
    waits = DiskTakesNothing("cannot write it", 30.0)
    assert ledger.noted == [waits, DiskTakesAgain("the client"), RunTakenOver(3, 0, {0: "p"})]


async def test_records_that_are_damaged_are_named_by_who_goes_on_from_the_record_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, written = NotedLedger(), list[object]()
    monkeypatch.setattr(succession, "record_hash", lambda _: "hash")
    monkeypatch.setattr(succession, "used_samples", lambda _: ())
    monkeypatch.setattr(succession, "parameters_of", lambda _: {})
    monkeypatch.setattr(succession, "set_aside", lambda *_: {2: "round_0002.json is damaged", 3: "so is this"})
    monkeypatch.setattr(succession, "write_round", lambda *arguments: written.append(arguments))
    outcome: Any = SimpleNamespace(record=SimpleNamespace(round=3, generations={}, marks=b""), signed=b"")
    trainers, data = SimpleNamespace(begin_above=lambda *_: None), SimpleNamespace(know=lambda *_: None)
    await succession.inherit(outcome, tmp_path, cast(Any, trainers), cast(Any, data), ledger)
    assert ledger.noted == [RecordUnread(2, "round_0002.json is damaged: it is set aside"), RecordRestored(3)]
    assert written == [(tmp_path, outcome.record, b"")]


class _Ticks:
    """A clock of which three sleeps end."""

    def __init__(self) -> None:
        self.left = 3

    async def sleep_s(self, _: float) -> None:
        if not self.left:
            await anyio.sleep_forever()
        self.left -= 1


async def test_how_far_a_model_is_that_takes_long_to_fetch_is_said_again_and_again() -> None:
    ledger = NotedLedger()
    export = SimpleNamespace(clock=_Ticks(), fetch=SimpleNamespace(fetched_bytes=25), ledger=ledger)
    with anyio.move_on_after(0.1):
        await ModelExport._say(cast(ModelExport, export), 100)
    assert ledger.noted == [ModelFetching(0.25, 100)] * 3


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error", "round_0003.jsonl"), RecordRejected("round_0003.jsonl is no step log")]
)
async def test_a_run_does_not_end_because_a_file_of_an_earlier_round_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(round_records, "lost_in", fail)
    ledger = NotedLedger()
    ledger.note(LossFound("data_server", "the data server", (0,), 5.0, 6.0))
    monkeypatch.setattr(type(ledger.totals.incidents), "wants_costs", True)
    records = SimpleNamespace(ledger=ledger, log_dir=tmp_path)
    record = cast(Record, SimpleNamespace(round=7))
    await RoundRecords._count_costs(cast(RoundRecords, records), record)
    assert ledger.noted[-1] == CostsUnknown(7, str(error))
    assert "round_0003.jsonl" in ledger.said[-2]


async def test_a_file_of_a_round_that_cannot_be_read_is_named_and_the_run_is_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unread, unread_records = {3: "round_0003.jsonl is no step log"}, {4: "round_0004.json is no round record"}
    found = Audit(2, 9, 30, 0, 0, 0, lost={}, unread=unread, unread_records=unread_records)

    def audit(*_: object, is_strict: bool) -> Audit:
        assert not is_strict
        return found

    monkeypatch.setattr(client, "audit", audit)
    ledger = NotedLedger()
    parts = {
        "counters": SimpleNamespace(settle=lambda: None),
        "ledger": ledger,
        "model": SimpleNamespace(left=ModelLeft()),
        "_membership": SimpleNamespace(view=None),
        "_log_dir": tmp_path,
        "_config": Config(),
        "_run_id": "run-1",
    }
    summary = await client.Client.summary(cast(client.Client, SimpleNamespace(**parts)), "done")
    assert (summary["rounds_uncounted"], summary["rounds_unread"], summary["samples"]) == ([3], [4], 30)
    assert ledger.noted == [RecordUnread(4, unread_records[4]), StepsUncounted(3, unread[3])]
    assert "record of round 4: round_0004.json is no round record" in ledger.said[0]
    assert any("round 3 are not counted: round_0003.jsonl" in said for said in ledger.said)
