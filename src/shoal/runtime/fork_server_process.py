"""The supervisor's side of the fork server: starts it, talks to it, makes sure that nothing survives it."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import anyio
import anyio.to_thread

from shoal.runtime import fork_messages
from shoal.runtime.fork_messages import Configure, Reply, Request
from shoal.runtime.process_control import kill
from shoal.runtime.process_info import ProcessStat, descendants, has_environment

_TAG_NAME = "SHOAL_FORK_SERVER"
_READ_BYTES = 1 << 16


class ForkServerProcess:
    """A running fork server.

    Making one needs no event loop and does not wait: a launcher makes it first of all, so that the imports of the
    roles overlap with reading its own configuration. If the launcher fails before there is a supervisor, `kill` it.

    Attributes:
        pid: of the fork server; the session of all its roles has the same number.
    """

    def __init__(self, preload: Sequence[str], run_dir: Path | None = None) -> None:
        """Start the program.

        Args:
            preload: modules to import before the first fork; none of them may start a thread.
            run_dir: directory that the fork server removes when it ends.
        """
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        lifeline_read_fd, self._lifeline_fd = os.pipe()
        # Inherited by every process of the run, also by those that leave the session; it is no secret.
        self._tag = f"{_TAG_NAME}={secrets.token_hex(8)}"
        name, value = self._tag.split("=")
        # Roles find their modules where this process finds its own; -P keeps the working directory out otherwise.
        environment = {**os.environ, name: value, "PYTHONPATH": os.pathsep.join(sys.path)}
        # As an argument, because it has to be known however early this process is killed.
        arguments = [str(theirs.fileno()), str(lifeline_read_fd), str(run_dir or "")]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "shoal.runtime.fork_server", *arguments],
            stdin=subprocess.DEVNULL,
            env=environment,
            pass_fds=(theirs.fileno(), lifeline_read_fd),
            # A session of its own: the terminal's Ctrl-C reaches the launcher only, which decides what it means.
            start_new_session=True,
        )
        theirs.close()
        os.close(lifeline_read_fd)
        self.pid = self._process.pid
        self._members = {self.pid}
        self._requests.setblocking(False)
        self._requests.sendall(fork_messages.encode(Configure(list(preload))))

    async def send(self, request: Request, fd: int | None = None) -> None:
        """Send one request, with a descriptor if it takes one; one task at a time.

        Raises:
            OSError: the fork server is gone.
        """
        frame = memoryview(fork_messages.encode(request))
        fds = [] if fd is None else [fd]
        while frame:
            try:
                sent_bytes = socket.send_fds(self._requests, [frame], fds)
            except BlockingIOError:
                await anyio.wait_writable(self._requests)
                continue
            frame = frame[sent_bytes:]
            fds = []

    async def replies(self) -> AsyncIterator[Reply]:
        """Yield what the fork server reports, until it is gone."""
        frames = fork_messages.FrameBuffer()
        while True:
            await anyio.wait_readable(self._requests)
            try:
                data = self._requests.recv(_READ_BYTES)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                return
            if not data:
                return
            for body in frames.feed(data):
                yield fork_messages.decode_reply(body)

    def cut_lifeline(self) -> None:
        """Make the fork server end everything below it, and itself; returns at once."""
        if self._lifeline_fd >= 0:
            # While all of them live: one that has ended cannot be recognised any more if it left the session.
            self._find_members()
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1

    async def wait(self) -> None:
        """Return when the fork server has ended; it stays unreaped, so that its number cannot be used again."""
        if sys.platform != "linux":
            await anyio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
            return
        pidfd = os.pidfd_open(self.pid)
        try:
            await anyio.wait_readable(pidfd)
        finally:
            os.close(pidfd)

    def kill(self) -> None:
        """Kill and reap the fork server and every process of its run that is left; the second call does nothing.

        Roles that outlive it are children of this process if that is a subreaper, and are reaped here. Blocks for the
        milliseconds that the kernel takes to end a killed process.
        """
        self.cut_lifeline()
        if self._process.returncode is not None:
            return
        os.killpg(self.pid, signal.SIGKILL)
        me = os.getpid()
        while left := self._find_members():
            for stat in left:
                kill(stat.pid)
            for stat in left:
                if stat.parent_pid == me:
                    os.waitpid(stat.pid, 0)
        self._process.wait()
        self._requests.close()

    def _find_members(self) -> list[ProcessStat]:
        """Return the processes of the run that descend from this one, without the fork server, and remember them."""
        found: list[ProcessStat] = []
        for stat in descendants(os.getpid()):
            # By any sign: a process that has ended has no environment any more, and neither has one in the middle of
            # an exec; one that left the session has its parent, until that has ended.
            known = stat.pid in self._members or stat.parent_pid in self._members or stat.session == self.pid
            if stat.pid != self.pid and (known or has_environment(stat.pid, self._tag)):
                self._members.add(stat.pid)
                found.append(stat)
        return found
