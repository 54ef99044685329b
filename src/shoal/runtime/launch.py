"""One process of a role, as the supervisor holds it: signals reach it whoever its parent is."""

from __future__ import annotations

import signal
import socket

import anyio

from shoal.errors import ShoalError
from shoal.runtime.control_pipe import ControlPipe
from shoal.runtime.fork_messages import ForkRole
from shoal.runtime.launcher_messages import FromRole
from shoal.runtime.process_handle import ProcessHandle
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
        self._process: ProcessHandle | None = None

    @property
    def control_fd(self) -> int:
        """The descriptor that goes to the role with the request."""
        return self._control.fileno()

    @property
    def waiting(self) -> bool:
        """Whether it has still to be forked."""
        return not self.forked.is_set()

    def begin(self, process: ProcessHandle) -> None:
        """Note that the process exists."""
        self.pid, self._process = process.pid, process
        self._control.close()
        self.forked.set()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, never to another process of the same number; nothing happens if this one has ended."""
        if self._process is not None:
            self._process.send_signal(number)

    async def until_gone(self) -> None:
        """Return when the process has ended, or was let go."""
        if self._process is not None:
            await self._process.until_gone()

    def exited(self, code: int) -> None:
        """Note how it has ended: its exit code, or the signal that ended it, negated."""
        self.status = ExitStatus(code)
        self.settled.set()
        self.ended.set()

    def reap(self) -> None:
        """Ask how the process has ended; no other one is its parent and reaps it."""
        if self._process is not None:
            self.exited(self._process.reap())

    def fail(self, error: ShoalError) -> None:
        """Note that the process will never exist, or how it ends will never be known; wakes everybody who waits."""
        self._control.close()
        self.error = self.error or error
        self.forked.set()
        self.ended.set()

    def close(self) -> None:
        """Let go of the process."""
        if self._process is not None:
            self._process.close()
            self._process = None
