"""Calls that change processes: adopt orphans, name a process, kill whole trees and runs.

Those that are Linux's alone (`prctl(2)`) do nothing elsewhere; the lifeline ends what they would, and the tag in the
environment finds it (`runtime.linux_calls`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from typing import NamedTuple

from shoal.runtime.linux_calls import LinuxCall, has
from shoal.runtime.process_end import wait_until_ended
from shoal.runtime.process_info import descendants, read_stat, with_environment

_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
# The kernel keeps 16 bytes of a name, one of them the closing zero.
_NAME_BYTES = 15


def set_subreaper(enabled: bool) -> bool:
    """Make orphans among this process's descendants its children, instead of those of init.

    Returns:
        Whether this was enabled before; False also if the system cannot do it.
    """
    if not has(LinuxCall.PRCTL):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)
    return bool(before.value)


def set_process_title(role: str, index: int | None = None) -> None:
    """Show this process as "shoal:role:index" in ps and top: its name, and its command line as far as that has room."""
    if not has(LinuxCall.PRCTL):
        return
    suffix = "" if index is None else f":{index}"
    name = f"shoal:{role}"[: _NAME_BYTES - len(suffix)] + suffix
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    stat = read_stat(os.getpid())
    if stat is None or not stat.args_start < stat.args_end:
        return
    # The kernel shows whatever stands where it put the arguments at exec; Python has long copied them.
    room_bytes = stat.args_end - stat.args_start
    title = f"shoal:{role}{suffix}".encode()[: room_bytes - 1]
    ctypes.memmove(stat.args_start, title.ljust(room_bytes, b"\0"), room_bytes)


def kill(pid: int) -> None:
    """Send SIGKILL to a process that may be gone already or belong to somebody else."""
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def kill_descendants() -> None:
    """Send SIGKILL to everything that descends from this process, without waiting."""
    for stat in descendants(os.getpid()):
        kill(stat.pid)


def end_descendants(known: Iterable[int]) -> None:
    """Kill and reap all descendants until none is left; this process must be a subreaper.

    A process that is forked between the look and the kill becomes our child when its parent dies; we look again then.

    Args:
        known: children to kill where /proc cannot be asked.
    """
    for pid in known:
        kill(pid)
    while True:
        kill_descendants()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def end_tagged(entry: str) -> None:
    """Kill all other processes that were started with `entry` in their environment; returns when they have ended.

    It finds those that do not descend from this process: roles of an earlier fork server, when nobody else is left who
    could end a frozen one.
    """
    while others := [pid for pid in with_environment(entry) if pid != os.getpid()]:
        for pid in others:
            kill(pid)
        for pid in others:
            wait_until_ended(pid)


class EndedChild(NamedTuple):
    """A child that has ended: its exit code, or the signal that ended it, negated."""

    pid: int
    code: int


def next_ended() -> EndedChild | None:
    """Return a child that has ended and is to be reaped by `reap`; without waitid(2) it is reaped already."""
    try:
        if has(LinuxCall.WAITID):
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return None if ended is None else EndedChild(ended.si_pid, exit_code(ended))
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return EndedChild(pid, os.waitstatus_to_exitcode(status)) if pid else None


def reap(pid: int) -> None:
    """Forget a child that has ended; nothing happens if it is reaped already, or is init's."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def exit_code(ended: os.waitid_result) -> int:
    """Return how a child ended: its exit code, or the signal that ended it, negated."""
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
