"""`shoal.load_run` gives what a run has left as columns of numpy, and the notebook of examples/ reads a run with it."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from tests.browser.made_runs import RUN_ID, make_run

import shoal
from shoal.errors import ConfigError

NOTEBOOK = Path(__file__).parents[3] / "examples" / "read_run.ipynb"
TICKS, PEERS = 130, 4


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run of two rounds, and the link to it."""
    make_run(tmp_path / "logs" / RUN_ID, TICKS, PEERS, end_s=1_800_000_000.0)
    (tmp_path / "logs" / "sandbox").symlink_to(RUN_ID)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logs"


def test_numbers_are_columns_of_one_length_and_what_a_row_lacks_is_nan(logs: Path) -> None:
    run = shoal.load_run("logs/sandbox")
    assert run.folder == logs / RUN_ID
    assert run.config.num_stages == 4
    assert {len(column) for column in run.numbers.values()} == {TICKS}
    assert {column.dtype for column in run.numbers.values()} == {np.dtype(np.float64)}
    assert (run.numbers["time"][0], run.numbers["time"][-1]) == (1_800_000_000.0 - TICKS, 1_800_000_000.0 - 1)
    assert np.array_equal(run.numbers["step"], 2.0 * np.arange(TICKS) + 1)
    # Of three evaluations; the other rows have none.
    assert np.count_nonzero(~np.isnan(run.numbers["loss/eval"])) == 3
    samples, loss = run.curve("loss/eval")
    assert (list(samples), len(loss)) == ([64.0, 64.0 * 61, 64.0 * 121], 3)
    assert repr(run) == f"<run {RUN_ID}: {TICKS} rows, {PEERS} processes, {len(run.events)} events>"


def test_each_process_has_columns_of_its_own(logs: Path) -> None:
    run = shoal.load_run(logs / RUN_ID)
    times, steps = run.curve("step.committed", over="time", peer="server 0@box0")
    assert len(times) == len(steps) > 5
    assert all(steps[1:] > steps[:-1])
    with pytest.raises(KeyError):
        run.curve("step.committed", peer="nobody")


def test_a_run_that_goes_on_has_no_summary_and_one_that_has_ended_has(logs: Path) -> None:
    assert shoal.load_run(logs / RUN_ID).summary == {}
    (logs / RUN_ID / "summary.json").write_text('{"exit": "done"}')
    assert shoal.load_run(logs / RUN_ID).summary == {"exit": "done"}


def test_a_damaged_summary_is_named(logs: Path) -> None:
    folder = logs / RUN_ID
    (folder / "summary.json").write_text("[" * 3000)
    with pytest.raises(ConfigError, match=r"summary\.json is no JSON"):
        shoal.load_run(folder)


def test_where_no_run_is_that_is_said_and_one_that_has_trained_nothing_is_empty(tmp_path: Path, logs: Path) -> None:
    with pytest.raises(ConfigError, match=r"no run has left config\.yaml there"):
        shoal.load_run(tmp_path)
    new = tmp_path / "new"
    new.mkdir()
    (new / "config.yaml").write_bytes((logs / RUN_ID / "config.yaml").read_bytes())
    run = shoal.load_run(new)
    assert (list(run.numbers), len(run.numbers["time"]), dict(run.peers), run.events) == (["time"], 0, {}, ())
    assert run._repr_svg_() is None


def test_the_notebook_reads_the_newest_run_cell_by_cell(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells), "it is kept without outputs"
    script: list[str] = []
    for number, cell in enumerate(cells):
        # As a notebook does: what the last line is worth is shown.
        *lines, last = ast.parse("".join(cell["source"])).body
        shown = f"shown_{number} = {ast.unparse(last.value)}" if isinstance(last, ast.Expr) else ast.unparse(last)
        script += [*map(ast.unparse, lines), shown]
    path = logs / "notebook.py"
    path.write_text("\n".join(script))
    found = runpy.run_path(str(path))
    assert "<svg" in (found["shown_0"]._repr_svg_() or "")
    said = capsys.readouterr().out
    assert "loss/train" in said
    assert "server 0@box0" in said
    assert "server.lost" in said
    assert found[f"shown_{len(cells) - 1}"] == {}


def test_a_row_without_a_time_zone_is_none_and_names_without_end_are_no_columns(logs: Path) -> None:
    rows = [{"time": "2027-01-15T08:00:00", "run": {"step": 1.0}}]
    rows += [{"time": "2027-01-15T08:00:00Z", "run": {f"name/{number}": 1.0}} for number in range(5000)]
    with (logs / RUN_ID / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    run = shoal.load_run(logs / RUN_ID)
    assert {len(column) for column in run.numbers.values()} == {TICKS + 5000}
    assert len(run.numbers) <= 4097
