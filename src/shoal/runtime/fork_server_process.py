"""The supervisor's side of one fork server: starts it, talks to it, holds its lifeline."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio

from shoal.clock import SystemClock
from shoal.runtime.clean_interpreter import allocator_settings, start_interpreter
from shoal.runtime.fork_messages import Configure, Forked, Reply, Request
from shoal.runtime.frames import FrameReader, framed
from shoal.runtime.process_end import process_ended
from shoal.runtime.role_spec import ExitStatus

_READ_BYTES = 1 << 16


class ForkServerProcess:
    """A running fork server. Making one needs no event loop and does not wait.

    Attributes:
        pid: also the number of the session of all its roles.
        num_preloads: how often it was told to import something; it says of each that it has.
    """

    def __init__(self, preload: Sequence[str], run_dir: Path | None, tag: str) -> None:
        """Start the program.

        Args:
            preload: modules to import before the first fork, see `preload`; none of them may start a thread.
            run_dir: the fork server removes it when it ends; None: there is none.
            tag: "NAME=value", for the environment of the fork server and of all processes below it.

        Raises:
            OSError: the system refuses another process.
        """
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        lifeline_read_fd, self._lifeline_fd = os.pipe()
        name, value = tag.split("=")
        fds = (theirs.fileno(), lifeline_read_fd)
        try:
            self._process = start_interpreter(
                "shoal.runtime.fork_server",
                # The directory as an argument, because it has to be known however early this process is killed.
                [*fds, run_dir or ""],
                pass_fds=fds,
                environment={**allocator_settings(), name: value},
                # The terminal's Ctrl-C reaches the launcher only, which decides what it means.
                new_session=True,
            )
        except OSError:
            self.cut_lifeline()
            self._requests.close()
            raise
        finally:
            theirs.close()
            os.close(lifeline_read_fd)
        self.pid = self._process.pid
        self._requests.setblocking(False)
        self.num_preloads = 0
        self.preload(preload)

    def preload(self, modules: Sequence[str]) -> None:
        """Have it import modules before the next fork; to be called while nothing else is sent to it.

        Args:
            modules: "package.module", or "package.module:text", whose function `preload` is called with the text then.

        Raises:
            OSError: the fork server is gone.
        """
        self._requests.sendall(framed(Configure(list(modules), SystemClock.began_unix_s)))
        self.num_preloads += 1

    async def send(self, request: Request, fd: int | None = None) -> None:
        """Send one request, with a descriptor if it takes one; one task at a time.

        Raises:
            OSError: the fork server is gone.
        """
        frame = memoryview(framed(request))
        fds = [] if fd is None else [fd]
        while frame:
            try:
                sent_bytes = socket.send_fds(self._requests, [frame], fds)
            except BlockingIOError:
                await anyio.wait_writable(self._requests)
                continue
            frame = frame[sent_bytes:]
            fds = []

    async def replies(self) -> AsyncIterator[tuple[Reply, int]]:
        """Yield what the fork server reports, until it is gone; with each `Forked` its descriptor, otherwise -1."""
        frames: FrameReader[Reply] = FrameReader(Reply)
        fds: list[int] = []
        while True:
            await anyio.wait_readable(self._requests)
            try:
                # Each descriptor comes with the bytes of its own frame, never with those of another one (unix(7)).
                data, received, _flags, _address = socket.recv_fds(self._requests, _READ_BYTES, 1)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return
            if not data:
                return
            fds += received
            for reply in frames.feed(data):
                yield reply, fds.pop(0) if isinstance(reply, Forked) else -1

    def cut_lifeline(self) -> None:
        """Make the fork server end the run, and every role of it end itself; the second call does nothing."""
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1

    async def wait(self) -> None:
        """Return when the fork server has ended and its children have another parent; it stays unreaped.

        So its number cannot be used again before `reap`.
        """
        if not self.reaped:
            await process_ended(self.pid)

    @property
    def reaped(self) -> bool:
        """Whether it has ended and its number may be another process's by now."""
        return self._process.returncode is not None

    def kill(self) -> None:
        """Kill the fork server alone, unless it is reaped; its roles go on."""
        self._process.kill()

    def kill_session(self) -> None:
        """Kill it and its roles, unless it is reaped."""
        if not self.reaped:
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> ExitStatus:
        """Return how it ended; blocks until it has."""
        status = ExitStatus(self._process.wait())
        self._requests.close()
        return status
