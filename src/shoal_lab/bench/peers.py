"""Processes that do the work of a benchmark: clean interpreters with one thread each, called all at the same time.

They end with the context that started them. If this process is killed, its lifeline is cut and they end by themselves,
with their own children. They have sessions of their own, so that a Ctrl-C reaches this process alone, which ends them.
"""

from __future__ import annotations

import secrets
import selectors
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from shoal.clock import Deadline, SystemClock
from shoal.errors import DeadlineExceeded, RemoteError
from shoal.runtime.child import Child
from shoal.runtime.clean_interpreter import allocator_settings
from shoal.runtime.process_control import end_tagged
from shoal.runtime.role_spec import ExitStatus
from shoal_lab.bench.peer_messages import Call, Go, Reply, Request, Result, Start

_GRACE_S = 5.0
"""Time for a peer to leave its context and end."""
_PROGRAM = "shoal_lab.bench.peer_process"
# Not `SHOAL_*`: those are keys of the configuration.
_TAG_NAME = "_SHOAL_PEERS_TAG"
_ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}


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
        self._peers: list[Child[Reply]] = []

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, by index."""
        return tuple(peer.pid for peer in self._peers)

    def __enter__(self) -> Self:
        """Start all processes and enter their function.

        Raises:
            RemoteError: one of them has failed; with its traceback.
            DeadlineExceeded: one of them is not ready in time.
        """
        try:
            self._spawn()
            for index, peer in enumerate(self._peers):
                peer.tell(Start(self._target, index, self._num_peers, self._arguments))
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
        # The plain loops among the peers allocate as the roles do that they are compared with.
        environment = {**_ONE_THREAD, **allocator_settings(), _TAG_NAME: self._tag.partition("=")[2]}
        for _ in range(self._num_peers):
            peer = Child[Reply](_PROGRAM, Reply, environment=environment, keeps_output=True, new_session=True)
            self._peers.append(peer)

    def _send_all(self, message: Request) -> None:
        for peer in self._peers:
            peer.tell(message)

    def _gather(self, what: str, deadline: Deadline) -> list[Any]:
        """Return one answer of each peer: None for `Ready`, the value of a `Result`."""
        answers: list[Any] = [None] * self._num_peers
        with selectors.DefaultSelector() as waiting:
            for index, peer in enumerate(self._peers):
                waiting.register(peer.control, selectors.EVENT_READ, index)
            while missing := [key.data for key in waiting.get_map().values()]:
                readable = waiting.select(deadline.remaining_s())
                if not readable:
                    names = ", ".join(map(str, sorted(missing)))
                    raise DeadlineExceeded(f"{what}: peer {names} of {self._target} has not answered in time")
                for key, _ in readable:
                    index: int = key.data
                    replies = self._peers[index].read()
                    if replies is None:
                        raise self._failure(index, what)
                    for reply in replies:
                        answers[index] = reply.value if isinstance(reply, Result) else None
                        waiting.unregister(key.fileobj)
        return answers

    def _failure(self, index: int, what: str) -> RemoteError:
        """Return the error for a peer that says nothing more."""
        died = self._peers[index].death()
        how = "has failed"
        if died.code is None:
            how = "hangs at its end"
        elif died.code < 0:
            how = f"was {ExitStatus(died.code)}"
        return RemoteError("\n".join([f"peer {index} of {self._target} {how} in {what}", *died.lines]))

    def _end(self, grace_s: float) -> None:
        """End all peers: after `grace_s` seconds those that have not left by themselves, and what any have started."""
        peers, self._peers = self._peers, []
        for peer in peers:
            peer.control.close()
        deadline = Deadline.after(self._clock, grace_s)
        for peer in peers:
            peer.close(deadline.remaining_s())
        # Also one that was started in the moment of a Ctrl-C, and is in no list.
        end_tagged(self._tag)
