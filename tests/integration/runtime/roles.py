"""Roles for the tests of the supervisor: each does one thing that a role may do, and needs nothing heavy."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import threading

from shoal.clock import SystemClock
from shoal.errors import ConfigError
from shoal.runtime.control_pipe import RoleControl
from shoal.runtime.launcher_messages import (
    InitialPeers,
    RoleReady,
    ScoutReady,
    StartDataServer,
    StartTrainer,
    UserNotice,
)


def _serves(control: RoleControl, **told: object) -> None:
    """Say that this role serves, and something about it: `supervised.told_by` returns it."""
    control.tell(ScoutReady("", told))


async def steady(payload: bytes, control: RoleControl) -> None:
    """Serve until told to stop, and say how that was."""
    threads = len(os.listdir("/proc/self/task"))
    _serves(control, payload=payload.decode(), threads=threads)
    await control.stopping.wait()
    control.tell(UserNotice("left"))


async def dated(_payload: bytes, control: RoleControl) -> None:
    """Say what time it is, and serve until told to stop."""
    _serves(control, unix_s=SystemClock().unix_s())
    await control.stopping.wait()


async def stubborn(_payload: bytes, control: RoleControl) -> None:
    """Block the event loop for ever: neither SIGTERM nor a message reaches it."""
    control.tell(RoleReady())
    await control.request(StartDataServer())
    threading.Event().wait()


async def echo(_payload: bytes, control: RoleControl) -> None:
    """Send back every message."""
    control.tell(RoleReady())
    async for order in control.orders:
        assert isinstance(order, InitialPeers)
        control.tell(order)


async def obeying(_payload: bytes, control: RoleControl) -> None:
    """End with the exit code that a message orders."""
    control.tell(RoleReady())
    async for order in control.orders:
        assert isinstance(order, InitialPeers)
        os._exit(int(order.maddrs[0]))


async def asking(_payload: bytes, control: RoleControl) -> None:
    """Ask the launcher for a role and report its answer."""
    answer = await control.request(StartTrainer(7, 1))
    control.tell(UserNotice(answer.error))


async def failing_later(_payload: bytes, control: RoleControl) -> None:
    """Serve, then fail."""
    control.tell(RoleReady())
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
    _serves(control, faults=faults)


async def parent(_payload: bytes, control: RoleControl) -> None:
    """Start processes as a role's libraries do: one in the session of the run, one that leaves it."""
    children = [_start_child(leave_session=False), _start_child(leave_session=True)]
    _serves(control, children=[child.pid for child in children])
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
    _serves(control, payload=json.dumps(os.getpid()))


async def collecting(_payload: bytes, control: RoleControl) -> None:
    """Say how often garbage is looked for, and how many objects that leaves out."""
    _serves(control, threshold=list(gc.get_threshold()), num_frozen=gc.get_freeze_count())
    await control.stopping.wait()


async def knowing(payload: bytes, control: RoleControl) -> None:
    """Say whether the module that the payload names was imported for all roles."""
    _serves(control, is_imported=payload.decode() in sys.modules)
    await control.stopping.wait()
