"""What a launcher puts into its run's folder, and takes out of it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from shoal.cli.run_files import is_run_id, make_joining_log_dir, make_log_dir, new_run_id, remove_empty_outputs
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.errors import ConfigError
from shoal.ids import RunId


def test_only_outputs_that_are_empty_are_removed(tmp_path: Path) -> None:
    (tmp_path / "server_0.out").touch()
    (tmp_path / "server_1.out").write_text("said")
    (tmp_path / "server_0.log").touch()
    remove_empty_outputs(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server_0.log", "server_1.out"]


def test_a_disk_that_has_become_read_only_hides_no_reason_behind_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "server_0.out").touch()

    def unlink(_: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", unlink)
    remove_empty_outputs(tmp_path)


def test_no_other_folder_beside_those_of_runs_is_called_as_a_run_is() -> None:
    run_id = new_run_id(Config(experiment_prefix="a.b-c"), SystemClock())
    assert is_run_id(run_id)
    others = ("checkpoints", ".", "..", f"{run_id}.servers", f"{run_id}.mirror", f"{run_id}-2", f"x/{run_id}", "a.b-c")
    assert [name for name in others if is_run_id(name)] == []


def test_launchers_that_make_a_folder_at_once_have_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = Config().model_copy(update={"log_dir": tmp_path / "logs"}), RunId("mine-1")
    # Each has looked before any of them has made one.
    monkeypatch.setattr(Path, "exists", lambda *_args, **_more: False)
    made = [make_log_dir(config, run), make_log_dir(config, run)]
    made += [make_joining_log_dir(config, run, "servers"), make_joining_log_dir(config, run, "servers")]
    assert [path.name for path in made] == ["mine-1", "mine-1-2", "mine-1.servers", "mine-1.servers-2"]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"log_dir: cannot write to .*file"):
        make_log_dir(config.model_copy(update={"log_dir": tmp_path / "file"}), run)
