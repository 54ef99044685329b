"""How much a connection may hold and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from shoal.wire.limits import MIB, WireLimits


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Limits of one endpoint.

    Attributes:
        wire: of each frame.
        high_water_bytes: with more queued for a peer, `drained` waits.
        max_queued_bytes: with more queued, the peer is lost as "overloaded"; one frame alone is always taken.
        max_unread_bytes: with more received than the consumer has taken, the connection is not read from.
        max_handshaking: connections that may be in their handshake at a time; further ones are closed at once.
        dial_timeout_s: seconds for one attempt to connect, its handshake included.
        handshake_timeout_s: seconds for a peer that has dialled to say hello.
        flush_timeout_s: seconds that closing waits for what is queued.
        socket_buffer_bytes: asked of the kernel for each socket; it may give less.
    """

    wire: WireLimits = field(default_factory=WireLimits)
    high_water_bytes: int = 8 * MIB
    max_queued_bytes: int = 1024 * MIB
    max_unread_bytes: int = 256 * MIB
    max_handshaking: int = 64
    dial_timeout_s: float = 5.0
    handshake_timeout_s: float = 5.0
    flush_timeout_s: float = 1.0
    socket_buffer_bytes: int = MIB


DEFAULT_LIMITS: Final = TransportLimits()
