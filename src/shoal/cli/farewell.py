"""Roles that may take long to leave, and say so meanwhile: a client fetches the model, a mirror writes a checkpoint.

StopRole --> RoleLeaving, four times a second ... --> it has ended, or is silent for too long
"""

from __future__ import annotations

from contextlib import suppress

import anyio

from shoal.errors import ConnectionLost
from shoal.runtime.launcher_messages import StopRole
from shoal.runtime.role_handle import RoleHandle

GRACE_S = 3.0
"""Time for all roles to leave: a Ctrl-C has to be over within five seconds, also where a role hangs."""
LEAVING_S = 1.5
"""So long may a role be silent that has said that it is leaving."""


class Farewell:
    """Lets roles leave in their own time."""

    def __init__(self) -> None:
        self._heard: dict[RoleHandle, anyio.Event] = {}

    def heard(self, role: RoleHandle) -> None:
        """A role has said something, or has ended."""
        if (waits := self._heard.pop(role, None)) is not None:
            waits.set()

    async def take(self, role: RoleHandle | None, reason: str = "") -> None:
        """Have a role leave, and give it time as long as it says that it is at it.

        Args:
            reason: of a run that has failed.
        """
        if role is None or not role.serves:
            return
        with suppress(ConnectionLost):
            role.send(StopRole(reason))
        patience_s = GRACE_S / 2
        while role.serves:
            with anyio.move_on_after(patience_s) as timer:
                await self._heard.setdefault(role, anyio.Event()).wait()
            if timer.cancelled_caught:
                return
            patience_s = LEAVING_S
