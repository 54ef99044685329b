"""What the tests of the supervisor share: to wait for events and ends of roles, and a launcher that can be killed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from shoal.clock import Deadline, SystemClock
from shoal.runtime.launcher_messages import RoleEvent, ScoutReady
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.role_spec import RestartPolicy

_Event = TypeVar("_Event", bound=RoleEvent)
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


async def told_by(handle: RoleHandle) -> dict[str, Any]:
    """Return what a role of `roles` has told when it began to serve."""
    ready = await handle.ready()
    assert isinstance(ready, ScoutReady)
    return ready.configuration


async def next_event(handle: RoleHandle, kind: type[_Event]) -> _Event:
    """Return the next event of this kind; what comes before it is dropped."""
    with anyio.fail_after(DEADLINE_S):
        async for event in handle.events:
            if isinstance(event, kind):
                return event
    raise AssertionError(f"{handle.spec} ended without {kind}")


async def rest_of(handle: RoleHandle) -> list[type]:
    """Return the kinds of all events until the role has ended for good."""
    with anyio.fail_after(DEADLINE_S):
        return [type(event) async for event in handle.events]


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
