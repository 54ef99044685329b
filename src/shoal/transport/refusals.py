"""What this side refuses: counted by offence, logged with the offender, so that a flood of it fills no log."""

from __future__ import annotations

import logging

from shoal.errors import HandshakeError, Offence
from shoal.events.links import TransportRefused
from shoal.log import FloodGate
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.connection import Connection

logger = logging.getLogger(__name__)


class Refusals:
    """Takes note of every connection that this side refuses, or closes because its peer broke a rule."""

    def __init__(self, metrics: MetricRegistry) -> None:
        """Count in `metrics`, as `transport.refused` by offence."""
        self._metrics = metrics
        self._gate = FloodGate(logger)

    def note(self, connection: Connection, error: Exception) -> None:
        """Count and log one."""
        match error:
            case HandshakeError():
                offence = error.offence
            case OSError():
                offence = Offence.SOCKET
            case _:
                offence = Offence.FRAME
        self._metrics.counter("transport.refused", offence=offence.value).add()
        # A host may have many names, a peer only one.
        peer = connection.peer or connection.proven or connection.dialled
        refused = TransportRefused(peer, connection.source, offence.value, str(error))
        self._gate.emit(refused, peer or connection.source)
