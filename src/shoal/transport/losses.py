"""The losses of an endpoint's peers: each reported once, counted, and in force until the consumer has heard of it."""

from __future__ import annotations

import enum
import logging
from collections import Counter

from shoal.events.base import emit
from shoal.events.links import TransportLost
from shoal.ids import PeerId
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.base import PeerLost
from shoal.transport.event_queue import EventQueue

logger = logging.getLogger(__name__)


class Loss(enum.StrEnum):
    """What ended a connection, or the attempt to make one: what losses are counted by."""

    CLOSED = "closed"
    UNREACHABLE = "unreachable"
    SILENT = "silent"
    OVERLOADED = "overloaded"
    REPLACED = "replaced"
    DISCONNECTED = "disconnected"


class Losses:
    """Puts `PeerLost` events into the queue of an endpoint."""

    def __init__(self, events: EventQueue, metrics: MetricRegistry) -> None:
        """Start without any.

        Args:
            metrics: counts `transport.lost` by cause.
        """
        self._events = events
        self._metrics = metrics
        self._untaken: Counter[PeerId] = Counter()
        self._leaving: set[PeerId] = set()
        self._gone: set[PeerId] = set()

    def report(self, peer: PeerId, reason: str, cause: Loss, silent_s: float = 0.0, still_s: float = 0.0) -> None:
        """Say that a peer is lost; see `PeerLost`."""

        def taken() -> None:
            self._untaken[peer] -= 1
            if not self._untaken[peer]:
                del self._untaken[peer]

        self._metrics.counter("transport.lost", cause=cause.value).add()
        emit(logger, TransportLost(peer, reason, cause.value))
        if peer in self._leaving:
            self._gone.add(peer)
        self._untaken[peer] += 1
        self._events.put(PeerLost(peer, reason, silent_s, still_s), taken)

    def pending(self, peer: PeerId) -> bool:
        """Whether what is posted to a peer is dropped: a loss of it was not taken yet, or it has left."""
        return peer in self._untaken or peer in self._gone

    def leaves(self, peer: PeerId) -> None:
        """A peer has said that it ends: when its connection has ended as well, nobody is to look for it."""
        self._leaving.add(peer)

    def up(self, peer: PeerId) -> None:
        """There is a new connection with a peer, so it has not left."""
        self._leaving.discard(peer)
        self._gone.discard(peer)
