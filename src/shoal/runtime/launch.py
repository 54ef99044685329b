"""One process of a role, as the supervisor holds it: signals reach it whoever its parent is."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

import anyio

from shoal.errors import ShoalError
from shoal.runtime.control_pipe import ControlPipe
from shoal.runtime.fork_messages import ForkRole
from shoal.runtime.launcher_messages import FromRole
from shoal.runtime.process_control import exit_code
from shoal.runtime.role_spec import ExitStatus


class Launch:
    """One process of a role, from the request to fork it until its exit status is known.

        requested --> forked --> ended
            '------------------> failed

    Attributes:
        pid: 0 before it is forked.
        forked: set when the process exists, or never will.
        settled: set when its exit status is known, or when this process is its parent and must ask for it.
        ended: set when its exit status is known, or never will be.
        status: None while it is not known.
        error: why there is no such process; None: there may be one.
    """

    def __init__(self, request: ForkRole, control: socket.socket, pipe: ControlPipe[FromRole]) -> None:
        """Nothing is started yet.

        Args:
            control: the role's end of its control pipe; the launch owns it from now on.
        """
        self.request = request
        self.pipe = pipe
        self.pid = 0
        self.forked = anyio.Event()
        self.settled = anyio.Event()
        self.ended = anyio.Event()
        self.status: ExitStatus | None = None
        self.error: ShoalError | None = None
        self._control = control
        self._pidfd = -1

    @property
    def control_fd(self) -> int:
        """The descriptor that goes to the role with the request."""
        return self._control.fileno()

    @property
    def waiting(self) -> bool:
        """Whether it has still to be forked."""
        return not self.forked.is_set()

    def begin(self, pid: int, pidfd: int) -> None:
        """Note that the process exists."""
        self.pid, self._pidfd = pid, pidfd
        self._control.close()
        self.forked.set()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, never to another process of the same number; nothing happens if this one has ended."""
        if self._pidfd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def until_gone(self) -> None:
        """Return when the process has ended."""
        await anyio.wait_readable(self._pidfd)

    def exited(self, code: int) -> None:
        """Note how it has ended: its exit code, or the signal that ended it, negated."""
        self.status = ExitStatus(code)
        self.settled.set()
        self.ended.set()

    def reap(self) -> None:
        """Ask the kernel how the process has ended; it is a child of this one."""
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        # None is the answer under WNOHANG alone.
        assert ended is not None
        self.exited(exit_code(ended))

    def fail(self, error: ShoalError) -> None:
        """Note that the process will never exist, or how it ends will never be known; wakes everybody who waits."""
        self._control.close()
        self.error = self.error or error
        self.forked.set()
        self.ended.set()

    def close(self) -> None:
        """Let go of the process."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
