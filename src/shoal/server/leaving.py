"""A server that is to leave: it goes when what it holds is elsewhere, and until then it serves as ever.

the launcher says leave -> Leave to the client -> others hold it, or the client has fetched it: the server may go
                                          '-> no answer: whoever announces the stage counts
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterable, Callable, Collection
from dataclasses import dataclass, field

import anyio

from shoal.clock import Clock
from shoal.events.base import emit
from shoal.events.servers import ServerCanLeave
from shoal.ids import PeerId
from shoal.runtime.launcher_messages import LastOfStage, LeaveTogether, ServerMayLeave, ToRole
from shoal.runtime.waking import Signal
from shoal.server.replica import LocalReplica
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import Handler
from shoal.wire.messages.control import Leave as AskToLeave
from shoal.wire.messages.control import MayLeave

logger = logging.getLogger(__name__)

_REPEAT_S = 0.5
_NO_CLIENT_S = 3.0
"""Without an answer for so long, there is no client that could be reached."""


@dataclass(eq=False, repr=False)
class Leaving(Handler):
    """The end of one server. A `transport.dispatch.Handler`.

    Attributes:
        view: returns the swarm as it is now.
        tell: is told `ServerMayLeave` once, and before it now and then `LastOfStage` while the server is the last.
        has_left: the server has said that it may go, and takes no more work.
    """

    endpoint: Endpoint
    replica: Callable[[], LocalReplica]
    view: Callable[[], SwarmView]
    clock: Clock
    tell: Callable[[LastOfStage | ServerMayLeave], None]
    has_left: bool = field(default=False, init=False)
    _answer: MayLeave | None = None
    _answered: Signal = field(default_factory=Signal)

    def receive(self, event: Received) -> bool:
        """Take the client's answer; nobody else is asked."""
        message = event.message
        if not isinstance(message, MayLeave):
            return self.has_left  # what comes now is for a server that is there
        replica = self.replica()
        if event.peer == replica.member.coordinator and message.stage == replica.stage:
            self._answer = message
            self._answered.notify()
        return True

    async def run(self, orders: AsyncIterable[ToRole]) -> None:
        """Return when the launcher has said `LeaveTogether`, and this server may go."""
        async for order in orders:
            if isinstance(order, LeaveTogether):
                await self.leave(set(order.peers))
                return

    async def leave(self, leaving: Collection[PeerId]) -> None:
        """Return when this server may go, however long that takes.

        Args:
            leaving: the servers that leave with this one.
        """
        others = tuple(sorted(set(leaving) - {self.endpoint.peer_id}))
        heard_s, is_due = self.clock.now_s(), True
        while True:
            replica, self._answer, answered = self.replica(), None, self._answered.coming
            client = replica.member.coordinator
            if is_due and client is not None:
                self.endpoint.post(client, AskToLeave(replica.stage, others))
            with anyio.move_on_after(_REPEAT_S) as timer:
                await answered.wait()
            is_due = timer.cancelled_caught  # an answer that it may not go yet is followed by one that it may
            answer, base = self._answer, replica.member.base
            if answer is not None:
                heard_s = self.clock.now_s()
            if base.round == 0 or self._is_safe(replica, answer):
                emit(logger, ServerCanLeave(replica.stage, base.round))
                self._go(replica, is_kept=answer is not None and bool(answer.record_hash))
                return
            problem = "" if answer is None else answer.refused
            if self.clock.now_s() - heard_s >= _NO_CLIENT_S:
                replicas = {other.peer for other in self.view().by_stage(replica.stage)}
                if replicas - {self.endpoint.peer_id, *others}:
                    self._go(replica, is_kept=False)
                    return
                problem = "no client can be reached"
            if answer is not None or problem:
                self.tell(LastOfStage(replica.stage, base.round, problem))

    def _go(self, replica: LocalReplica, *, is_kept: bool) -> None:
        self.has_left = True
        self.tell(ServerMayLeave(replica.stage, replica.member.base.round, is_kept))

    def _is_safe(self, replica: LocalReplica, answer: MayLeave | None) -> bool:
        """Whether this server may go: not with a record that is being committed, of which it may be the only holder."""
        if answer is None or not answer.is_safe:
            return False
        member = replica.member
        return not answer.record_hash or (answer.record_hash == member.base.record_hash and not member.is_closing)
