"""`shoal runs`: which folders are runs, and what is said of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli import listing_runs, main
from shoal.cli.listing_runs import end_of
from shoal.config import load_config
from shoal.runtime.run_dir import RunNote


def left(
    log_dir: Path, name: str, *, rounds: int | None = None, of: int = 20, summary: dict[str, object] | None = None
) -> Path:
    """Make the folder of a run, as its launcher has left it."""
    folder = log_dir / name
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("wandb: false\n")
    if rounds is not None:
        (folder / "rounds").mkdir()
        first = {"form": 2, "configuration": {"diloco": {"outer_steps": of}}}
        (folder / "rounds/round_0000.json").write_text(json.dumps(first))
        for round in range(1, rounds + 1):
            (folder / f"rounds/round_{round:04d}.json").write_text("{}")
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def log_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lives = tmp_path / "gpt-20260103-000000-cccc"
    note = RunNote(run_id=lives.name, hosts="client", launcher_pid=7, begun_unix_s=1.0, log_dir=str(lives))
    monkeypatch.setattr(listing_runs, "living_runs", lambda: [note])
    return tmp_path


def told(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    assert main(["runs", "--json", "--log-dir", str(log_dir)]) == 0
    return json.loads(capsys.readouterr().out)["runs"]


def test_each_folder_of_a_run_is_listed_with_how_it_has_ended(
    log_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left(log_dir, "gpt-20260103-000000-cccc", rounds=4)
    done: dict[str, object] = {"exit": "done", "model": "/there/model"}
    left(log_dir, "gpt-20260101-000000-aaaa", rounds=20, summary=done)
    left(log_dir, "mlp-20260102-120000-bbbb", rounds=3, summary={"exit": "interrupted", "model": None})
    left(log_dir, "gpt-20260104-000000-dddd", rounds=2)
    left(log_dir, "far-20260105-000000-eeee.servers-2")
    (log_dir / "gpt").symlink_to("gpt-20260101-000000-aaaa")
    (log_dir / "checkpoints").mkdir()
    rows = told(log_dir, capsys)
    assert [(row["run"], row["state"], row["round"], row["rounds"]) for row in rows] == [
        ("gpt-20260101-000000-aaaa", "done", 20, 20),
        ("mlp-20260102-120000-bbbb", "interrupted", 3, 20),
        ("gpt-20260103-000000-cccc", "runs", 4, 20),
        ("gpt-20260104-000000-dddd", "broken off", 2, 20),
        ("far-20260105-000000-eeee.servers-2", "ended", 0, None),
    ]
    assert rows[1]["begun"] == "2026-01-02T12:00:00.000+00:00"
    assert (rows[0]["model"], rows[0]["log_dir"]) == ("/there/model", str(log_dir / "gpt-20260101-000000-aaaa"))
    assert [row["hosts"] for row in rows] == ["client"] * 4 + ["servers"]
    assert main(["runs", "--log-dir", str(log_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "begun", "(UTC)", "round"]
    assert lines[3].split()[1:] == ["runs", "2026-01-03", "00:00", "4/20"]
    assert lines[5].split()[4] == "-"
    assert lines[6] == f"each has a folder in {log_dir}"
    assert max(map(len, lines[:6])) <= 80


@pytest.mark.parametrize("text", ["[1", "[" * 3000, '{"configuration": [1]}', '{"configuration": {"diloco": 1}}'])
@pytest.mark.parametrize("name", ["renamed", "renamed-99999999-999999-aaaa"])
def test_what_is_damaged_or_called_otherwise_is_listed_all_the_same(
    log_dir: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    folder = left(log_dir, name, rounds=0)
    for file in ("summary.json", "rounds/round_0000.json"):
        (folder / file).write_text(text)
    (folder / "config.yaml").write_text("diloco: [")
    [row] = told(log_dir, capsys)
    assert (row["run"], row["state"], row["round"], row["rounds"]) == (name, "broken off", 0, None)


def test_a_run_without_a_record_was_to_have_as_many_rounds_as_it_was_told(
    log_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = left(log_dir, "gpt-20260101-000000-aaaa")
    (folder / "config.yaml").write_text("diloco: {outer_steps: 7}")
    [row] = told(log_dir, capsys)
    assert (row["round"], row["rounds"]) == (0, 7)
    assert main(["runs", "--log-dir", str(log_dir)]) == 0
    assert "0/7" in capsys.readouterr().out


def test_what_comes_next_is_offered_of_a_run_that_was_killed_and_not_of_one_that_goes_on(log_dir: Path) -> None:
    lives, killed = "gpt-20260103-000000-cccc", "gpt-20260104-000000-dddd"
    ends = []
    for name in (lives, killed):
        left(log_dir, name, rounds=2)
        (log_dir / "checkpoints" / name / "round_000002").mkdir(parents=True)
        ends.append(end_of(log_dir / name, load_config(None, {"log_dir": str(log_dir)}, {})))
    resume = f"shoal start-trainer-client --resume {log_dir}/checkpoints/{killed} --log-dir {log_dir}"
    assert ends == [
        ("the run went on when this was written", []),
        (
            "the run has broken off: its launcher was killed, or its disk took no summary",
            [resume, f"shoal events {log_dir}/{killed}"],
        ),
    ]


def test_where_there_is_none_the_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--log-dir", str(tmp_path / "none")]) == 0
    assert f"no run has left a folder in {tmp_path / 'none'}" in capsys.readouterr().out
