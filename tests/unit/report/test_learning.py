"""How a run has learned, by what its clients have noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.client.ledger import Ledger
from shoal.clock import SystemClock
from shoal.events.base import EVENTS_FILE, Event
from shoal.events.losses import DataServerLost, LossFound, ServerLost, TrainerLost
from shoal.events.run import EvaluationDone, LossPart, RoundBegun, RoundRecorded, RunPaused
from shoal.events.stages import StageBeganAnew, StagesGiven
from shoal.ids import PeerId
from shoal.report.learning import learning_of, read_learning

SERVER = ServerLost(PeerId("a"), "server 1@box", 1, 0.0, "", (), (0,), 5.0)


def begun(round: int) -> RoundBegun:
    return RoundBegun(round, 4, 1, 1, 2)


def recorded(round: int, loss: float, *, samples: int = 10) -> RoundRecorded:
    """A round of two parts of so many samples each, after others that were as large."""
    curve = (LossPart(samples, loss - 1, loss, loss + 1), LossPart(samples, loss - 2, loss - 1, loss))
    return RoundRecorded(round, loss, {}, True, {}, 4.0, 2 * samples * (round - 1), curve)


def noted(*events: Event) -> list[tuple[float, Event]]:
    """One event a second."""
    return [(100.0 + second, event) for second, event in enumerate(events)]


def test_training_and_held_out_loss_lie_over_the_samples_of_the_run() -> None:
    events = (EvaluationDone(0, 6.0), begun(1), recorded(1, 5.0), EvaluationDone(1, 4.5), begun(2), recorded(2, 3.0))
    learning = learning_of(noted(*events, EvaluationDone(2, 2.0)))
    assert [(part.samples, part.loss.mean) for part in learning.trained] == [(10, 5.0), (20, 4.0), (30, 3.0), (40, 2.0)]
    assert learning.held_out == ((0, 6.0), (20, 4.5), (40, 2.0))
    assert (learning.rounds, learning.seconds) == ({1: 20, 2: 40}, 8.0)
    assert learning.incidents == ()


def test_what_was_trained_after_a_checkpoint_is_none_of_the_curve_of_a_run_that_has_gone_on_from_there() -> None:
    before = (
        begun(1),
        recorded(1, 5.0),
        begun(2),
        recorded(2, 3.0),
        EvaluationDone(2, 2.9),
        begun(3),
        recorded(3, 2.0),
    )
    after = (StagesGiven((0, 1)), begun(2), recorded(2, 4.0))
    learning = learning_of(noted(*before, EvaluationDone(3, 1.0), *after))
    assert [part.loss.mean for part in learning.trained] == [5.0, 4.0, 4.0, 3.0]
    assert (learning.rounds, learning.held_out) == ({1: 20, 2: 40}, ())
    assert learning.incidents == ((20, "resumed from a checkpoint"),)


def test_a_client_of_another_host_begins_where_the_run_was() -> None:
    learning = learning_of(noted(EvaluationDone(2, 4.0), EvaluationDone(1, 9.0), begun(3), recorded(3, 3.0)))
    assert [part.samples for part in learning.trained] == [50, 60]
    assert learning.held_out == ((40, 4.0),), "what D_1 stands over is not known here"


def test_an_incident_lies_where_its_round_was_by_time() -> None:
    events = (begun(1), SERVER, TrainerLost(1, 0.0, "", 5.0), begun(1), recorded(1, 5.0), DataServerLost((0,), 9.0))
    # The round is begun again 3 s after the first begin, and takes one second.
    assert learning_of(noted(*events)).incidents == (
        (0, "server 1@box lost"),
        (0, "trainer 1 lost"),
        (20, "data server lost"),
    )
    at = [(0.0, begun(1)), (3.0, LossFound("client", "the client", (0,), 1.0, 2.0)), (4.0, recorded(1, 5.0))]
    assert learning_of(at).incidents == ((15, "the client lost"),)
    at = [(0.0, begun(1)), (1.0, StageBeganAnew(1, 3, 0, "ab")), (2.0, RunPaused("me", 1.0)), (4.0, recorded(1, 5.0))]
    assert learning_of(at).incidents == ((5, "stage 1 began anew"),)


def test_what_a_ledger_has_written_is_read_again_over_files_that_were_pushed_aside_and_a_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.log.MAX_FILE_BYTES", 1200)
    ledger = Ledger(SystemClock(), log_dir=tmp_path)
    for round in (1, 2, 3, 4):
        ledger.note(begun(round))
        ledger.note(recorded(round, 6.0 - round))
    ledger.close()
    assert {path.name for path in tmp_path.iterdir()} >= {EVENTS_FILE, f"{EVENTS_FILE}.1"}
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"time": "2026-01-01T00:00:00+00:00", "event": "round.recorded", "rou\n\xff\n')
    learning = read_learning(tmp_path)
    assert [part.loss.mean for part in learning.trained] == [5.0, 4.0, 4.0, 3.0, 3.0, 2.0, 2.0, 1.0]


def test_of_a_run_whose_client_has_noted_nothing_there_is_nothing(tmp_path: Path) -> None:
    assert read_learning(tmp_path).trained == ()
