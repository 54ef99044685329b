"""The control pipe between a role and the supervisor: one JSON object a line, both ways, on a Unix socket pair.

From the role: `{"event": name, ...}`; one of them, "request", asks for an answer. To the role:
`{"stop": "graceful", "reason": ...}`, `{"reply": id, ...}`, and whatever else the launcher has to say to that role.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio
import msgspec

from shoal.errors import ConnectionLost
from shoal.runtime.mailbox import Mailbox

_logger = logging.getLogger(__name__)

# Control lines carry addresses and states, never tensors: a longer line means that the stream is out of step.
_MAX_LINE_BYTES = 4 << 20
_CLOSE_TIMEOUT_S = 1.0

Message = dict[str, Any]
"""One decoded line. The fields are checked by whoever knows the event."""

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Message)


class ControlPipe(asyncio.Protocol):
    """One end of a control pipe: sends without waiting, hands each received message to one function.

    Attributes:
        closed: set when the other end is gone or this one was closed.
    """

    def __init__(self, deliver: Callable[[Message], None]) -> None:
        """Prepare an end; `open` connects it."""
        self.closed = anyio.Event()
        self._deliver = deliver
        self._transport: asyncio.Transport | None = None
        self._unparsed = bytearray()

    async def open(self, control: socket.socket) -> None:
        """Take over a connected Unix socket."""
        control.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=control)

    def send(self, message: Mapping[str, object]) -> None:
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
        """Called by the event loop."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        self._unparsed += data
        *lines, rest = self._unparsed.split(b"\n")
        self._unparsed = rest
        try:
            for line in lines:
                self._deliver(_decoder.decode(line))
        except msgspec.DecodeError as error:
            _logger.error("control_pipe.garbled", extra={"reason": str(error)})
            self._abort()
        if len(rest) > _MAX_LINE_BYTES:
            _logger.error("control_pipe.line_too_long", extra={"size_bytes": len(rest)})
            self._abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the event loop."""
        self.closed.set()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class RoleControl:
    """A role's end of the pipe to the supervisor.

    Attributes:
        stopping: set when the role is to leave gracefully, by SIGTERM or by a message.
        stop_reason: the reason in that message; empty: the user wishes it.
        messages: messages from the launcher, except the order to stop and replies to requests.
    """

    def __init__(self) -> None:
        """Used by `open_role_control`."""
        self.stopping = anyio.Event()
        self.stop_reason = ""
        self._pipe = ControlPipe(self._deliver)
        self.messages = Mailbox[Message]()
        self._request_ids = itertools.count()
        self._answered: dict[int, anyio.Event] = {}
        self._replies: dict[int, Message] = {}

    def ready(self, **fields: object) -> None:
        """Say that this role serves now; `fields` are what others need in order to use it."""
        self.event("ready", **fields)

    def event(self, name: str, **fields: object) -> None:
        """Tell the launcher what happened, without waiting.

        Args:
            fields: anything that JSON can express, including tuples, dataclasses and msgspec structs.

        Raises:
            ConnectionLost: the supervisor is gone; this process is about to end.
        """
        self._pipe.send({"event": name, **fields})

    async def request(self, name: str, **fields: object) -> Message:
        """Ask the launcher for something and wait for its reply.

        Raises:
            ConnectionLost: the supervisor is gone; this process is about to end.
        """
        request_id = next(self._request_ids)
        answered = self._answered[request_id] = anyio.Event()
        try:
            self._pipe.send({"event": "request", "request": name, "id": request_id, **fields})
            await answered.wait()
        finally:
            del self._answered[request_id]
        return self._replies.pop(request_id)

    def _deliver(self, message: Message) -> None:
        if "stop" in message:
            self.stop_reason = str(message.get("reason", ""))
            self.stopping.set()
        elif "reply" in message:
            request_id: int = message.pop("reply")
            # Nobody waits any more when the task that asked was cancelled.
            if (answered := self._answered.get(request_id)) is not None:
                self._replies[request_id] = message
                answered.set()
        else:
            self.messages.put(message)

    async def open(self, control: socket.socket) -> None:
        """Connect; used by `open_role_control`."""
        await self._pipe.open(control)

    async def aclose(self) -> None:
        """Send what is queued and close; used by `open_role_control`."""
        await self._pipe.aclose()
        self.messages.close()


@asynccontextmanager
async def open_role_control(control: socket.socket) -> AsyncGenerator[RoleControl, None]:
    """Connect a role to its supervisor; everything that was sent is flushed at the end."""
    role_control = RoleControl()
    await role_control.open(control)
    try:
        yield role_control
    finally:
        await role_control.aclose()
