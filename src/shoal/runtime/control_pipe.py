"""The control pipe between a role and the supervisor: one of `launcher_messages` a line, on a Unix socket pair."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import UnionType
from typing import Generic, TypeVar, TypeVarTuple, cast

import anyio
import msgspec

from shoal.clock import Clock
from shoal.errors import MALFORMED, ConnectionLost
from shoal.events.base import emit
from shoal.events.processes import ControlPipeGarbled, ControlPipeLineTooLong
from shoal.runtime import launcher_messages as messages
from shoal.runtime.waking import Mailbox

_logger = logging.getLogger(__name__)

# Control lines carry addresses and states, never tensors: a longer line means that the stream is out of step.
_MAX_LINE_BYTES = 4 << 20
_CLOSE_TIMEOUT_S = 1.0
_SHOWN_BYTES = 200
_LEAVES_MOST_S = 3600.0

_Received = TypeVar("_Received")
_Args = TypeVarTuple("_Args")
_encoder = msgspec.json.Encoder()


class ControlPipe(asyncio.Protocol, Generic[_Received]):
    """One end of a control pipe: sends without waiting, hands each received message to one function.

    Attributes:
        closed: set when the other end is gone or this one was closed.
    """

    def __init__(self, deliver: Callable[[_Received], None], kinds: UnionType) -> None:
        """Prepare an end that takes messages of these kinds; `open` connects it."""
        self.closed = anyio.Event()
        self._deliver = deliver
        self._decoder: msgspec.json.Decoder[_Received] = msgspec.json.Decoder(kinds)
        self._transport: asyncio.Transport | None = None
        self._unparsed = bytearray()

    async def open(self, control: socket.socket) -> None:
        """Take over a connected Unix socket."""
        control.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=control)

    def send(self, message: messages.FromRole | messages.ToRole) -> None:
        """Queue one message.

        Raises:
            ConnectionLost: the other process is gone.
        """
        if self._transport is None or self._transport.is_closing():
            raise ConnectionLost("the process at the other end of the control pipe is gone")
        self._transport.write(_encoder.encode(message) + b"\n")

    async def aclose(self) -> None:
        """Send what is queued and close; gives up on that after a second."""
        if self._transport is None:
            return
        self._transport.close()
        with anyio.move_on_after(_CLOSE_TIMEOUT_S, shield=True):
            await self.closed.wait()
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        *lines, rest = self._unparsed.split(b"\n")
        self._unparsed = rest
        for line in lines:
            try:
                message = self._decoder.decode(line)
            except MALFORMED as error:
                shown = line[:_SHOWN_BYTES].decode(errors="replace")
                emit(_logger, ControlPipeGarbled(str(error), shown))
                self._abort()
                break
            self._deliver(message)
        if len(rest) > _MAX_LINE_BYTES:
            emit(_logger, ControlPipeLineTooLong(len(rest)))
            self._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class RoleControl:
    """A role's end of the pipe to the supervisor.

    Attributes:
        stopping: set when the role is to leave gracefully, by SIGTERM or by a message.
        stop_reason: the reason in that message; empty: the user wishes it.
        doing: what the data server that this role waits for does, and how far it is.
        orders: messages from the launcher, except those that are named here and replies to requests.
    """

    def __init__(self) -> None:
        """Used by `open_role_control`."""
        self.stopping = anyio.Event()
        self.stop_reason = self.doing = ""
        self._pipe = ControlPipe(self._deliver, messages.ToRole)
        self.orders = Mailbox[messages.ToRole]()
        self._request_ids = itertools.count()
        self._answered: dict[int, anyio.Event] = {}
        self._replies: dict[int, object] = {}

    def tell(self, message: messages.FromRole) -> None:
        """Tell the launcher what happened, without waiting.

        Raises:
            ConnectionLost: the supervisor is gone; this process is about to end.
        """
        self._pipe.send(message)

    def notice(self, text: str) -> None:
        """Have the launcher show the user a line that stays on the screen; raises as `tell`."""
        self.tell(messages.UserNotice(text))

    async def until_stopped(self, work: Callable[[*_Args], Awaitable[None]], *args: *_Args) -> None:
        """Do this role's work until it ends, or is cancelled because the role is to leave."""
        async with anyio.create_task_group() as tasks:

            async def stop() -> None:
                await self.stopping.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(stop)
            await work(*args)
            tasks.cancel_scope.cancel()

    async def say_it_leaves(self, clock: Clock) -> None:
        """Say again and again that what this role does before it ends takes long; an hour at most, for disks can hang.

        Raises:
            ConnectionLost: the supervisor is gone; this process is about to end.
        """
        for _ in range(round(_LEAVES_MOST_S / messages.LEAVING_EVERY_S)):
            self.tell(messages.RoleLeaving())
            await clock.sleep_s(messages.LEAVING_EVERY_S)

    async def request(self, asked: messages.LauncherRequest[messages.Reply]) -> messages.Reply:
        """Ask the launcher for something and wait for its reply.

        Raises:
            ConnectionLost: the supervisor is gone; this process is about to end.
        """
        request_id = next(self._request_ids)
        answered = self._answered[request_id] = anyio.Event()
        try:
            self._pipe.send(messages.RoleAsks(request_id, cast(messages.AnyRequest, asked)))
            await answered.wait()
        finally:
            del self._answered[request_id]
        return cast(messages.Reply, self._replies.pop(request_id))

    def _deliver(self, message: messages.ToRole) -> None:
        if isinstance(message, messages.StopRole):
            self.stop_reason = message.reason
            self.stopping.set()
        elif isinstance(message, messages.RoleDoes):
            self.doing = message.text
        elif isinstance(message, messages.LauncherReplies):
            # Nobody waits any more when the task that asked was cancelled.
            if (answered := self._answered.get(message.id)) is not None:
                self._replies[message.id] = message.reply
                answered.set()
        else:
            self.orders.put(message)

    async def open(self, control: socket.socket) -> None:
        """Connect; used by `open_role_control`."""
        await self._pipe.open(control)

    async def aclose(self) -> None:
        """Send what is queued and close; used by `open_role_control`."""
        await self._pipe.aclose()
        self.orders.close()


@asynccontextmanager
async def open_role_control(control: socket.socket) -> AsyncGenerator[RoleControl, None]:
    """Connect a role to its supervisor; everything that was sent is flushed at the end."""
    role_control = RoleControl()
    await role_control.open(control)
    try:
        yield role_control
    finally:
        await role_control.aclose()
