"""Processes that do the work of a benchmark: clean interpreters with one thread each, called all at the same time.

They end with the context that started them. If this process is killed, its lifeline is cut and they end by themselves,
with their own children. They have sessions of their own, so that a Ctrl-C reaches this process alone, which ends them.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from shoal.clock import Deadline, SystemClock
from shoal.errors import DeadlineExceeded, RemoteError, ShoalError
from shoal.runtime.clean_interpreter import allocator_settings, start_interpreter
from shoal.runtime.frames import FrameReader, framed
from shoal.runtime.process_control import end_tagged
from shoal_lab.bench.peer_messages import Call, Go, Reply, Request, Result, Start

_GRACE_S = 5.0
"""Time for a peer to leave its context and end."""
_SHOWN_LINES = 40
# Not `SHOAL_*`: those are keys of the configuration.
_TAG_NAME = "_SHOAL_PEERS_TAG"
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


@dataclass(frozen=True, slots=True)
class _Peer:
    """One process, this end of its socket, and the file with what it has printed."""

    index: int
    process: subprocess.Popen[bytes]
    socket: socket.socket
    output: IO[bytes]

    def send(self, message: Request) -> None:
        # If the peer has ended, its missing answer says so.
        with suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(framed(message))


class PeerProcesses:
    """Some processes of one function; after an error in one of them all are ended."""

    def __init__(
        self, target: str, num_peers: int, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = 60.0
    ) -> None:
        """Start nothing yet.

        Args:
            target: "package.module:function", a `shoal_lab.bench.peer.PeerMain`.
            arguments: the same for all peers, in their `Seat`.
            timeout_s: for the start, and for each call that sets no other.
        """
        self._target = target
        self._num_peers = num_peers
        self._arguments = dict(arguments or {})
        self._timeout_s = timeout_s
        self._clock = SystemClock()
        self._tag = f"{_TAG_NAME}={secrets.token_hex(8)}"
        self._peers: list[_Peer] = []
        self._lifeline_fd = -1

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by index."""
        return tuple(peer.process.pid for peer in self._peers)

    def __enter__(self) -> Self:
        """Start all processes and enter their function.

        Raises:
            RemoteError: one of them has failed; with its traceback.
            DeadlineExceeded: one of them is not ready in time.
        """
        try:
            self._spawn()
            for peer in self._peers:
                peer.send(Start(self._target, peer.index, self._num_peers, self._arguments))
            self._gather("its start", Deadline.after(self._clock, self._timeout_s))
        except BaseException:  # a Ctrl-C too: no peer may be left
            self._end(0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End all processes and whatever they have started; without an error they may clean up first."""
        self._end(_GRACE_S if error is None else 0.0)

    def call(self, name: str, *args: object, timeout_s: float | None = None) -> list[Any]:
        """Have all peers do the same at the same time, and return their results by index.

        Args:
            name: one of the calls that the peers' function gives.
            args: the same for all peers.
            timeout_s: until the last peer has answered; None: as `__init__` says.

        Raises:
            RemoteError: a peer has raised an error or died; with its traceback.
            DeadlineExceeded: a peer has not answered in time.
        """
        if not self._peers:
            raise RemoteError(f"the peers of {self._target} have ended: {name} cannot be called")
        deadline = Deadline.after(self._clock, self._timeout_s if timeout_s is None else timeout_s)
        try:
            self._send_all(Call(name, list(args)))
            self._gather(f"the call {name}", deadline)
            self._send_all(Go())
            return self._gather(f"the call {name}", deadline)
        except BaseException:  # a Ctrl-C too: no peer may be left
            self._end(0.0)
            raise

    def _spawn(self) -> None:
        read_fd, self._lifeline_fd = os.pipe()
        try:
            for index in range(self._num_peers):
                ours, theirs = socket.socketpair()
                output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the peer
                with theirs:
                    fds = (theirs.fileno(), read_fd)
                    process = start_interpreter(
                        "shoal_lab.bench.peer_process",
                        fds,
                        pass_fds=fds,
                        # The plain loops among the peers allocate as the roles do that they are compared with.
                        environment={**_ONE_THREAD, **allocator_settings(), _TAG_NAME: self._tag.partition("=")[2]},
                        output=output,
                        new_session=True,
                    )
                self._peers.append(_Peer(index, process, ours, output))
        finally:
            os.close(read_fd)

    def _send_all(self, message: Request) -> None:
        for peer in self._peers:
            peer.send(message)

    def _gather(self, what: str, deadline: Deadline) -> list[Any]:
        """Return one answer of each peer: None for `Ready`, the value of a `Result`."""
        answers: list[Any] = [None] * self._num_peers
        with selectors.DefaultSelector() as waiting:
            for peer in self._peers:
                waiting.register(peer.socket, selectors.EVENT_READ, (peer, FrameReader[Reply](Reply)))
            while missing := [key.data[0].index for key in waiting.get_map().values()]:
                readable = waiting.select(deadline.remaining_s())
                if not readable:
                    names = ", ".join(map(str, sorted(missing)))
                    raise DeadlineExceeded(f"{what}: peer {names} of {self._target} has not answered in time")
                for key, _ in readable:
                    peer, frames = key.data
                    data = _read(peer)
                    if not data:
                        raise self._failure(peer, what)
                    for reply in frames.feed(data):
                        answers[peer.index] = reply.value if isinstance(reply, Result) else None
                        waiting.unregister(peer.socket)
        return answers

    def _failure(self, peer: _Peer, what: str) -> ShoalError:
        """Return the error for a peer whose socket is closed."""
        with suppress(subprocess.TimeoutExpired):
            peer.process.wait(_GRACE_S)
        code = peer.process.returncode
        how = "hangs at its end" if code is None else f"was killed by {_signal(-code)}" if code < 0 else "has failed"
        peer.output.seek(0)
        lines = peer.output.read().decode(errors="replace").splitlines()[-_SHOWN_LINES:]
        return RemoteError("\n".join([f"peer {peer.index} of {self._target} {how} in {what}", *lines]))

    def _end(self, grace_s: float) -> None:
        """End all peers: after `grace_s` seconds those that have not left by themselves, and what any have started."""
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.socket.close()
        deadline = Deadline.after(self._clock, grace_s)
        for peer in peers:
            with suppress(subprocess.TimeoutExpired):
                peer.process.wait(deadline.remaining_s())
        for peer in peers:
            peer.process.kill()
            peer.process.wait()
            peer.output.close()
        if self._lifeline_fd >= 0:
            # Also one that was started in the moment of a Ctrl-C, and is in no list.
            end_tagged(self._tag)
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1


def _read(peer: _Peer) -> bytes:
    """Read what is there; nothing at the end of the stream."""
    with suppress(ConnectionResetError):
        return peer.socket.recv(1 << 16)
    return b""


def _signal(number: int) -> str:
    with suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
