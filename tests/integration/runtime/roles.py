"""Roles for the tests of the supervisor: each does one thing that a role may do, and needs nothing heavy."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import threading

from shoal.errors import ConfigError
from shoal.runtime.control_pipe import RoleControl


async def steady(payload: bytes, control: RoleControl) -> None:
    """Serve until told to stop, and say how that was."""
    threads = len(os.listdir("/proc/self/task"))
    control.ready(payload=payload.decode(), threads=threads)
    await control.stopping.wait()
    control.event("left", role_pid=os.getpid())


async def stubborn(_payload: bytes, control: RoleControl) -> None:
    """Block the event loop for ever: neither SIGTERM nor a message reaches it."""
    control.ready()
    await control.request("go")
    threading.Event().wait()


async def echo(_payload: bytes, control: RoleControl) -> None:
    """Send back every message."""
    control.ready()
    async for message in control.messages:
        control.event("echo", **message)


async def obeying(_payload: bytes, control: RoleControl) -> None:
    """End with the exit code that a message orders."""
    control.ready()
    async for message in control.messages:
        os._exit(message["exit"])


async def asking(_payload: bytes, control: RoleControl) -> None:
    """Ask the launcher for a role and report its answer."""
    answer = await control.request("start_role", role="trainer", index=7)
    control.event("answered", **answer)


async def failing_later(_payload: bytes, control: RoleControl) -> None:
    """Serve, then fail."""
    control.ready()
    raise ZeroDivisionError("a bug")


async def failing(payload: bytes, _control: RoleControl) -> None:
    """Fail in the way that the payload names."""
    if payload == b"user":
        raise ConfigError("device: there is no cuda:9")
    if payload == b"group":
        raise ExceptionGroup("tasks", [ConfigError("device: there is no cuda:9")])
    raise ZeroDivisionError("a bug")


async def computing(_payload: bytes, control: RoleControl) -> None:
    """Have a thread take and free the same memory again and again; report how many pages the kernel gave each time."""
    faults: list[int] = []

    def compute() -> None:
        for _ in range(4):
            before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
            tensors = [bytearray(24 << 20) for _ in range(4)]
            del tensors
            faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    control.ready(faults=faults)


async def parent(_payload: bytes, control: RoleControl) -> None:
    """Start processes as a role's libraries do: one in the session of the run, one that leaves it."""
    children = [_start_child(leave_session=False), _start_child(leave_session=True)]
    control.ready(children=[child.pid for child in children])
    await control.stopping.wait()
    for child in children:
        child.kill()
        child.wait()


def _start_child(*, leave_session: bool) -> subprocess.Popen[bytes]:
    program = [sys.executable, "-c", "import signal; signal.pause()"]
    return subprocess.Popen(program, start_new_session=leave_session)


async def noisy(_payload: bytes, control: RoleControl) -> None:
    """Write to both standard streams."""
    sys.stdout.write("to standard output\n")
    sys.stderr.write("to standard error\n")
    control.ready(payload=json.dumps(os.getpid()))


async def collecting(_payload: bytes, control: RoleControl) -> None:
    """Say how often garbage is looked for, and how many objects that leaves out."""
    control.ready(threshold=list(gc.get_threshold()), num_frozen=gc.get_freeze_count())
    await control.stopping.wait()
