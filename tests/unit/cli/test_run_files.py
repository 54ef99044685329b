"""What a launcher puts into its run's folder, and takes out of it."""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.hung_disk import far_disk

from shoal import log
from shoal.cli import run_files
from shoal.cli.local import run_local
from shoal.cli.run_files import (
    make_joining_log_dir,
    make_log_dir,
    new_run_id,
    no_unbegun_log_dir,
    remove_empty_outputs,
    take_log_dir,
)
from shoal.cli.run_folder import LAUNCHER, LOCAL_KEY, is_run_id
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


def _interrupted(config: Config, run: str, *left: str) -> None:
    """Press Ctrl-C when a run's folder has been made, and these files are in it besides."""
    with suppress(KeyboardInterrupt), no_unbegun_log_dir(config, RunId(run)):
        made = make_log_dir(config, RunId(run), is_local=True)
        (made / LOCAL_KEY).touch()
        log.configure(LAUNCHER, made)
        for name in left:
            (made / name).write_text("{}")
        raise KeyboardInterrupt


def test_who_interrupts_before_a_run_begins_finds_the_folders_and_the_newest_one_as_they_were(tmp_path: Path) -> None:
    config = Config(log_dir=tmp_path, experiment_prefix="mine")
    _interrupted(config, "mine-1")
    assert list(tmp_path.iterdir()) == []
    with no_unbegun_log_dir(config, RunId("mine-2")):
        (make_log_dir(config, RunId("mine-2")) / "summary.json").write_text("{}")
    _interrupted(config, "mine-3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine-2"]
    assert (tmp_path / "mine").readlink() == Path("mine-2")
    (tmp_path / "mine-6").mkdir()
    with suppress(KeyboardInterrupt), no_unbegun_log_dir(config, RunId("mine-6")):
        take_log_dir(config, RunId("mine-6"), lambda _: True)
        raise KeyboardInterrupt
    assert (tmp_path / "mine-6").is_dir(), "it was there before, perhaps with the key that its user has copied"
    (tmp_path / "mine-6" / "config.yaml").unlink()
    (tmp_path / "mine-6").rmdir()
    # What has begun stays, and so does what tells how it has failed.
    _interrupted(config, "mine-4", "summary.json")
    _interrupted(config, "mine-5", f"{LAUNCHER}.log")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "mine-2", "mine-4", "mine-5"]


def test_a_run_of_this_machine_that_is_interrupted_before_it_begins_leaves_no_folder(tmp_path: Path) -> None:
    def interrupted() -> None:
        assert list(tmp_path.glob("*/swarm.key")), "its folder is there"
        raise KeyboardInterrupt

    early: Any = SimpleNamespace(require_uninterrupted=interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_local(Config(log_dir=tmp_path), early)
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("how", ["new", "taken", "joining"])
def test_a_disk_that_does_not_answer_before_a_run_begins_is_named_and_keeps_no_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    far_disk(monkeypatch)
    monkeypatch.setattr(run_files, "DISK_PATIENCE_S", 0.01)
    answers, config, run = threading.Event(), Config(log_dir=tmp_path / "logs"), RunId("mine-1")
    make, mkdir = Path.mkdir, lambda *_args, **_more: answers.wait()
    ways = {
        "new": lambda: make_log_dir(config, run),
        "taken": lambda: take_log_dir(config, run, lambda _: False),
        "joining": lambda: make_joining_log_dir(config, run, "servers"),
    }
    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(ConfigError, match=rf"^log_dir: {tmp_path}/logs does not answer .* --log-dir$"):
        ways[how]()
    monkeypatch.setattr(Path, "mkdir", make)
    answers.set()
    for thread in threading.enumerate():
        if thread.name == "log_dir":
            thread.join()


def test_a_disk_without_links_has_a_run_without_the_one_that_leads_to_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    assert make_log_dir(Config(log_dir=tmp_path), RunId("mine-1")) == tmp_path / "mine-1"
    assert [path.name for path in tmp_path.iterdir()] == ["mine-1"]


def test_a_folder_whose_name_is_no_text_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    log_dir = tmp_path / os.fsdecode(b"l\xf6gs")
    with pytest.raises(ConfigError, match=r"^log_dir: the name .*l\\udcf6gs' is no text .* --log-dir") as refused:
        make_log_dir(Config(log_dir=log_dir), RunId("mine-1"))
    assert str(refused.value).isascii()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("there", ["file", "file/below"])
def test_a_folder_for_checkpoints_that_cannot_be_is_refused_before_a_run_begins(there: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = Config(log_dir=tmp_path / "logs", checkpoint_dir=str(tmp_path / there))
    for begin in (make_log_dir, partial(take_log_dir, claim=lambda _: True)):
        with pytest.raises(ConfigError, match=f"checkpoint_dir: .*{there} .*move the file away.* --checkpoint-dir"):
            begin(config, RunId("a-run"))
    assert not (tmp_path / "logs/a-run").exists()


def test_a_folder_for_checkpoints_is_made_for_who_writes_some(tmp_path: Path) -> None:
    mirrors = Config(log_dir=tmp_path / "logs", checkpoint_dir=str(tmp_path / "kept/here"))
    make_log_dir(mirrors, RunId("a-run"))
    assert list((tmp_path / "kept/here").iterdir()) == []
    none = mirrors.param_mirror.model_copy(update={"enable": False})
    config = mirrors.model_copy(update={"checkpoint_dir": "/proc/none", "param_mirror": none})
    assert make_log_dir(config, RunId("b-run")).is_dir()
