"""From an endpoint's one stream of events to the handlers of a role.

A message belongs to exactly one protocol, so the first handler that recognises it gets it. What none recognises is a
peer's mistake: it is logged and counted, and nothing else happens. What this process has measured is not a matter of
any one protocol: whoever asks for it gets it from here, whatever the role. Nor is that a client ends, and is not to be
looked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from shoal.errors import RemoteProtocolError
from shoal.events.links import ProtocolUnexpected, ProtocolViolated
from shoal.ids import PeerId
from shoal.log import FloodGate, failure
from shoal.runtime.file_limit import takes_connections
from shoal.runtime.process_info import resident_bytes
from shoal.swarm.view import PeerLabel
from shoal.transport.base import Endpoint, PeerLost, PeerUp, Received, TransportEvent
from shoal.wire.messages.control import MAX_COUNTERS, MAX_GAUGES, MAX_HISTOGRAMS, AskCounters, MetricReport, RunOver

_T = TypeVar("_T")

logger = logging.getLogger(__name__)


def measured(endpoint: Endpoint, label: PeerLabel | None, answer_to: int = 0) -> MetricReport:
    """Return all that this process has measured until now.

    Args:
        label: what it is called; None: whoever asks knows that.
    """
    metrics = endpoint.metrics
    metrics.gauge("process.start_time_seconds").set(metrics.began_unix_s)
    metrics.gauge("process.memory_bytes").set(resident_bytes())
    metrics.gauge("disk.failing", what="log").set(failure())
    metrics.gauge("process.crowded").set(not takes_connections())
    metrics.gauge("transport.received_bytes").set(endpoint.received_bytes)
    for traffic, count in endpoint.sent_bytes.items():
        metrics.gauge("transport.sent_bytes", traffic=str(traffic)).set(count)
    return MetricReport(
        role="" if label is None else label.role,
        counters=_first(metrics.counts(), MAX_COUNTERS),
        gauges=_first(metrics.gauges(), MAX_GAUGES),
        histograms=_first(metrics.histograms(), MAX_HISTOGRAMS),
        number=answer_to,
        host=None if label is None else label.host,
        index=None if label is None else label.index,
    )


def _first(values: dict[str, _T], most: int) -> dict[str, _T]:
    return dict(list(values.items())[:most])


class Handler(Protocol):
    """One protocol's end in this process. Whoever derives from it need not say that losses are nothing to it."""

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


class Rest(Handler):
    """Takes what no handler before it has taken, and does nothing with it: for a role that is about to end."""

    def receive(self, event: Received) -> bool:
        return True


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
            endpoint.post(event.peer, measured(endpoint, None, event.message.number))
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
