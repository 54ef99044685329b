"""The numbers and warnings of a real run whose monitor is killed twice, in all the places where they go."""

from __future__ import annotations

import base64
import json
import os
import signal
from pathlib import Path

import pytest
from tests.e2e.launched import ENDLESS, START_S, Launched, launched, until
from tests.e2e.test_faults import interrupted
from tests.wandb_files import rows_of

from shoal.cli import main
from shoal.monitor.exporters.metrics_file import read_rows
from shoal.telemetry.catalogue import CATALOGUE, run_number
from shoal.telemetry.rows import METRICS_FILE, MetricRow

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
_OF_EVERY_RUN = {"round", "step", "samples", "loss/train", "loss/eval", "lr", "grad_norm", "step_s", "samples_per_s"}
_OF_EVERY_SERVER = {"step.committed", "step.samples", "device.busy_us", "process.memory_bytes"}
_DERIVED = {"samples_per_s", "busy", "stage", "held_round"}


def _killed_monitor(run: Launched) -> None:
    """Kill the monitor; return when its next start gets numbers of the run and has said where it is found."""
    before, peers = len(_rows(run)), run.require_log_dir() / "initial_peers.txt"
    written_s = peers.stat().st_mtime
    os.kill(run.pid_of("monitor:0"), signal.SIGKILL)
    until(lambda: len(_rows(run)) > before, START_S, "numbers of the next start of the monitor")
    until(lambda: peers.stat().st_mtime > written_s, START_S, "new addresses")


def _rows(run: Launched) -> list[MetricRow]:
    return list(read_rows(run.require_log_dir()))


def test_a_run_whose_monitor_is_killed_twice_goes_on_and_has_all_numbers_once_and_no_secret_among_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    heard = tmp_path / "heard"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nexec cat >> {heard}\n")
    program.chmod(0o700)
    with launched(tmp_path / "run", *ENDLESS, "--host-name=box1", f"--notify.command={program}") as run:
        run.saw("client_0", "round.recorded", round=2)
        for _ in range(2):
            _killed_monitor(run)
        # Whoever starts after it finds the swarm through it, and it has found the swarm.
        reached = run.events("client_0", "round.recorded")[-1]["round"]
        run.saw("client_0", "round.recorded", round=reached + 2)
        os.kill(run.pid_of("server:1"), signal.SIGKILL)
        run.saw("server_1", "state.fetched")
        summary = interrupted(run)
        folder, rows = run.require_log_dir(), _rows(run)
    # Nobody else has noticed.
    assert [failover["kind"] for failover in summary["failovers"]] == ["server"]
    assert run.output.count("monitor@box1 has ended (killed by SIGKILL); it is started again") == 2
    samples = [row.run["samples"] for row in rows if "samples" in row.run]
    assert samples == sorted(samples)
    named = {name for row in rows for name in row.run}
    assert named >= _OF_EVERY_RUN
    assert {name for name in named if run_number(name) is None and not name.startswith("counters/")} == set()
    of_peers = {name.partition("/")[0] for row in rows for values in row.peers.values() for name in values}
    assert of_peers - set(CATALOGUE) <= _DERIVED
    told: dict[str, set[str]] = {}
    for row in rows:
        for who, values in row.peers.items():
            told.setdefault(who.partition("@")[0], set()).update(values)
    for index in (0, 2, 3):  # the other one's next process has counted little
        assert told[f"server {index}"] >= _OF_EVERY_SERVER

    # What the client has noted as a warning, the program has heard.
    warnings = [json.loads(line) for line in heard.read_text().splitlines()]
    assert "incident.opened" in [each["event"] for each in warnings]
    assert {each["level"] for each in warnings} <= {"WARNING", "ERROR"}

    assert main(["runs", "export", str(folder), "--to", "wandb", "--output", str(tmp_path / "rebuilt")]) == 0
    capsys.readouterr()
    [part] = (tmp_path / "rebuilt").glob(f"wandb/offline-run-*-{folder.name}")
    rebuilt = rows_of(part)
    *of_rows, of_events = rebuilt
    assert [row["_step"] for row in of_rows] == list(range(sum(bool(row.run) for row in rows)))
    assert any(name.startswith("events") for name in of_events)
    assert {name for row in rebuilt for name in row} >= named
    key = (folder / "swarm.key").read_bytes()
    assert len(key) >= 16
    written = [folder / METRICS_FILE, *(path for path in part.rglob("*") if path.is_file())]
    for secret in (key, key.hex().encode(), base64.b64encode(key).rstrip(b"=")):
        assert [path for path in written if secret in path.read_bytes()] == []
