"""What a page knows of a run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.client.ledger import Ledger
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.events.base import EVENTS_FILE, Event
from shoal.events.losses import ServerLost
from shoal.events.mirror import MirrorsBehind
from shoal.events.run import EvaluationDone, LossPart, RoundBegun, RoundRecorded, RoundShared, RunStopped
from shoal.ids import PeerId
from shoal.log import written_lines
from shoal.monitor.exporters.base import noted_event
from shoal.monitor.exporters.metrics_file import MetricsFile
from shoal.monitor.page.chronicle import Chronicle, info_of, read_chronicle
from shoal.telemetry.rows import METRICS_FILE, MetricRow

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
INFO = info_of(Config(), "sandbox-1")


def row(second: float, run: dict[str, float], **peers: dict[str, float]) -> MetricRow:
    return MetricRow(BEGAN + timedelta(seconds=second), run, peers)


def noted(folder: Path, *events: Event) -> list[bytes]:
    """The lines that a client writes of these events."""
    folder.mkdir(exist_ok=True)
    ledger = Ledger(SystemClock(), log_dir=folder)
    for event in events:
        ledger.note(event)
    ledger.close()
    return [line.rstrip() for line in written_lines(folder / EVENTS_FILE)]


def recorded(number: int, loss: float = 2.0) -> RoundRecorded:
    return RoundRecorded(number, loss, {}, True, {"ring": 5, "step": 7}, 3.5, 0, (LossPart(8, 1.0, 2.0, 3.0),))


def test_a_number_has_its_newest_value_and_a_curve_over_time_and_samples() -> None:
    chronicle = Chronicle(INFO)
    chronicle.row(row(0, {"loss/train": 3.0, "samples": 8.0, "step": 1.0, "counters/x": 1.0}))
    news = chronicle.row(row(1.5, {"loss/train": 2.0, "samples": 16.0}))
    past = chronicle.past(BEGAN.timestamp() + 2)
    assert news["run"] == {"loss/train": 2.0, "samples": 16.0}
    assert past["run"]["loss/train"] == (2.0, BEGAN.timestamp() + 1.5)
    assert past["run"]["step"] == (1.0, BEGAN.timestamp())
    assert past["curves"].keys() == {"loss/train"}
    assert past["curves"]["loss/train"]["buckets"] == [[0.0, 8, 3.0], [1.5, 16, 2.0]]
    assert "counters/x" not in past["run"]


def test_the_traffic_of_a_peer_follows_from_its_bytes_and_that_of_the_swarm_from_the_peers() -> None:
    chronicle = Chronicle(INFO)
    names = {"transport.sent_bytes": 12_345_678.0, "transport.received_bytes": 10.0}
    chronicle.row(row(0, {}, one=names, other=names))
    grown = {"transport.sent_bytes": 12_345_978.0}
    news = chronicle.row(row(2, {}, one=grown, other=grown))
    assert news["peers"]["one"] == grown | {"sent_per_s": 150.0, "received_per_s": 0.0}
    assert news["run"] == {"traffic/sent_per_s": 300.0, "traffic/received_per_s": 0.0}
    # A process that is started again counts from 0: no bytes have been taken back.
    assert "sent_per_s" not in chronicle.row(row(3, {}, one={"transport.sent_bytes": 5.0}))["peers"]["one"]


def test_an_event_for_people_is_told_with_what_to_do_and_others_are_not(tmp_path: Path) -> None:
    lost = ServerLost(PeerId("p"), "server 1@box2", 0, 0.0, "", ("server 2@box2",), (0,), 1.0)
    lines = noted(tmp_path, lost, MirrorsBehind(4, 1, 30.0), RunStopped("me"))
    chronicle = Chronicle(INFO)
    news = [chronicle.event(noted_event(line)) for line in lines]
    told = [each["event"] for each in news if each is not None]
    assert [each["event"] for each in told] == ["incident.opened", "mirrors.behind", "run.stopped"]
    assert told[0]["says"] == lost.told()
    assert (told[0]["why"], told[0]["do"]) == (ServerLost.why, ServerLost.do)
    assert told[1]["do"] == MirrorsBehind.do
    assert chronicle.past(0.0)["events"] == told
    assert news[0] is None  # that the run begins is seen anyway


def test_a_round_is_gathered_from_all_that_is_noted_of_it(tmp_path: Path) -> None:
    chronicle = Chronicle(INFO)
    events = RoundBegun(1, 5, 1, 2, 4), RoundShared(1, {0: 8}, {0: 2.0}, 0.5), recorded(1), EvaluationDone(1, 1.5)
    for line in noted(tmp_path, *events):
        chronicle.event(noted_event(line))
    [found] = chronicle.past(0.0)["rounds"]
    expected = {"round": 1, "trainers": 2, "replicas": 4, "shares": {"0": 8}, "waited_s": 0.5, "loss": 2.0}
    expected |= {"samples": 8, "duration_s": 3.5, "sent_bytes": 12, "eval_loss": 1.5}
    assert found.items() >= expected.items()


def test_rounds_of_a_chain_that_was_left_are_gone_and_an_evaluation_ends_none(tmp_path: Path) -> None:
    chronicle = Chronicle(INFO)
    events = recorded(1), recorded(2), recorded(3), RoundBegun(2, 5, 1, 2, 4), EvaluationDone(1, 1.5)
    for line in noted(tmp_path, *events):
        news: Any = chronicle.event(noted_event(line))
    rounds = chronicle.past(0.0)["rounds"]
    assert [each["round"] for each in rounds] == [1, 2]
    assert (news["round"]["round"], news["last"]) == (1, 2)


def test_however_many_there_are_peers_curves_rounds_and_events_are_bounded(tmp_path: Path) -> None:
    chronicle = Chronicle(INFO)
    for second in range(3000):
        chronicle.row(row(second, {f"loss/{second}": 1.0}, **{f"peer {second}": {"busy": 0.5}}))
    [line] = noted(tmp_path, RunStopped("me"))[1:]
    begun = noted(tmp_path / "other", RoundBegun(1, 5, 1, 2, 4))[1]
    for number in range(2000):
        chronicle.event(noted_event(line))
        chronicle.event(noted_event(begun.replace(b'"round": 1', b'"round": %d' % number)))
    past = chronicle.past(0.0)
    sizes = {name: len(past[name]) for name in ("peers", "curves", "events", "rounds")}
    assert sizes == {"peers": 1024, "curves": 32, "events": 300, "rounds": 1000}
    assert "peer 2999" in past["peers"]


@pytest.mark.slow
def test_a_page_of_100_000_points_and_200_peers_has_1_4_megabytes_at_most() -> None:
    chronicle = Chronicle(INFO)
    names = ("loss/train", "grad_norm", "lr", "samples_per_s")
    peers = [f"server {number}@a-host-of-some-length" for number in range(200)]
    for second in range(25_000):
        values = {name: 1.23456 + (second * 7919 % 1000) / 997 for name in names}
        of_peers: dict[str, dict[str, float]] = {}
        if second % 250 == 0:
            sent = {"transport.sent_bytes": second * 12_345.0, "transport.received_bytes": second * 11_111.0}
            measured = {"samples_per_s": 12.345 + second % 7, "busy": 0.4321 + second % 3 / 10, "stage": 1.0}
            of_peers = dict.fromkeys(peers, sent | measured)
        chronicle.row(row(second, values | {"samples": second * 16.0}, **of_peers))
    assert len(msgspec.json.encode(chronicle.past(0.0))) < 1.4e6


def test_what_a_run_has_left_is_what_it_has_shown_and_broken_lines_cost_nothing_else(tmp_path: Path) -> None:
    shown = Chronicle(INFO)
    file = MetricsFile(tmp_path)
    rows = [row(second, {"loss/train": 1.0 + second, "samples": 8.0 * second}) for second in range(20)]
    for each in rows:
        shown.row(each)
        file.row(each)
    file.close(1.0)
    lines = noted(tmp_path, RoundBegun(1, 5, 1, 2, 4), recorded(1), RunStopped("me"))
    for line in lines:
        shown.event(noted_event(line))
    for name in (METRICS_FILE, EVENTS_FILE):
        with (tmp_path / name).open("ab") as broken:
            broken.write(
                b'{"time": "2026-\n{"time": "x", "level": "INFO", "event": "run.stopped", "says": "x"}\n\xff\n'
            )
    read, told = read_chronicle(tmp_path, INFO)
    assert msgspec.json.encode(read.past(1.0)) == msgspec.json.encode(shown.past(1.0))
    assert set(lines) <= told


@pytest.mark.parametrize("name", ["pydoc-topics", "./somewhere/pydoc-topics/"])
def test_a_page_says_what_the_run_is(name: str) -> None:
    config = Config.model_validate({"data": {"dataset_name": name}, "diloco": {"outer_steps": 7}})
    assert info_of(config, "sandbox-1") == {
        "run": "sandbox-1",
        "title": "gpt on pydoc-topics",
        "stages": 1,
        "rounds": 7,
        "loss_unit": "nats per token",
    }
