"""`report.html`: the page and its data in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.config import Config
from shoal.config.dump import dump_config
from shoal.events.base import Event
from shoal.events.run import EvaluationDone, LossPart, RoundBegun, RoundRecorded
from shoal.monitor.exporters.metrics_file import MetricsFile
from shoal.monitor.page.chronicle import DRAWN, DRAWN_OF_PEERS
from shoal.monitor.page.files import MODULES, OF_OPERATORS, PLOT, STATIC, static_files
from shoal.report.page import FILE_NAME, one_module, page_with, write_page
from shoal.telemetry.rows import MetricRow

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def left(folder: Path, peer: str = "server 1@box2") -> Path:
    """A folder as a run leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(Config()))
    file = MetricsFile(folder)
    for second in range(12):
        run = {"step": float(second), "samples": 8.0 * second, "loss/train": 3.0 - second / 10}
        file.row(MetricRow(BEGAN + timedelta(seconds=second), run, {peer: {"stage": 0.0}}))
    file.close(1.0)
    return folder


def data_of(html: str) -> dict[str, object]:
    found = re.search(r'<script id="past" type="application/json">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_report_has_the_run_in_it_and_loads_nothing(tmp_path: Path) -> None:
    path = write_page(left(tmp_path), Config(), "run")
    assert path == tmp_path / FILE_NAME
    html = path.read_text()
    past = data_of(html)
    assert past["ended"] == "the run has ended"
    assert write_page(tmp_path, Config(), "run", "the run was interrupted", ["shoal run-local --resume /c/r"]) == path
    told = data_of(path.read_text())
    assert (told["ended"], told["commands"]) == ("the run was interrupted", ["shoal run-local --resume /c/r"])
    assert past["now"] == (BEGAN + timedelta(seconds=11)).timestamp()
    without_data = re.sub(r'<script id="past".*?</script>', "", html, flags=re.DOTALL)
    assert re.findall(r'(?:src|href)="(?!#|data:,)', without_data) == []


def test_its_policy_allows_each_script_and_style_in_it_and_no_other(tmp_path: Path) -> None:
    html = page_with(b"{}")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    inside = re.findall(r"<style>(.*?)</style>|<script(?: type=\"module\")?>(.*?)</script>", html, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256("".join(each).encode()).digest()).decode() for each in inside}
    assert len(inside) == 4
    assert set(re.findall(r"'sha256-([^']*)'", policy[1])) == hashes
    assert policy[1].startswith("default-src 'none';")
    assert "unsafe" not in policy[1]


def test_what_a_peer_calls_itself_cannot_leave_the_data(tmp_path: Path) -> None:
    name = "</script><script>alert(1)</script><!--"
    path = write_page(left(tmp_path, name), Config(), "run")
    assert path is not None
    html = path.read_text()
    assert name not in html
    assert name in str(data_of(html)["peers"])


def test_the_modules_of_the_page_fit_into_one() -> None:
    text = one_module()
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)
    names = re.findall(r"^(?:const|let|class|function) (\w+)", text, re.MULTILINE)
    assert sorted(names) == sorted(set(names))
    for module in MODULES:
        earlier = {each.name for each in MODULES[: MODULES.index(module)]}
        assert set(re.findall(r'^import .* from "\./(.*)";', module.read_text(), re.MULTILINE)) <= earlier, module.name


def test_the_pages_have_no_file_that_neither_loads_and_load_none_from_elsewhere() -> None:
    there = {path for path in STATIC.rglob("*") if path.suffix in (".js", ".css")}
    assert there == {*static_files(), *OF_OPERATORS}
    ours = [path for path in STATIC.rglob("*") if path.is_file() and path.parent == STATIC]
    for path in ours:
        text = path.read_text()
        assert "://" not in text, path.name
        # What peers say is text: nothing reads it as markup or as a program.
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )
    assert "v1.6.32" in PLOT.read_text()[:100]


@pytest.mark.parametrize(("name", "numbers"), [("DRAWN", DRAWN), ("DRAWN_OF_PEERS", DRAWN_OF_PEERS)])
def test_the_page_goes_on_with_the_curves_that_the_server_has_begun(name: str, numbers: tuple[str, ...]) -> None:
    found = re.search(rf"^const {name} = (\[.*\]);$", (STATIC / "store.js").read_text(), re.MULTILINE)
    assert found is not None
    assert tuple(json.loads(found[1])) == numbers


def test_shoal_report_writes_it_for_a_run_that_is_named_or_the_newest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = left(tmp_path / "sandbox-1")
    assert main(["report", "--log-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / FILE_NAME)
    (folder / FILE_NAME).unlink()
    assert main(["report", str(folder)]) == 0
    assert (folder / FILE_NAME).exists()
    assert main(["report", "another", "--log-dir", str(tmp_path)]) == 2
    assert "no run called another has left metrics.jsonl or events.jsonl or summary.json" in capsys.readouterr().err


def noted(folder: Path, *events: Event) -> None:
    """Leave these events as a client notes them, one a second."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(dump_config(Config()))
    lines: list[str] = []
    for second, event in enumerate(events):
        head = {"time": (BEGAN + timedelta(seconds=second)).isoformat(), "level": "INFO", "event": event.name}
        lines.append(json.dumps(head | event.fields()))
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_a_run_without_numbers_is_reported_by_its_events_and_its_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sandbox-1"
    curve = (LossPart(8, 2.0, 2.5, 3.0), LossPart(8, 1.0, 1.5, 2.0))
    recorded = RoundRecorded(1, 2.0, {}, True, {}, 4.0, curve=curve)
    noted(folder, RoundBegun(1, 2, 1, 1, 2), recorded, EvaluationDone(1, 1.75))
    end = {"exit": "done", "ended": "2026-01-01T00:01:00.000+00:00", "samples": 16, "loss_last": 1.5, "outer_rounds": 1}
    (folder / "summary.json").write_text(json.dumps(end))
    assert main(["report", "--log-dir", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert told.out.strip() == str(folder / FILE_NAME)
    lack = "metrics.jsonl is missing, so curves have a point for each round"
    assert told.err.strip() == lack
    past = data_of((folder / FILE_NAME).read_text())
    assert past["ended"] == f"the run is complete; {lack}"
    assert past["now"] == (BEGAN + timedelta(minutes=1)).timestamp()
    values = {name: value for name, (value, _) in past["run"].items()}  # type: ignore[attr-defined]
    assert values == {"round": 1.0, "samples": 16.0, "loss/train": 1.5, "loss/eval": 1.75}
    assert past["curves"].keys() == {"loss/train", "loss/eval"}  # type: ignore[attr-defined]


def test_a_run_of_which_only_the_summary_is_left_is_reported_with_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sandbox-1"
    noted(folder)
    (folder / "events.jsonl").unlink()
    (folder / "summary.json").write_text('{"exit": "done"}')
    assert main(["report", str(folder)]) == 2
    assert "nothing to report" in capsys.readouterr().err
    (folder / "summary.json").write_text('{"exit": "done", "ended": "2026-01-01T00:01:00Z", "samples": 16, "steps": 4}')
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().err.count(" is missing, so ") == 2
    values = {name: value for name, (value, _) in data_of((folder / FILE_NAME).read_text())["run"].items()}  # type: ignore[attr-defined]
    assert values == {"samples": 16.0, "step": 4.0}


def test_a_run_without_numbers_has_no_report(tmp_path: Path) -> None:
    assert write_page(tmp_path, Config(), "run") is None
