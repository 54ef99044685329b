"""The client dials every server where it says that it listens, and tells all who cannot be reached.

    a server announces itself -> its addresses are dialled -> reached
                                                         '-> both users are told; dialled again now and then

A server finds its way to the client by itself, so that everything looks well from there, while all who train dial it in
vain. Only somebody else can see that. The word goes to the server by the client's record in the registry, because a
connection may be what is lacking.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import anyio

from shoal.clock import Clock
from shoal.control.membership import Membership
from shoal.control.records import MAX_REASON_CHARS, MAX_UNDIALLED, Undialled
from shoal.events.base import tell
from shoal.events.links import ServerDialled, ServerUndialled
from shoal.ids import PeerId
from shoal.swarm.view import Candidate
from shoal.wire.messages.base import Hop

logger = logging.getLogger(__name__)

RETRY_S: Final = 10.0
"""Until a server that was dialled in vain is dialled again."""
_AT_ONCE: Final = 8


@dataclass(eq=False, repr=False)
class DialBack:
    """Which servers the client's host can dial.

    Attributes:
        dial: returns why a peer cannot be dialled, or "".
        on_change: is told which peers cannot be dialled, when that has changed.
        notice: tells the user something that stays on the screen.
    """

    membership: Membership
    dial: Callable[[Hop], Awaitable[str]]
    clock: Clock
    on_change: Callable[[tuple[Undialled, ...]], None]
    notice: Callable[[str], None]
    _dialled: dict[PeerId, tuple[str, ...]] = field(default_factory=dict[PeerId, tuple[str, ...]])
    _undialled: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    _places: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(_AT_ONCE))

    async def run(self) -> None:
        """Dial whoever comes, until cancelled."""
        async with anyio.create_task_group() as tasks:
            while True:
                view = self.membership.view
                for server in (*view.replicas, *view.candidates):
                    if self._dialled.get(server.peer) != server.hop.addresses:
                        self._dialled[server.peer] = server.hop.addresses
                        tasks.start_soon(self._follow, server)
                await self.membership.changed()

    async def _follow(self, server: Candidate) -> None:
        """Dial a server until it is reached, or is at other addresses."""
        peer, addresses = server.peer, server.hop.addresses
        begun_unix_s = self.clock.unix_s()
        while self._dialled.get(peer) == addresses:
            async with self._places:
                reason = await self.dial(server.hop)
            # One that has ended is announced for a while: nothing is said of who has not been heard since.
            is_known = not reason or self.membership.is_announced(peer, begun_unix_s)
            if is_known and self._dialled.get(peer) == addresses:
                self._found(peer, reason)
            if not reason:
                return
            await self.clock.sleep_s(RETRY_S)
            # One that is only lost to this client is still announced, for it was dialled.
            if not self.membership.is_announced(peer):
                # It is told of anew when it comes back.
                self._dialled.pop(peer, None)
                self._found(peer, "", is_gone=True)
                return

    def _found(self, peer: PeerId, reason: str, *, is_gone: bool = False) -> None:
        """Take note of how a server can be dialled now."""
        before = self._undialled.pop(peer, "")
        if reason:
            self._undialled[peer] = reason
        if bool(before) == bool(reason):
            return
        name = self.membership.view.name_of(peer)
        if reason:
            tell(logger, ServerUndialled(name, reason, peer), self.notice)
        elif not is_gone:
            tell(logger, ServerDialled(name, peer), self.notice)
        worst = list(self._undialled.items())[:MAX_UNDIALLED]
        self.on_change(tuple(Undialled(peer, reason[:MAX_REASON_CHARS]) for peer, reason in worst))


@asynccontextmanager
async def dial_back_heard(
    membership: Membership, own_peer: PeerId, tell: Callable[[str], None]
) -> AsyncGenerator[None]:
    """Tell inside of this context, whenever it changes, why the client cannot dial this server; empty when it can."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_hear, membership, own_peer, tell)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()


async def _hear(membership: Membership, own_peer: PeerId, tell: Callable[[str], None]) -> None:
    told = ""
    while True:
        clients = membership.view.clients[:1]
        found = [reason for client in clients for peer, reason in client.undialled if peer == own_peer]
        reason = found[0] if found else ""
        # A client that is not seen says nothing either way.
        if clients and reason != told:
            told = reason
            tell(reason)
        await membership.changed()
