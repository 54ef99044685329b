"""What a template forks is known by its environment, and holds nothing of who has forked it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launched import END_S, FEW, START_S, Launched, launched, until
from tests.e2e.namespaces import lan
from tests.e2e.needs import needs_namespaces
from tests.e2e.warm import WarmProcess

from shoal.runtime.process_info import descendants, with_environment

pytestmark = pytest.mark.timeout(600)


@contextlib.contextmanager
def _reading(directory: Path, **options: Any) -> Iterator[Launched]:
    """Give a launcher that waits for its configuration: reading it does not end as long as it is open for writing."""
    path = directory / "config.yaml"
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    try:
        with launched(directory, *FEW, f"--config-path={path}", **options) as run:
            yield run
            run.kill()
            assert run.ends(END_S) == -9
            run.leaves_nothing()
    finally:
        os.close(writer)


@pytest.mark.parametrize("cold", [False, True])
def test_a_launcher_and_its_fork_server_have_the_environment_and_the_files_of_programs_of_their_own(
    cold: bool, tmp_path: Path
) -> None:
    own = {"MARK_OF_THIS_TEST": str(tmp_path)}
    with _reading(tmp_path, cold=cold, environment=own) as run:
        [server] = until(lambda: _below(run.process.pid), START_S, "the fork server")
        locked = f"{run.runtime_dir}/"
        until(lambda: any(locked in each for each in _open_files(run.process.pid)), START_S, "the locked directory")
        mark = f"MARK_OF_THIS_TEST={tmp_path}"
        until(lambda: {run.process.pid, server} <= {*with_environment(mark)}, START_S, "its environment")
        until(lambda: "MALLOC_ARENA_MAX=1" in _environment(server), START_S, "the fork server's own")
        until(lambda: not any(locked in each for each in _open_files(server)), START_S, "its own files alone")


@needs_namespaces
def test_a_launcher_of_another_host_and_its_fork_server_have_the_network_and_the_runtime_directory_of_that_host(
    tmp_path: Path,
) -> None:
    with lan("one") as network, _reading(tmp_path, prefix=network.prefix("one")) as run:
        assert isinstance(run.process, WarmProcess)
        [server] = until(lambda: _below(run.process.pid), START_S, "the fork server")
        there = Path("/run/netns", network.namespace("one")).stat().st_ino
        for pid in (run.process.pid, server):
            assert Path(f"/proc/{pid}/ns/net").stat().st_ino == there
            mounted = {mount[4]: mount for mount in _mounts(pid)}
            assert mounted[str(run.runtime_dir)][-3] == "tmpfs"
            assert mounted["/sys"][-2] == network.namespace("one"), "it shows the devices of that network"
        assert str(run.runtime_dir) not in {mount[4] for mount in _mounts(os.getpid())}


def _below(pid: int) -> list[int]:
    return [stat.pid for stat in descendants(pid)]


def _environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def _open_files(pid: int) -> list[str]:
    found: list[str] = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found.append(str(link.readlink()))
    return found


def _mounts(pid: int) -> list[list[str]]:
    """The lines of mountinfo (proc(5)): the fifth word says where, the last three are type, source and options."""
    return [line.split() for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
