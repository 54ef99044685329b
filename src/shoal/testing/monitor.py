"""The monitor of a cluster: it keeps what it is sent."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.wire.messages.control import Metrics


class Monitor:
    """Keeps the numbers that the client sends. A `transport.dispatch.Handler`.

    Attributes:
        values: in the order of their arrival.
    """

    def __init__(self) -> None:
        self.values: list[Mapping[str, float]] = []

    def receive(self, event: Received) -> bool:
        """Take numbers."""
        if isinstance(event.message, Metrics):
            self.values.append(event.message.values)
            return True
        return False

    def peer_lost(self, peer: PeerId) -> None:
        """Nothing depends on anybody."""
