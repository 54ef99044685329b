"""Where it goes what happens to a run."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from shoal import log
from shoal.client.diary import Diary
from shoal.client.ledger import Ledger
from shoal.clock import SystemClock
from shoal.events.base import EVENTS_FILE
from shoal.events.losses import ServerLost
from shoal.events.run import ClientStarted, RoleCounted, RoundBegun, RunLaunched, StepReported, TrainingDiverging
from shoal.events.stages import TrainingStopped
from shoal.ids import PeerId

LOST = ServerLost(PeerId("a"), "server 0", 1, 0.0, "", (), (0,), 5.0)
STEP = StepReported(0, 1, 0, 4, 4, math.inf, False, 0.5, 7.0)


class Clock(SystemClock):
    """It is 07:00:01.5 in 1970, and the run was launched 3 s ago."""

    def now_s(self) -> float:
        return 8.0

    def unix_s(self) -> float:
        return 7 * 3600 + 1.5


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_happens_is_a_line_in_events_jsonl_with_its_time_its_fields_and_its_sentence(tmp_path: Path) -> None:
    ledger = Ledger(Clock(), age_s=lambda: 3.0, log_dir=tmp_path)
    ledger.note(LOST)
    ledger.note(RoundBegun(1, 4, 2, 2, 4))
    written = lines(tmp_path / EVENTS_FILE)
    ledger.close()
    assert written[0] == {"time": written[1]["time"], "level": "INFO", "event": "run.launched", "at_s": 5.0}
    assert written[1] == {
        "time": "1970-01-01T07:00:01.500+00:00",
        "level": "INFO",
        "event": "server.lost",
        **LOST.fields(),
        "over": [],
        "slots": [0],
    }
    assert written[2] == {
        "time": written[1]["time"],
        "level": "WARNING",
        "event": "incident.opened",
        "number": 1,
        "kind": "server",
        "cause": "ended",
        "who": "server 0",
        "host": "",
        "stage": 1,
        "round": 0,
        "noticed_after_s": 0.0,
        "at_s": 5.0,
        "says": LOST.told(),
        "shown": True,
    }
    assert written[3].keys() == {"time", "level", "event", "round", "steps", "pipelines", "trainers", "replicas"}


def test_what_comes_with_every_step_is_counted_and_fills_neither_file_nor_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="shoal")
    ledger = Ledger(Clock(), log_dir=tmp_path)
    for event in (STEP, RoleCounted(PeerId("a"), {"refused": 1})):
        ledger.note(event)
    ledger.close()
    assert ledger.totals.progress.steps == 1
    assert [line["event"] for line in lines(tmp_path / EVENTS_FILE)] == ["run.launched"]
    assert [record.getMessage() for record in caplog.records] == ["run.launched"]


def test_what_follows_from_an_event_is_noted_after_it_and_only_once(tmp_path: Path) -> None:
    diary, said = Diary(tmp_path, "run"), list[str]()
    ledger = Ledger(Clock(), diary, show=said.append)
    ledger.note(LOST)
    ledger.note(STEP)
    diary.close()
    assert said == [LOST.told(), "trainer 0 trains again after 2.0 s without a step (server 0 lost)"]
    again = Diary(tmp_path, "run")
    again.close()
    assert again.events == (RunLaunched(8.0), LOST, STEP, ClientStarted()), "what follows is found again"
    Ledger(Clock(), again, show=said.append)
    assert len(said) == 2, "what is counted again is not said again"


def test_the_user_is_told_what_to_do_below_what_has_happened() -> None:
    said: list[str] = []
    ledger = Ledger(Clock(), show=said.append)
    ledger.note(TrainingStopped((1,)))
    ledger.note(TrainingDiverging("20 steps in a row were skipped"))
    assert said == [
        TrainingStopped((1,)).say(),
        f"  {TrainingStopped.do}",
        "training may have diverged: 20 steps in a row were skipped",
    ]


def test_the_launch_is_when_it_was_however_often_the_client_is_started_again(tmp_path: Path) -> None:
    for age_s in (3.0, 3.5):
        diary = Diary(tmp_path, "run")
        ledger = Ledger(Clock(), diary, age_s=lambda age_s=age_s: age_s)
        diary.close()
        assert ledger.totals.launched_s == 5.0


def test_a_file_that_cannot_be_written_is_said_once_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / EVENTS_FILE).symlink_to("/dev/full")
    ledger = Ledger(Clock(), log_dir=tmp_path)
    ledger.note(LOST)
    ledger.close()
    assert len(ledger.totals.incidents.all) == 1
    assert capsys.readouterr().err.count("cannot write") == 1


def test_what_a_full_disk_does_not_take_is_counted_all_the_same_and_put_down_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary = Diary(tmp_path, "run")
    ledger = Ledger(Clock(), diary)

    def full(file: int, what: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shoal.client.diary._write", full)
        ledger.note(STEP)
    assert (ledger.totals.progress.steps, diary.failure) == (1, 28)
    ledger.note(LOST)
    ledger.close()
    assert [event for event in Diary(tmp_path, "run").events if event in (STEP, LOST)] == [STEP, LOST]


def test_the_file_is_bounded_as_logs_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_FILE_BYTES", 2000)
    ledger = Ledger(Clock(), log_dir=tmp_path)
    for _ in range(50):
        ledger.note(LOST)
    ledger.close()
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {EVENTS_FILE, f"{EVENTS_FILE}.1", f"{EVENTS_FILE}.2"}
    assert max(sizes.values()) <= 2000
