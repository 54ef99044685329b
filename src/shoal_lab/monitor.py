"""The monitor of a cluster: it keeps what it is sent."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.wire.messages.control import Metrics, Noted, PeerMetrics


class Monitor:
    """Keeps what the client sends. A `transport.dispatch.Handler`.

    Attributes:
        values: numbers of the run, in the order of their arrival.
        num_steps: of how many steps they tell; some are told together.
        noted: lines of `events.jsonl`, likewise.
    """

    def __init__(self) -> None:
        self.values: list[Mapping[str, float]] = []
        self.num_steps = 0
        self.noted: list[str] = []

    def receive(self, event: Received) -> bool:
        """Take numbers and events."""
        match event.message:
            case Metrics(values=values, steps=steps):
                self.values.append(values)
                self.num_steps += steps if "loss/train" in values else 0
            case Noted(line=line):
                self.noted.append(line)
            case PeerMetrics():
                pass
            case _:
                return False
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """Nothing depends on anybody."""
