"""The file of the swarm's key: made once, kept private, and every mistake with it explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.identity import create_swarm_key, load_swarm_key, swarm_key_fingerprint


def test_a_new_key_is_private_random_and_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "config" / "swarm.key"
    key = create_swarm_key(path)
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_swarm_key(path) == key
    assert create_swarm_key(tmp_path / "other") != key
    assert [p.name for p in path.parent.iterdir()] == ["swarm.key"]


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="left alone"):
        create_swarm_key(path)
    assert path.read_bytes() == b"precious"


def test_the_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert create_swarm_key(Path("~/swarm.key")) == load_swarm_key(tmp_path / "swarm.key")


def test_mistakes_are_explained(tmp_path: Path) -> None:
    path = tmp_path / "swarm.key"
    with pytest.raises(ConfigError, match=f"shoal key new --swarm-key-file {path}"):
        load_swarm_key(path)
    create_swarm_key(path)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        load_swarm_key(path)
    path.chmod(0o600)
    for wrong in (b"", b"k" * 31, b"k" * 33):
        path.write_bytes(wrong)
        with pytest.raises(ConfigError, match="exactly 32 bytes"):
            load_swarm_key(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_swarm_key(tmp_path)
    with pytest.raises(ConfigError, match="cannot write"):
        create_swarm_key(path / "below" / "a file")


def test_a_fingerprint_is_the_same_for_the_same_key_only_and_does_not_contain_it() -> None:
    key = bytes(range(32))
    assert swarm_key_fingerprint(key) == swarm_key_fingerprint(bytes(range(32)))
    assert swarm_key_fingerprint(key) != swarm_key_fingerprint(bytes(32))
    assert len(swarm_key_fingerprint(key)) == 19
    assert key[:2].hex() not in swarm_key_fingerprint(key)
