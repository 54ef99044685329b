"""What the launcher holds of one role: its events, messages to it, its end; it stays the same over restarts."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from shoal.errors import ConnectionLost, RemoteError
from shoal.runtime import launcher_messages as messages
from shoal.runtime.control_pipe import ControlPipe
from shoal.runtime.role_spec import ExitStatus, RoleSpec
from shoal.runtime.waking import Mailbox, Signal


class RoleHandle:
    """One role under supervision.

    Attributes:
        events: everything that happens to the role, in order, kept until it is read; ends with the role.
        pid: of the process that runs it now, or ran it last.
        restarts: how often it has been started again.
        was_ready: whether any of its processes has ever said that it serves.
        last_error: its last word on why it failed; empty: it said nothing.
        last_kind: what kind of error that was.
    """

    def __init__(self, spec: RoleSpec) -> None:
        """Used by the supervisor."""
        self.spec = spec
        self.pid = 0
        self.restarts = 0
        self.was_ready = False
        self.events = Mailbox[messages.RoleEvent]()
        self._pipe: ControlPipe[messages.FromRole] | None = None
        self._generation = 0
        self._ready: messages.RoleReady | None = None
        self._status: ExitStatus | None = None
        self.last_error = self.last_kind = ""
        self._changed = Signal()

    @property
    def running(self) -> bool:
        """Whether the role has not ended for good."""
        return self._status is None

    @property
    def serves(self) -> bool:
        """Whether the process that runs it now has said that it serves, and has not ended."""
        return self._ready is not None

    async def ready(self) -> messages.RoleReady:
        """Wait until the role serves and return what it said then.

        Raises:
            RemoteError: it ended before; the message says why, as far as it said so.
        """
        while self._ready is None:
            if self._status is not None:
                reason = self.last_error or str(self._status)
                raise RemoteError(f"{self.spec} ended before it was ready: {reason}")
            await self._changed.wait()
        return self._ready

    async def wait(self) -> ExitStatus:
        """Wait until the role has ended for good and return how it ended the last time."""
        while self._status is None:
            await self._changed.wait()
        return self._status

    def send(self, message: messages.ToRole) -> None:
        """Send a message to the role.

        Raises:
            ConnectionLost: the role does not run now.
        """
        if self._pipe is None:
            raise ConnectionLost(f"{self.spec} does not run now")
        self._pipe.send(message)

    def reply(self, asked: messages.RoleAsks, reply: messages.AnyReply) -> None:
        """Answer a request; nothing happens if the process that asked has ended: it waits for no answer."""
        if asked.generation == self._generation:
            with suppress(ConnectionLost):
                self.send(messages.LauncherReplies(asked.id, reply))

    def connect(self, pipe: ControlPipe[messages.FromRole]) -> None:
        """Note the control pipe of a process that is about to be forked; used by the supervisor."""
        self._pipe = pipe
        self._generation += 1
        self.last_error = self.last_kind = ""

    def deliver(self, message: messages.FromRole) -> None:
        """Take in a message of the role; used by its control pipe."""
        if isinstance(message, messages.RoleAsks):
            message = msgspec.structs.replace(message, generation=self._generation)
        elif isinstance(message, messages.RoleReady):
            self._ready = message
            self.was_ready = True
            self._changed.notify()
        elif isinstance(message, messages.RoleFailed):
            self.last_error, self.last_kind = message.reason, message.kind
        self.events.put(message)

    def exited(self, status: ExitStatus) -> None:
        """Note the end of a process; used by the supervisor."""
        self._pipe = None
        self._ready = None
        self.events.put(messages.RoleExited(status))

    def finish(self, status: ExitStatus) -> None:
        """Note the end of the role; used by the supervisor, the second call does nothing."""
        if self._status is None:
            self._status = status
            self._pipe = None
            self.events.close()
            self._changed.notify()
