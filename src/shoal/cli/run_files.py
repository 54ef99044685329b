"""What a launcher writes into the folder of its run: the resolved configuration, the summary."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, TypeVar

import anyio

from shoal import log
from shoal.cli.run_folder import CONFIG_FILE, LAUNCHER, LOCAL_KEY, LOCAL_MARK
from shoal.clock import Clock, utc_stamp
from shoal.config import Config, dump_config, load_config
from shoal.errors import ConfigError, os_error_as
from shoal.events.base import SUMMARY_FILE
from shoal.file_thread import FileThread, remedy, said_and_remedy, said_by_disk
from shoal.ids import RunId
from shoal.runtime.durable_files import put_whole

DISK_PATIENCE_S: Final = 30.0
"""So long is a disk that does not answer waited for, before a run begins and when it is over."""

_Result = TypeVar("_Result")


def new_run_id(config: Config, clock: Clock) -> RunId:
    """Return `<experiment_prefix>-<UTC>-<4 hex>`."""
    return RunId(f"{config.experiment_prefix}-{utc_stamp(clock.unix_s())}-{secrets.token_hex(2)}")


def make_log_dir(config: Config, run_id: RunId, *, is_local: bool = False) -> Path:
    """Make `log_dir/<run_id>`, write the resolved configuration there, and point `log_dir/<experiment_prefix>` at it.

    The name gets a number if an earlier client has left that folder, because one client's files belong together.

    Args:
        is_local: other hosts cannot join or see the run; the folder says so (`LOCAL_MARK`).

    Raises:
        ConfigError: the directory, or `checkpoint_dir`, cannot be made or written, or a disk does not answer.
    """

    def make() -> Path:
        _require_checkpoint_dir(config)
        path = _made(config.log_dir.absolute() / run_id)
        _fill(path, config, is_local=is_local)
        return path

    return _answered(config, make)


def take_log_dir(config: Config, run_id: RunId, claim: Callable[[Path], bool], *, is_local: bool = False) -> Path:
    """Make `log_dir/<run_id>`, or take it as an earlier launcher has left it, and write the resolved configuration.

    Args:
        claim: as `RunDir.claim_folder`; of two launchers that start at once, neither sees the other one's run.
        is_local: as in `make_log_dir`.

    Raises:
        ConfigError: the directory, or `checkpoint_dir`, cannot be made or written, a disk does not answer, or another
            launcher has it.
    """
    path = config.log_dir.absolute() / run_id

    def take() -> bool:
        _require_checkpoint_dir(config)
        with os_error_as(partial(_cannot_write, path)):
            path.mkdir(parents=True, exist_ok=True)
            is_ours = claim(path)
        if is_ours:
            _fill(path, config, is_local=is_local)
        return is_ours

    if not _answered(config, take):
        raise ConfigError(f"{path} is in use: another process goes on with run {run_id} at this moment, or ends it")
    return path


@contextmanager
def no_unbegun_log_dir(config: Config, run_id: RunId) -> Generator[None]:
    """Inside, a run's folder is made, and the run begins; an interrupt in between leaves no folder of it.

    `log_dir/<experiment_prefix>` then leads again to where it led before.
    """
    path = config.log_dir.absolute() / run_id
    link = path.parent / config.experiment_prefix
    # Somebody may have put the key there, of a run that goes on from its checkpoint.
    was_there = path.exists()
    before = _target(link)
    try:
        yield
    finally:
        if not was_there and _is_unbegun(path):
            with suppress(OSError):
                shutil.rmtree(path)
                if _target(link) == path.name:
                    link.unlink()
                    if before is not None:
                        link.symlink_to(before)


def _target(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except OSError:
        return None


def _is_unbegun(path: Path) -> bool:
    """Whether nothing lies in a run's folder but what does before it begins, and nothing is logged."""
    try:
        left = {each.name for each in path.iterdir() if each.name != f"{LAUNCHER}.log" or each.stat().st_size}
    except OSError:
        return False
    return left <= {CONFIG_FILE, LOCAL_MARK, LOCAL_KEY}


def _fill(path: Path, config: Config, *, is_local: bool) -> None:
    link = path.parent / config.experiment_prefix
    with os_error_as(partial(_cannot_write, path)):
        if is_local:
            (path / LOCAL_MARK).touch()
        put_whole(path / CONFIG_FILE, dump_config(config).encode(), lasting=False, private=True)
    # Some disks know no links, as those of Windows and of memory sticks: the run does without.
    with suppress(OSError):
        if link.is_symlink() or not link.exists():
            # Another run may do the same at this moment: make the link aside and rename it, which is atomic.
            aside = path.parent / f".{path.name}.link"
            aside.unlink(missing_ok=True)  # of a launcher of the same run that was killed
            aside.symlink_to(path.name)
            aside.rename(link)


def write_config(config: Config, log_dir: Path) -> None:
    """Replace `config.yaml` by one with what has been decided since the folder was made.

    Raises:
        ConfigError: it cannot be written.
    """
    path = log_dir / CONFIG_FILE
    with os_error_as(partial(_cannot_write, path)):
        put_whole(path, dump_config(config).encode(), lasting=False, private=True)


def written_config(log_dir: Path) -> Config:
    """Return what the run in this folder was told; neither the environment nor a flag of today has a say in it.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
    """
    return load_config(log_dir / CONFIG_FILE, (), {})


def make_joining_log_dir(config: Config, run_id: str, hosts: str) -> Path:
    """Make a folder for the logs of this host's roles in a run of another host, and write the configuration there.

    It is `log_dir/<run_id>.<hosts>`, with a number where another launcher of this host has that one.

    Args:
        hosts: "servers" or "mirror".

    Raises:
        ConfigError: the directory cannot be made or written, or its disk does not answer.
    """

    def make() -> Path:
        path = _made(config.log_dir.absolute() / f"{run_id}.{hosts}")
        write_config(config, path)
        return path

    return _answered(config, make)


def _answered(config: Config, do: Callable[[], _Result]) -> _Result:
    """Return what is done in `log_dir`, on whose disk nothing else of a run has been yet.

    Raises:
        ConfigError: the disk has not answered, for `DISK_PATIENCE_S`, or the folder's name is no text.
        Exception: whatever `do` raises.
    """
    try:
        str(config.log_dir.absolute()).encode()
    except UnicodeEncodeError as error:
        # Roles, other commands and logs are told it.
        raise ConfigError(
            f"log_dir: the name {str(config.log_dir.absolute())!a} is no text in the encoding of this shell: "
            "choose another with --log-dir, or set LC_ALL=C.UTF-8"
        ) from error
    done = FileThread("log_dir", path=config.log_dir.absolute() / CONFIG_FILE).do(do)
    # Not `result(timeout)`: what was done may have failed by a time-out of its own.
    if not wait((done,), DISK_PATIENCE_S).done:
        raise ConfigError(
            f"log_dir: {config.log_dir.absolute()} does not answer for {DISK_PATIENCE_S:.0f} s: see whether its file "
            "server is there, or choose another with --log-dir"
        )
    return done.result()


def _require_checkpoint_dir(config: Config) -> None:
    """Refuse a folder for checkpoints before a run begins, and not when its first one is written.

    Raises:
        ConfigError: it cannot be made, or nothing can be written there.
    """
    if config.checkpoint_dir is None or "://" in config.checkpoint_dir or not config.param_mirror.enable:
        return
    path = Path(config.checkpoint_location)
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        said = said_and_remedy(error, path, "choose another with --checkpoint-dir")
        raise ConfigError(f"checkpoint_dir: cannot write to {path} {said}") from error


def _made(path: Path) -> Path:
    """Make this folder, or if it exists the first one with a number that does not: another launcher may do the same at
    this moment.

    Raises:
        ConfigError: it cannot be made.
    """
    made, number = path, 1
    while True:
        try:
            made.mkdir(parents=True)
        except FileExistsError:
            number += 1
            made = path.with_name(f"{path.name}-{number}")
        except OSError as error:
            raise _cannot_write(made, error) from error
        else:
            return made


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    reason = f"cannot write to {error.filename or path} ({said_by_disk(error, path)})"
    return ConfigError(f"log_dir: {reason}; {remedy(error, path, 'choose another with --log-dir')}")


def write_summary(log_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write `summary.json` so that it is there either whole or not at all; a number that is not finite becomes null."""
    path = log_dir / SUMMARY_FILE
    content = json.dumps(log.without_nan(summary), indent=2, allow_nan=False) + "\n"
    put_whole(path, content.encode(), lasting=True)
    return path


async def in_time(writes: FileThread, write: Callable[[], _Result]) -> _Result:
    """Return what the last writes of a run give, whose disk may not answer any more.

    Raises:
        TimeoutError: it has not, for `DISK_PATIENCE_S`.
        Exception: whatever `write` raises.
    """
    with anyio.fail_after(DISK_PATIENCE_S):
        return await asyncio.wrap_future(writes.do(write))


def remove_empty_outputs(log_dir: Path) -> None:
    """Remove the `<role>_<n>.out` files to which nothing was ever printed."""
    for path in log_dir.glob("*.out"):
        # A disk that has become read-only keeps them: why the run has ended is yet to be said.
        with suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()
