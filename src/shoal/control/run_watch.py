"""A scout's connection with the run's client, over which it hears the last word.

the registry names a client -> AskRun over TLS -> it says that it is -> its RunOver -> over
                                    ^  '- nobody answers -'  |
                                    '--- connection lost ----'
"""

from __future__ import annotations

import anyio

from shoal.clock import Clock
from shoal.control.membership import Membership
from shoal.control.run_end import RunEndListener
from shoal.ids import PeerId
from shoal.runtime.waking import Signal, pass_on
from shoal.swarm.client_turn import ASK_AGAIN_S
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.control import AskRun, TellRun


class RunWatch:
    """Stays connected with the client. A `transport.dispatch.Handler`.

    Attributes:
        client: the peer that has said that it is the run's client, while it is connected.
        over: how the run has ended, in words, and whether nothing went wrong; None while it goes on.
    """

    def __init__(self, run_id: str, endpoint: Endpoint, membership: Membership, clock: Clock) -> None:
        """Know no client yet; `run` looks for it.

        Args:
            membership: names the peers to ask.
        """
        self.client: PeerId | None = None
        self.over: tuple[str, bool] | None = None
        self._endpoint = endpoint
        self._membership = membership
        self._clock = clock
        self._changed = Signal()
        self._asked_at_s: dict[PeerId, float] = {}
        self._end = RunEndListener(run_id, lambda: membership.view, self._run_over, lambda: self.client)

    def receive(self, event: Received) -> bool:
        """Take an answer, or the last word.

        Raises:
            RemoteProtocolError: somebody says that the run is over who is no client of it.
        """
        if not isinstance(event.message, TellRun):
            return self._end.receive(event)
        if event.message.client == event.peer and self.client is None:
            self.client = event.peer
            self._changed.notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        if peer == self.client:
            self.client = None
            self._changed.notify()

    async def changed(self) -> None:
        """Wait until the client is found or lost, the registry says something else, or the run is over."""
        await self._changed.wait()

    async def run(self) -> None:
        """Look for the client whenever there is no connection with it, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pass_on, self._membership.changed, self._changed)
            while True:
                changed = self._changed.coming
                self._ask()
                with anyio.move_on_after(ASK_AGAIN_S if self.client is None else None):
                    await changed.wait()

    def _ask(self) -> None:
        now_s = self._clock.now_s()
        clients = [client.hop for client in self._membership.view.clients if not client.waits]
        for hop in clients if self.client is None else ():
            if self._asked_at_s.get(hop.peer, float("-inf")) + ASK_AGAIN_S <= now_s:
                self._asked_at_s[hop.peer] = now_s
                self._endpoint.introduce(hop)
                self._endpoint.post(hop.peer, AskRun())
        self._asked_at_s = {hop.peer: self._asked_at_s[hop.peer] for hop in clients if hop.peer in self._asked_at_s}

    def _run_over(self, reason: str, ended_well: bool) -> None:
        self.over = (reason, ended_well)
        self._changed.notify()
