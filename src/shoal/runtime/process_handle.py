"""A process in the hands of another one that may not be its parent: its end, its signals, its exit code.

A process makes an `OwnHandle` and sends the descriptor; who gets it makes a `ProcessHandle` of it.

Where there are pidfds it is one. Elsewhere it is the read end of a pipe whose write end the process itself holds, and
nobody else: however the process ends, the kernel closes it. Into it the process writes its exit code before it ends,
for without a subreaper nobody can ask the kernel for that once the parent is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal

import anyio

from shoal.runtime.linux_calls import LinuxCall, has
from shoal.runtime.process_control import exit_code
from shoal.runtime.process_end import process_ended

# From closing its files to its end, a process needs milliseconds.
_LAST_MOMENTS_S = 1.0


class OwnHandle:
    """This process, as others may hold it.

    Attributes:
        descriptor: for the others; closed here by `give_away`.
    """

    def __init__(self) -> None:
        self._write_fd = -1
        if has(LinuxCall.PIDFD):
            self.descriptor = os.pidfd_open(os.getpid())
        else:
            self.descriptor, self._write_fd = os.pipe()

    def give_away(self) -> None:
        """Close what only others need, after it was sent."""
        os.close(self.descriptor)

    def ends_with(self, code: int) -> None:
        """Say the exit code, as the last thing before the end; where the kernel tells it nothing is needed."""
        if self._write_fd >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._write_fd, bytes([code & 0xFF]))


class ProcessHandle:
    """Another process."""

    def __init__(self, pid: int, descriptor: int) -> None:
        """Hold it.

        Args:
            descriptor: of its `OwnHandle`; owned from now on.
        """
        self.pid = pid
        self._descriptor = descriptor

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, never to another process of the same number; nothing happens if this one has ended.

        Without pidfds the number might become another's between the look and the call, within microseconds.
        """
        with contextlib.suppress(ProcessLookupError):
            if has(LinuxCall.PIDFD):
                signal.pidfd_send_signal(self._descriptor, number)
            elif not select.select([self._descriptor], [], [], 0)[0]:
                os.kill(self.pid, number)

    async def until_gone(self) -> None:
        """Return when the process has ended."""
        await anyio.wait_readable(self._descriptor)
        if not has(LinuxCall.PIDFD):
            # Its files are closed, or it has said its code: its children are not yet those of another one.
            with anyio.move_on_after(_LAST_MOMENTS_S), contextlib.suppress(ProcessLookupError):
                await process_ended(self.pid)

    def reap(self) -> int:
        """Return how it has ended, once nobody else reaps it: its exit code, or the signal, negated.

        Where it is not a child of this process and has not said its code, a signal is what has ended it, and which one
        is not known: SIGKILL is what the answer is then.
        """
        if has(LinuxCall.PIDFD):
            ended = os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED)
            # None is the answer under WNOHANG alone.
            assert ended is not None
            return exit_code(ended)
        try:
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        except ChildProcessError:
            said = os.read(self._descriptor, 1)
            return said[0] if said else -signal.SIGKILL

    def close(self) -> None:
        """Let go of the process; the second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
