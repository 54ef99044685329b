"""The system's own ssh: whoever can say `ssh box2` needs nothing else, with their configuration, agents and jump hosts.

One connection a host is shared by all commands (ControlMaster). Nothing secret is ever an argument: it goes to standard
input.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

import anyio
from anyio.abc import ByteReceiveStream, Process

from shoal.cli.output import on_one_line
from shoal.clock import Clock
from shoal.errors import HostFailed

_CONNECT_S: Final = 15
_OWN_FAILURE: Final = 255
"""The exit code of ssh where it is not that of the command."""
_MOST_SAID_BYTES: Final = 16 << 20
"""A host that says more at once means no good, or is broken."""
_ENDLESS: Final = "what it says does not end"
_BLOCK_BYTES: Final = 512
"""Of which `ulimit -f` of a POSIX shell has so many."""
_CAUSES: Final = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its host key is another one than was known: it was set up anew, or somebody stands between. If it was you, "
        "`ssh-keygen -R {name}` forgets the old one",
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "its host key is not known yet: connect by hand once, {ssh}",
    ),
    (r"Permission denied", "it lets nobody in without a password: put your key there, `ssh-copy-id {name}`"),
    (r"Could not resolve hostname", "there is no such name: say where it is, `hosts.<name>.ssh: user@address`"),
    (r"Connection refused", "nothing listens there: see whether its sshd runs, and on which port"),
    (r"timed out|No route to host|Network is unreachable", "it does not answer: see whether it is on, and reachable"),
    (r"Connection closed|Connection reset|Broken pipe", "it has closed the connection: its sshd's log says why"),
)


@dataclass(frozen=True)
class Done:
    """What a command on a host has come to."""

    code: int
    stdout: bytes
    stderr: str


@dataclass
class Ssh:
    """Runs commands on one host.

    Attributes:
        destination: as on ssh's command line.
        command: with which ssh is called.
        control_dir: where the shared connection has its socket.
    """

    destination: str
    command: Sequence[str]
    control_dir: Path
    clock: Clock
    own_options: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        options = (
            "BatchMode=yes",
            f"ConnectTimeout={_CONNECT_S}",
            "ServerAliveInterval=10",
            "ControlMaster=auto",
            f"ControlPath={self.control_dir}/%C",
            "ControlPersist=60",
        )
        self.own_options = tuple(word for option in options for word in ("-o", option))

    async def run(self, command: str, stdin: bytes = b"", *, within_s: float) -> Done:
        """Run a shell command there, and return its outcome, whatever its exit code.

        Raises:
            HostFailed: ssh did not get there, the connection was lost, the time is over, or it says far too much.
        """
        try:
            with anyio.fail_after(within_s):
                async with await self._opened(self.own_options, command, subprocess.PIPE) as process:
                    stdout, stderr = await _exchanged(process, stdin)
                    code = await process.wait()
        except TimeoutError:
            raise HostFailed(f"no answer within {within_s:.0f} s") from None
        said = stderr.decode(errors="replace")
        if code == _OWN_FAILURE:
            raise HostFailed(self._cause(said))
        return Done(code, stdout, said)

    async def _opened(
        self, options: Sequence[str], command: str, stderr: int | IO[bytes], before: Sequence[str] = ()
    ) -> Process:
        # Whatever shell the user has there, a POSIX one takes the command.
        argv = [*before, *self.command, *options, "--", self.destination, f"exec sh -c {shlex.quote(command)}"]
        try:
            return await anyio.open_process(argv, stderr=stderr, start_new_session=True)
        except FileNotFoundError:
            raise HostFailed(f"there is no {self.command[0]} on this machine: install OpenSSH's client") from None
        except OSError as error:
            raise HostFailed(f"{self.command[0]} cannot be started on this machine: {error.strerror}") from None

    async def lines(self, command: str) -> AsyncGenerator[str]:
        """Yield the lines that a shell command there prints, while it runs; leaving ends it.

        Raises:
            HostFailed: ssh did not get there, the command has failed, or prints a line, or errors, without an end.
        """
        async with aclosing(self._lines_of(self.own_options, command)) as lines:
            async for line in lines:
                yield line

    async def _lines_of(self, options: Sequence[str], command: str) -> AsyncGenerator[str]:
        # Into a file: nobody reads it before the end, and a pipe that is full would stop the command. ssh may write no
        # longer file, or a host could fill this machine's disk.
        bounded = f'ulimit -f {_MOST_SAID_BYTES // _BLOCK_BYTES}; exec "$@"'
        with tempfile.TemporaryFile() as said:
            async with await self._opened(options, command, said, ("sh", "-c", bounded, "sh")) as process:
                assert process.stdout is not None
                try:
                    begun = b""
                    async for part in process.stdout:
                        *whole, begun = (begun + part).split(b"\n")
                        if len(begun) > _MOST_SAID_BYTES:
                            raise HostFailed(_ENDLESS)
                        for line in whole:
                            yield line.decode(errors="replace")
                    code = await process.wait()
                finally:
                    if process.returncode is None:
                        process.kill()
            if code:
                if said.seek(0, os.SEEK_END) >= _MOST_SAID_BYTES:
                    raise HostFailed(_ENDLESS)
                said.seek(0)
                stderr = said.read().decode(errors="replace")
                raise HostFailed(
                    self._cause(stderr) if code == _OWN_FAILURE else last_line(stderr) or f"exit code {code}"
                )

    async def forward(self, port: int, there: int, opened: Callable[[], None]) -> None:
        """Let a port of this host's loopback lead to one of that host's, until cancelled or the connection ends.

        Args:
            port: here; it must be free.
            there: the port on the host.
            opened: is called once the way is open.

        Raises:
            HostFailed: it cannot be opened, or has ended.
        """
        way = f"127.0.0.1:{port}:127.0.0.1:{there}"
        # A connection of its own: that of commands may be shared, and outlives them.
        own = ("-o", "ControlPath=none", "-o", "ExitOnForwardFailure=yes", "-L", way)
        async with aclosing(self._lines_of((*own, *self.own_options), "echo open && exec cat")) as lines:
            async for _ in lines:
                opened()
        raise HostFailed("the way to the dashboard is closed")

    @asynccontextmanager
    async def connected(self, port: int) -> AsyncGenerator[Process]:
        """Give a connection to a TCP port of that host's loopback: what a process reads goes there, what it says is the
        answer, and its end that of the connection. No port of this machine is open for it.

        Raises:
            HostFailed: ssh cannot be started.
        """
        argv = [*self.command, *self.own_options, "-W", f"127.0.0.1:{port}", "--", self.destination]
        try:
            process = await anyio.open_process(argv, stderr=subprocess.DEVNULL, start_new_session=True)
        except OSError as error:
            raise HostFailed(f"{self.command[0]} cannot be started on this machine: {error.strerror}") from None
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            # Waits for its end, whatever is cancelled.
            await process.aclose()

    async def close(self) -> None:
        """End the shared connection."""
        with anyio.move_on_after(_CONNECT_S, shield=True):
            argv = [*self.command, *self.own_options, "-O", "exit", "--", self.destination]
            with contextlib.suppress(OSError):
                await anyio.run_process(argv, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _cause(self, stderr: str) -> str:
        where = {"name": shlex.quote(self.destination), "ssh": f"`{shlex.join((*self.command, self.destination))}`"}
        said = next((text for pattern, text in _CAUSES if re.search(pattern, stderr)), None)
        if said is not None:
            return said.format(**where)
        last = last_line(stderr)
        return f"ssh has failed: {last}" if last else "ssh has failed, and does not say why"


def last_line(text: str) -> str:
    """Return the last line of what a host has said, as a terminal may show it; empty if it has said nothing."""
    lines = [on_one_line(line) for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


async def _exchanged(process: Process, stdin: bytes) -> tuple[bytes, bytes]:
    """Write all that a process reads, while all that it says is read; it may end before it has read anything.

    Raises:
        HostFailed: it says more than any command has to.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    said = {process.stdout: bytearray(), process.stderr: bytearray()}

    async def read(stream: ByteReceiveStream) -> None:
        async for part in stream:
            said[stream] += part
            if len(said[stream]) > _MOST_SAID_BYTES:
                process.kill()
                tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for stream in said:
            tasks.start_soon(read, stream)
        with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            await process.stdin.send(stdin)
            await process.stdin.aclose()
    if any(len(text) > _MOST_SAID_BYTES for text in said.values()):
        raise HostFailed(_ENDLESS)
    return bytes(said[process.stdout]), bytes(said[process.stderr])


@asynccontextmanager
async def connections(
    destinations: Mapping[str, str], command: Sequence[str], clock: Clock
) -> AsyncGenerator[dict[str, Ssh]]:
    """Give what runs commands on each host, by its name; connections are ended with the context.

    Args:
        destinations: where ssh goes, by the name of each host.
    """
    # A socket's path must be short: /tmp, wherever temporary files are.
    with tempfile.TemporaryDirectory(prefix="shoal-ssh-", dir="/tmp", ignore_cleanup_errors=True) as control_dir:
        all = {name: Ssh(where, command, Path(control_dir), clock) for name, where in destinations.items()}
        try:
            yield all
        finally:
            async with anyio.create_task_group() as tasks:
                for ssh in all.values():
                    tasks.start_soon(ssh.close)
