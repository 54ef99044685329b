"""From an endpoint's one stream of events to the handlers of a role.

A message belongs to exactly one protocol, so the first handler that recognises it gets it. What none recognises is a
peer's mistake: it is logged and counted, and nothing else happens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.log import FloodGate
from shoal.transport.base import Endpoint, PeerLost, PeerUp, Received, TransportEvent

logger = logging.getLogger(__name__)


class Handler(Protocol):
    """One protocol's end in this process."""

    def receive(self, event: Received) -> bool:
        """Take the message if it is one of this protocol's, without waiting; called outside of any task.

        Returns:
            Whether it was taken.

        Raises:
            RemoteProtocolError: the sender broke the protocol; its connection is closed.
        """
        ...

    def peer_lost(self, peer: PeerId) -> None:
        """Learn that the connection to a peer has ended."""
        ...


async def dispatch(
    endpoint: Endpoint, handlers: Sequence[Handler], on_up: Callable[[PeerId], None] | None = None
) -> None:
    """Hand every event of `endpoint` to the handlers, until the endpoint is closed.

    Args:
        endpoint: whose events are nobody else's.
        handlers: asked in this order.
        on_up: told of each new connection.
    """
    gate, metrics = FloodGate(logger), endpoint.metrics

    def receive(event: Received) -> None:
        try:
            for handler in handlers:
                if handler.receive(event):
                    return
        except RemoteProtocolError as error:
            metrics.counter("protocol.violated", kind=type(event.message).__name__).add()
            gate.warning("protocol.violated", event.peer, peer=event.peer, error=str(error))
            endpoint.disconnect(event.peer, str(error))
            return
        kind = type(event.message).__name__
        metrics.counter("protocol.unexpected", kind=kind).add()
        gate.warning("protocol.unexpected", event.peer, peer=event.peer, kind=kind)

    def take(event: TransportEvent) -> None:
        match event:
            case Received():
                receive(event)
            case PeerLost(peer, reason):
                logger.info("peer.lost", extra={"peer": peer, "reason": reason})
                for handler in handlers:
                    handler.peer_lost(peer)
            case PeerUp(peer):
                if on_up is not None:
                    on_up(peer)

    await endpoint.events().consume(take)
