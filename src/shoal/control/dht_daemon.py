"""p2pd, hivemind's process: started whole or not at all, seen, and ended.

hivemind knows its process only once the call that starts it has returned. Cancelled inside of this call it would leave
a process that nobody can end any more, so that call is always let through; it takes milliseconds.

All calls to other peers go over one connection to the process, which hivemind reads in a task that nobody watches. If
it ends, or the process hangs, the node neither hears nor says anything any more, and runs on: so it is asked.
"""

# hivemind ships no type information.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from shoal.events.base import emit
from shoal.events.registry import DhtDaemonKilled, DhtDisconnected

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 5.0
"""How long p2pd may take to answer something that it knows by itself, on a machine with much else to do."""
_NOBODY = PeerID(b"\0")

_Result = TypeVar("_Result")
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class _OpenCalls(dict[Any, "asyncio.Future[bytes]"]):
    """The calls that wait for an answer: one that was cancelled does not, though hivemind forgets it a moment later.

    An answer that is read in this moment would be given to it, and that error would end hivemind's reader.
    """

    def __contains__(self, call: object) -> bool:
        future = self.get(call)
        return future is not None and not future.done()


class _Handlers(dict[Any, "asyncio.Task[None]"]):
    """The tasks that answer what peers ask: each is forgotten when it has ended, however that was.

    hivemind forgets none that was cancelled before it began, and with it keeps the question, which may have megabytes.
    """

    def __setitem__(self, call: Any, task: asyncio.Task[None]) -> None:
        super().__setitem__(call, task)
        task.add_done_callback(lambda ended: self._forget(call, ended))

    def pop(self, call: Any, default: Any = None) -> Any:
        """Leave it to the task's end, since whoever asks chooses the number of the call, and may take one twice."""
        return self.get(call, default)

    def _forget(self, call: Any, ended: asyncio.Task[None]) -> None:
        if self.get(call) is ended:
            del self[call]


class _Connections:
    """Opens hivemind's connections to p2pd, and closes those that it forgets: of calls that p2pd's end has cut off."""

    def __init__(self, connect: Callable[[], Awaitable[_Streams]]) -> None:
        self._connect = connect
        self._writers: list[asyncio.StreamWriter] = []

    async def __call__(self) -> _Streams:
        self._writers = [writer for writer in self._writers if not writer.is_closing()]
        reader, writer = await self._connect()
        self._writers.append(writer)
        return reader, writer

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


async def start_daemon(socket_dir: Path, initial_peers: Sequence[str], **settings: Any) -> P2P:
    """Start p2pd; if that is cancelled or fails, no process is left.

    Args:
        socket_dir: existing private directory with a short path.
        settings: passed on to `P2P.create`.

    Raises:
        P2PDaemonError: it did not start.
    """
    has_process = asyncio.Event()
    made: list[P2P] = []

    class Daemon(P2P):
        _UNIX_SOCKET_PREFIX = f"/unix{socket_dir}/"

        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if name == "_child" and value is not None:
                has_process.set()

    # A task of its own, which no cancel scope of the caller reaches.
    creating = asyncio.create_task(Daemon.create(initial_peers, **settings))
    try:
        daemon = await asyncio.shield(creating)
    except BaseException:  # cancelled or failed, no process may be left
        with anyio.CancelScope(shield=True):
            started = asyncio.create_task(has_process.wait())
            await asyncio.wait({creating, started}, return_when=asyncio.FIRST_COMPLETED)
            for task in (started, creating):
                task.cancel()
            await asyncio.gather(started, creating, return_exceptions=True)
        for daemon in made:
            await end_daemon(daemon)
        raise
    control = _control(daemon)
    control._pending_calls, control._handler_tasks = _OpenCalls(), _Handlers()
    control.daemon_connector.open_connection = _Connections(control.daemon_connector.open_connection)
    for task in (control._read_task, control._write_task):
        task.add_done_callback(_note_end)
    return daemon


async def answers(daemon: P2P) -> bool:
    """Return whether p2pd takes calls and gives answers, as it has to for every call to a peer."""
    control = _control(daemon)
    if control._read_task.done():
        return False
    with anyio.move_on_after(ANSWER_TIMEOUT_S) as timer:
        # It refuses a name that no peer has, at once and without the network. Itself it would look for in the network,
        # for half a minute, as soon as a link is out.
        with suppress(P2PDaemonError):
            await control.call_unary_handler(_NOBODY, "", b"")
    return not timer.cancelled_caught


async def connect(daemon: P2P, peer: PeerID, maddrs: Sequence[Multiaddr]) -> None:
    """Connect to a peer whose addresses p2pd may not know.

    Raises:
        P2PDaemonError: it cannot be dialled.
    """
    await _control(daemon).connect(peer, maddrs)


async def unless_it_ends(daemon: P2P, calls: Coroutine[Any, Any, _Result], timeout_s: float) -> _Result:
    """Return what calls to p2pd come to. hivemind waits for ever for the answer of one that has died.

    Raises:
        P2PDaemonError: It has ended, or has not answered in time.
    """
    child = child_of(daemon)
    if child is None:
        calls.close()
        raise P2PDaemonError("p2pd has ended")
    tasks = (asyncio.create_task(calls), asyncio.create_task(child.wait()))
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise P2PDaemonError("p2pd has ended" if tasks[1].done() else f"p2pd did not answer in {timeout_s:.0f} s")
    finally:
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.gather(*tasks, return_exceptions=True)


def _note_end(task: asyncio.Task[None]) -> None:
    """Take the error with which hivemind's reader or writer ends when p2pd dies; `answers` is how it is noticed."""
    if not task.cancelled() and (error := task.exception()) is not None:
        emit(logger, DhtDisconnected(repr(error)))


def _control(daemon: P2P) -> Any:
    """hivemind's side of the connection, None before there is one; it offers no public way to it."""
    client = cast(Any, daemon)._client
    return None if client is None else client.control


def child_of(daemon: P2P) -> asyncio.subprocess.Process | None:
    """Return the running p2pd of a daemon; hivemind offers no public way to see it."""
    child = cast("asyncio.subprocess.Process | None", cast(Any, daemon)._child)
    return child if child is not None and child.returncode is None else None


async def end_daemon(daemon: P2P) -> None:
    """End p2pd: ask, then kill; returns when it is reaped, and in any case after twice `CLOSE_TIMEOUT_S`."""
    with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
        await daemon.shutdown()
    if (control := _control(daemon)) is not None and isinstance(control.daemon_connector.open_connection, _Connections):
        control.daemon_connector.open_connection.close()
    child = child_of(daemon)
    if child is not None:
        emit(logger, DhtDaemonKilled(child.pid))
        child.kill()
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await child.wait()
