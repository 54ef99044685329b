"""From an endpoint's one stream of events to the handlers of a role.

A message belongs to exactly one protocol, so the first handler that recognises it gets it. What none recognises is a
peer's mistake: it is logged and counted, and nothing else happens. What this process has counted is not a matter of any
one protocol: whoever asks for it gets it from here, whatever the role. Nor is that a client ends, and is not to be
looked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.errors import RemoteProtocolError
from shoal.events.links import ProtocolUnexpected, ProtocolViolated
from shoal.ids import PeerId
from shoal.log import FloodGate
from shoal.transport.base import Endpoint, PeerLost, PeerUp, Received, TransportEvent
from shoal.wire.messages.control import COUNTERS, AskCounters, Metrics, RunOver

logger = logging.getLogger(__name__)


def counters_of(endpoint: Endpoint, role: str, answer_to: int = 0) -> Metrics:
    """Return what this process has counted until now, as it is told to others (see `Metrics`)."""
    values = {COUNTERS + name: float(count) for name, count in endpoint.metrics.counts().items()}
    return Metrics(role, endpoint.peer_id, answer_to, values)


class Handler(Protocol):
    """One protocol's end in this process."""

    def receive(self, event: Received) -> bool:
        """Take the message if it is one of this protocol's, without waiting; called outside of any task.

        Returns:
            Whether the handler took it.

        Raises:
            RemoteProtocolError: the sender broke the protocol; its connection is closed.
        """
        ...

    def peer_lost(self, peer: PeerId) -> None:
        """Learn that the connection to a peer has ended."""
        ...


class Rest:
    """Takes what no handler before it has taken, and does nothing with it: for a role that is about to end."""

    def receive(self, event: Received) -> bool:
        """See `Handler`."""
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """See `Handler`."""


async def dispatch(
    endpoint: Endpoint,
    handlers: Sequence[Handler],
    on_up: Callable[[PeerId], None] | None = None,
    on_lost: Callable[[PeerLost], None] | None = None,
) -> None:
    """Hand every event of `endpoint` to the handlers, until the endpoint is closed.

    Args:
        endpoint: only this call may take its events.
        handlers: asked in this order.
        on_up: is told of each new connection.
        on_lost: is told of each loss, before the handlers.
    """
    gate, metrics = FloodGate(logger), endpoint.metrics

    def receive(event: Received) -> None:
        if isinstance(event.message, AskCounters):
            endpoint.post(event.peer, counters_of(endpoint, "", event.message.number))
            return
        is_farewell = isinstance(event.message, RunOver)
        if is_farewell:
            endpoint.leaves(event.peer)
        try:
            for handler in handlers:
                if handler.receive(event):
                    return
        except RemoteProtocolError as error:
            metrics.counter("protocol.violated", kind=type(event.message).__name__).add()
            gate.emit(ProtocolViolated(event.peer, str(error)), event.peer)
            endpoint.disconnect(event.peer, str(error))
            return
        if is_farewell:
            return  # it means nothing more in this role
        kind = type(event.message).__name__
        metrics.counter("protocol.unexpected", kind=kind).add()
        gate.emit(ProtocolUnexpected(event.peer, kind), event.peer)

    def take(event: TransportEvent) -> None:
        match event:
            case Received():
                receive(event)
            case PeerLost(peer):
                if on_lost is not None:
                    on_lost(event)
                for handler in handlers:
                    handler.peer_lost(peer)
            case PeerUp(peer):
                if on_up is not None:
                    on_up(peer)

    await endpoint.events().consume(take)
