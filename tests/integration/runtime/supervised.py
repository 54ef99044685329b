"""What the tests of the supervisor share: to wait for events and ends of roles, and a launcher that can be killed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import anyio
import anyio.to_thread

from shoal.clock import Deadline, SystemClock
from shoal.runtime.role_handle import RoleEvent, RoleHandle
from shoal.runtime.role_spec import RestartPolicy

_HERE = Path(__file__).parent
DEADLINE_S = 60.0
EAGER = RestartPolicy(max_restarts=2, window_s=60.0, first_delay_s=0.01, max_delay_s=0.02)


def gone_within(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait for the end of processes that need not be ours; return those that are left."""
    deadline = Deadline.after(SystemClock(), timeout_s)
    left: list[int] = []
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(deadline.remaining_s() * 1000):
                left.append(pid)
        finally:
            os.close(pidfd)
    return left


async def next_event(handle: RoleHandle, name: str) -> RoleEvent:
    """Return the next event of this name; what comes before it is dropped."""
    with anyio.fail_after(DEADLINE_S):
        async for event in handle.events:
            if event.name == name:
                return event
    raise AssertionError(f"{handle.spec} ended without an event {name!r}")


async def rest_of(handle: RoleHandle) -> list[str]:
    """Return the names of all events until the role has ended for good."""
    with anyio.fail_after(DEADLINE_S):
        return [event.name async for event in handle.events]


async def all_end(pids: Iterable[int], within_s: float = DEADLINE_S) -> None:
    """Wait for the end of processes while the supervisor goes on; fails if some are left."""
    assert await anyio.to_thread.run_sync(gone_within, list(pids), within_s) == []


def start_program(parent: Path, *preload: str) -> tuple[subprocess.Popen[bytes], list[int], Path]:
    """Start a launcher with its roles in a process of its own.

    Returns:
        It, its processes (fork server, a role whose loop hangs, a steady one, one with children, two children), and
        its run directory.
    """
    program = subprocess.Popen(
        [sys.executable, str(_HERE / "supervised_program.py"), str(parent), *preload],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert program.stdout is not None
    started = json.loads(program.stdout.readline())
    return program, started["pids"], Path(started["run_dir"])
