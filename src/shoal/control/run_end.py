"""The end of a run: the client's last word to the servers and to clients that wait, and what it means in words.

The word goes over connections alone: to every server, to the other clients, and to whoever has asked the client which
run it is, as the scout of each host of servers does. Nobody leaves because the registry says that a run is over.

    the registry names a client -> AskRun over TLS -> it says that it is -> its RunOver -> over      (`RunWatch`)
                                        ^  '- nobody answers -'  |
                                        '--- connection lost ----'
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import anyio

from shoal.clock import Clock
from shoal.control.counter_report import SELDOM_S
from shoal.control.membership import Membership
from shoal.errors import RemoteProtocolError
from shoal.events.base import emit
from shoal.events.registry import RunHasEnded, RunOverIgnored
from shoal.ids import PeerId
from shoal.runtime.waking import Signal, pass_on
from shoal.swarm.client_turn import ASK_AGAIN_S
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import Handler
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import MAX_FAILURE_CHARS, AskRun, RunOver, TellRun

logger = logging.getLogger(__name__)

OnOver = Callable[[str, bool], None]
"""Told how the run has ended, in words, and whether nothing went wrong."""


def how_it_ended(run_id: str, *, interrupted: bool, failure: str) -> tuple[str, bool]:
    """Return it in words, and whether nothing went wrong."""
    if failure:
        return f"run {run_id} has failed: {failure}", False
    return f"run {run_id} has ended" + (" (interrupted at its client)" if interrupted else ""), True


def say_run_is_over(endpoint: Endpoint, peers: Iterable[PeerId], *, interrupted: bool, failure: str) -> None:
    """Tell servers, other clients and the roles of this host; closing the endpoint writes what is queued first."""
    for peer in peers:
        endpoint.post(peer, RunOver(interrupted, failure[:MAX_FAILURE_CHARS]))


class RunEndListener(Handler):
    """The side of those that are told. A `transport.dispatch.Handler`."""

    def __init__(
        self,
        run_id: str,
        view: Callable[[], SwarmView],
        on_over: OnOver,
        coordinator: Callable[[], PeerId | None] = lambda: None,
    ) -> None:
        """Wait for the word.

        Args:
            on_over: called once.
            coordinator: returns the run's coordinator, if this server knows it; then only that client's word counts.
        """
        self._run_id, self._view, self._on_over = run_id, view, on_over
        self._coordinator = coordinator
        self._is_over = False

    def receive(self, event: Received) -> bool:
        """Take the client's last word.

        Raises:
            RemoteProtocolError: it comes from somebody who is no client of the run.
        """
        message = event.message
        if not isinstance(message, RunOver):
            return False
        coordinator = self._coordinator()
        # After a network that broke in two, a server may follow a client again before it finds it in the registry.
        if event.peer != coordinator and event.peer not in {client.peer for client in self._view().clients}:
            raise RemoteProtocolError(f"{event.peer} says that the run is over, and is no client of it")
        if coordinator not in (None, event.peer):
            # It has not heard yet that another client has taken the run over.
            emit(logger, RunOverIgnored(self._run_id, event.peer))
        elif not self._is_over:
            self._is_over = True
            reason, ended_well = how_it_ended(self._run_id, interrupted=message.interrupted, failure=message.failure)
            emit(logger, RunHasEnded(self._run_id, reason))
            self._on_over(reason, ended_well)
        return True


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
        self._known: tuple[Hop, ...] = ()
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
        announced = tuple(client.hop for client in self._membership.view.clients if not client.waits)
        clients = self._known = announced or self._known
        for hop in clients if self.client is None else ():
            pause_s = ASK_AGAIN_S if announced else SELDOM_S
            if self._asked_at_s.get(hop.peer, float("-inf")) + pause_s <= now_s:
                self._asked_at_s[hop.peer] = now_s
                self._endpoint.introduce(hop)
                self._endpoint.post(hop.peer, AskRun())
        self._asked_at_s = {hop.peer: self._asked_at_s[hop.peer] for hop in clients if hop.peer in self._asked_at_s}

    def _run_over(self, reason: str, ended_well: bool) -> None:
        self.over = (reason, ended_well)
        self._changed.notify()
