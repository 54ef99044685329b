"""What the launcher holds of one role: its events, messages to it, its end; it stays the same over restarts."""

from __future__ import annotations

from typing import Any

import anyio
import msgspec

from shoal.errors import ConnectionLost, RemoteError
from shoal.runtime.control_pipe import ControlPipe, Message
from shoal.runtime.mailbox import Mailbox
from shoal.runtime.role_spec import ExitStatus, RoleSpec


class RoleEvent(msgspec.Struct, frozen=True):
    """Something that a role said, or that happened to it.

    From the role: "ready", "error" (`kind`, `message`), "request" (`request`, `id`; answer it with
    `RoleHandle.reply`), and its own. From the supervisor: "exited" (`code`) after each end, "restarting" (`delay_s`,
    `status`) if it will be started again, "restarted" when its new process exists, and "given_up" if it failed too
    often for that.
    """

    name: str
    fields: dict[str, Any]
    start: int = 0
    """Which process of the role it is about, from 1."""


class RoleHandle:
    """One role under supervision.

    Attributes:
        events: everything that happens to the role, in order, kept until it is read; ends with the role.
        pid: of the process that runs it now, or ran it last.
        restarts: how often it has been started again.
        was_ready: whether any of its processes has ever said that it serves.
        last_error: its last word on why it failed; empty: it said nothing.
    """

    def __init__(self, spec: RoleSpec) -> None:
        """Used by the supervisor."""
        self.spec = spec
        self.pid = 0
        self.restarts = 0
        self.was_ready = False
        self.events = Mailbox[RoleEvent]()
        self._pipe: ControlPipe | None = None
        self._start = 0
        self._ready_fields: Message | None = None
        self._status: ExitStatus | None = None
        self.last_error = ""
        self._changed = anyio.Event()

    @property
    def running(self) -> bool:
        """Whether the role has not ended for good."""
        return self._status is None

    @property
    def serves(self) -> bool:
        """Whether the process that runs it now has said that it serves, and has not ended."""
        return self._ready_fields is not None

    async def ready(self) -> Message:
        """Wait until the role serves and return the fields of its "ready" event.

        Raises:
            RemoteError: it ended before; the message says why, as far as it said so.
        """
        while self._ready_fields is None:
            if self._status is not None:
                reason = self.last_error or str(self._status)
                raise RemoteError(f"{self.spec} ended before it was ready: {reason}")
            await self._changed.wait()
        return self._ready_fields

    async def wait(self) -> ExitStatus:
        """Wait until the role has ended for good and return how it ended the last time."""
        while self._status is None:
            await self._changed.wait()
        return self._status

    def send(self, **fields: object) -> None:
        """Send a message to the role, which finds it in `RoleControl.messages`.

        Raises:
            ConnectionLost: the role does not run now.
        """
        if self._pipe is None:
            raise ConnectionLost(f"{self.spec} does not run now")
        self._pipe.send(fields)

    def reply(self, request: RoleEvent, **fields: object) -> None:
        """Answer a "request" event; nothing happens if the role that asked has ended meanwhile.

        Raises:
            ConnectionLost: the role does not run now.
        """
        if request.start == self._start:
            self.send(reply=request.fields["id"], **fields)

    def connect(self, pipe: ControlPipe) -> None:
        """Note the control pipe of a process that is about to be forked; used by the supervisor."""
        self._pipe = pipe
        self._start += 1

    def deliver(self, message: Message) -> None:
        """Take in a line from the role; used by its control pipe."""
        name = str(message.pop("event", ""))
        if name == "ready":
            self._ready_fields = message
            self.was_ready = True
            self._notify()
        elif name == "error":
            self.last_error = str(message.get("message", ""))
        self.emit(name, **message)

    def emit(self, name: str, **fields: object) -> None:
        """Append an event; used by the supervisor."""
        self.events.put(RoleEvent(name, fields, self._start))

    def exited(self, status: ExitStatus) -> None:
        """Note the end of a process; used by the supervisor."""
        self._pipe = None
        self._ready_fields = None
        self.emit("exited", code=status.code)

    def finish(self, status: ExitStatus) -> None:
        """Note the end of the role; used by the supervisor, the second call does nothing."""
        if self._status is None:
            self._status = status
            self._pipe = None
            self.events.close()
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
