"""What tests bring about of the catalogues of events and numbers is known, and that something is missing is said."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests import emitted

ROOT = Path(__file__).parents[2]


def test_what_no_process_has_brought_about_is_named_and_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = emitted.missing(tmp_path)
    assert {"event server.lost", "number step.committed", "run number loss"} <= set(everything)
    (tmp_path / "1.txt").write_text("\n".join(everything[::2]))
    (tmp_path / "2.txt").write_text("\n".join(everything[1:-2:2]))
    lacking = [each for each in everything[-2:] if each not in everything[::2]]
    assert emitted.missing(tmp_path) == lacking != []
    assert emitted.main(tmp_path) == 1
    assert f"no test has brought about 1: {lacking[0]}" in capsys.readouterr().out
    (tmp_path / "3.txt").write_text(lacking[0])
    assert emitted.main(tmp_path) == 0


def test_one_that_may_be_missing_has_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "1.txt").write_text("\n".join(emitted.missing(tmp_path)))
    monkeypatch.setattr(emitted, "ALLOWED", {"event server.lost": "nobody loses servers"})
    assert emitted.missing(tmp_path) == ["event server.lost"]


_TESTS = """
import json, logging, types
from shoal.events.base import emit
from shoal.events.servers import UnitBuilt
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.refusals import Refusals

def test_it(tmp_path):
    emit(logging.getLogger(), UnitBuilt(0, "why"))
    connection = types.SimpleNamespace(peer="p", proven=None, dialled=None, source="s")
    Refusals(MetricRegistry()).note(connection, OSError())
    MetricRegistry().counter("snapshot.kept").add()
    row = {"run": {"loss/train": 1.0}, "peers": {"server 0": {"step.committed": 3, "ring.refused": 0}}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\\n" + '{"half')
    (tmp_path / "a.log").write_text(json.dumps({"event": "server.lost"}))
"""


def test_events_and_numbers_of_a_process_and_of_its_files_are_found(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS)
    (tmp_path / "conftest.py").write_text("from tests.emitted import pytest_sessionfinish, record\nrecord()\n")
    environment = {**os.environ, "EMITTED_EVENTS": str(tmp_path / "found"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}"]
    subprocess.run([*command, str(tmp_path)], check=True, env=environment, cwd=tmp_path, timeout=240)
    [path] = (tmp_path / "found").iterdir()
    assert path.read_text().splitlines() == [
        "event server.lost",
        "event transport.refused",
        "event unit.built",
        "number step.committed",
        "number transport.refused",
        "run number loss",
    ]
