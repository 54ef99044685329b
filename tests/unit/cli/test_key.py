"""`shoal key`: making, comparing, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cli import main

Capture = pytest.CaptureFixture[str]


def test_a_key_is_made_once_and_its_fingerprint_shown_without_the_key(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    assert main(["key", "new", "--swarm-key-file", str(path)]) == 0
    made = capsys.readouterr().out
    assert main(["key", "fingerprint", "--swarm-key-file", str(path)]) == 0
    assert capsys.readouterr().out.strip() in made
    assert path.read_bytes().hex() not in made
    assert main(["key", "new", "--swarm-key-file", str(path)]) == 2
    assert "left alone" in capsys.readouterr().err


def test_without_a_path_the_key_is_in_the_home_folder(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["key", "fingerprint"]) == 2
    assert "shoal key new" in capsys.readouterr().err
    assert main(["key", "new"]) == 0
    assert (tmp_path / ".config" / "shoal" / "swarm.key").stat().st_size == 32
