"""The end of a run: the client's last word to the servers and to clients that wait, and what it means in words.

The word goes over connections alone: to every server, to the other clients, and to whoever has asked the client which
run it is, as the scout of each host of servers does. Nobody leaves because the registry says that a run is over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from shoal.errors import RemoteProtocolError
from shoal.events.base import emit
from shoal.events.registry import RunHasEnded, RunOverIgnored
from shoal.ids import PeerId
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.control import RunOver

logger = logging.getLogger(__name__)

MAX_FAILURE_CHARS = 300
"""Of the reason why a run could not go on."""

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


class RunEndListener:
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

    def peer_lost(self, peer: PeerId) -> None:
        """A client that is gone without a word may come back."""
