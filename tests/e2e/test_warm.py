"""What a template forks is known by its environment, and holds nothing of who has forked it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.e2e.launched import END_S, FEW, START_S, launched, until

from shoal.runtime.process_info import descendants, with_environment

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("cold", [False, True])
def test_a_launcher_and_its_fork_server_have_the_environment_and_the_files_of_programs_of_their_own(
    cold: bool, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    os.mkfifo(path)
    # As long as it is open for writing, reading it does not end.
    writer = os.open(path, os.O_RDWR)
    try:
        own = {"MARK_OF_THIS_TEST": str(tmp_path)}
        with launched(tmp_path, *FEW, f"--config-path={path}", cold=cold, environment=own) as run:
            [server] = until(lambda: _below(run.process.pid), START_S, "the fork server")
            locked = f"{run.runtime_dir}/"
            until(lambda: any(locked in each for each in _open_files(run.process.pid)), START_S, "the locked directory")
            mark = f"MARK_OF_THIS_TEST={tmp_path}"
            until(lambda: {run.process.pid, server} <= {*with_environment(mark)}, START_S, "its environment")
            until(lambda: "MALLOC_ARENA_MAX=1" in _environment(server), START_S, "the fork server's own")
            until(lambda: not any(locked in each for each in _open_files(server)), START_S, "its own files alone")
            run.kill()
            assert run.ends(END_S) == -9
            run.leaves_nothing()
    finally:
        os.close(writer)


def _below(pid: int) -> list[int]:
    return [stat.pid for stat in descendants(pid)]


def _environment(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


def _open_files(pid: int) -> list[str]:
    return [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
