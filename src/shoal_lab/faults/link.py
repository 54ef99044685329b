"""What an emulated link is like: each direction for itself, since links at home are asymmetrical."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Final

from shoal.errors import ConfigError

PACKET_BYTES: Final = 1448
"""What a TCP segment carries over Ethernet (1500 bytes less IPv4, TCP and timestamps)."""

_QUEUE_S: Final = 0.1
_MIN_QUEUE_BYTES: Final = 64 * 1024
_MAX_LOSS: Final = 0.5
# A receiver notices a gap by the packets behind it, which takes a moment even on the shortest link.
_NOTICE_S: Final = 0.01


class Direction(enum.Enum):
    """Which way bytes go."""

    OUTWARD = "from the dialler to the listener"
    INWARD = "from the listener to the dialler"


@dataclass(frozen=True, slots=True)
class LinkConditions:
    """One direction of a link.

    Attributes:
        delay_s: how long a byte is under way, one way.
        jitter_s: the most that is added at random; the order of bytes is kept, as TCP keeps it.
        loss: share of packets that get lost, at most 0.5. TCP repairs a loss after a round trip, and what came behind
            it waits: nothing arrives for `repair_s`, then everything at once.
        bytes_per_flip: mean distance of wrong bits that no checksum on the way has noticed.

    Raises:
        ConfigError: a value is out of its range.
    """

    rate_bytes_per_s: float = math.inf
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    bytes_per_flip: float = math.inf

    def __post_init__(self) -> None:
        times_hold = 0 <= self.delay_s < math.inf and 0 <= self.jitter_s < math.inf
        if not (self.rate_bytes_per_s > 0 and self.bytes_per_flip > 0 and times_hold):
            raise ConfigError(f"a link needs a rate above zero and finite times that are not negative: {self}")
        if not 0 <= self.loss <= _MAX_LOSS:
            raise ConfigError(f"a link that loses {self.loss:.0%} of its packets carries nothing; at most 50%")

    @property
    def repair_s(self) -> float:
        """How much later a lost packet arrives: TCP sends it again once the receiver has told of the gap."""
        return 2 * self.delay_s + _NOTICE_S

    @property
    def queue_bytes(self) -> float:
        """How much waits for the line before the sender is held up: 100 ms of the line, as home routers have."""
        return max(_MIN_QUEUE_BYTES, self.rate_bytes_per_s * _QUEUE_S)


@dataclass(frozen=True, slots=True)
class Link:
    """Both directions of a link, and the seed of all that is random on it."""

    outward: LinkConditions = LinkConditions()
    inward: LinkConditions = LinkConditions()
    seed: int = 0

    def conditions(self, direction: Direction) -> LinkConditions:
        """Return one direction."""
        return self.outward if direction is Direction.OUTWARD else self.inward

    @property
    def round_trip_s(self) -> float:
        """A round trip without jitter and queues."""
        return self.outward.delay_s + self.inward.delay_s


PERFECT: Final = Link()
"""Without limits, delays and faults."""
