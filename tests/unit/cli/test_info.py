"""What is installed and what this host is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.identity import create_swarm_key


def _info(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["info", *flags]) == 0
    return capsys.readouterr().out


def test_it_has_versions_and_host_as_text_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shoal.cli.info.living_runs", list)
    found = json.loads(_info(capsys, "--json"))
    assert found["versions"].keys() >= {"shoal", "torch", "hivemind"}
    assert found["cores"] >= 1
    assert found["swarm_key"].startswith("none in ")
    lines = dict(line.split(maxsplit=1) for line in _info(capsys).splitlines() if not line.startswith("free memory"))
    assert lines["torch"] == found["versions"]["torch"]
    assert lines["runs"] == "none"


def test_the_key_is_told_by_its_fingerprint_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".config" / "shoal" / "swarm.key"
    path.parent.mkdir(parents=True)
    create_swarm_key(path)
    shown = _info(capsys)
    assert "fingerprint " in shown
    assert path.read_bytes().hex()[:8] not in shown
    path.chmod(0o644)
    assert "swarm.key" in _info(capsys), "why it cannot be used"
