"""How much a connection may hold and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from shoal.runtime.memory import free_memory_bytes
from shoal.swarm.liveness import LEAST_HEARTBEATS
from shoal.wire.limits import MIB, WireLimits

if TYPE_CHECKING:
    from shoal.config.host import HealthConfig


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Limits of one endpoint.

    Attributes:
        piece_bytes: the part of a large tensor that goes to a connection's stream at a time. A control frame waits for
            one piece at most, and for what the socket holds.
        control_batch_bytes: the most control frames that go before the next piece.
        high_water_bytes: with more queued for a peer, `drained` waits.
        max_queued_bytes: with more queued, the peer is lost as "overloaded"; a single frame is always taken.
        max_unsent_bytes: with more of messages queued, their tensors not counted, the peer is lost in the same way.
        max_unsent_total_bytes: with more of them queued for all peers, the one that holds most is.
        max_unread_bytes: with more received than the consumer has taken, in memory, the connection is not read from.
        max_unread_total_bytes: with more unread over all connections, those that hold it are not read from.
        max_unfinished_total_bytes: with more of long frames that are not whole over all connections, the peer that
            holds most of it is lost.
        max_pooled_bytes: the most unused memory of received tensors that is kept for later ones.
        pool_trim_s: memory that was not needed for this time is given back.
        listen_again_s: so often is it looked whether the socket is still there at which this host's peers dial.
        max_connections: at a time, with and without a known peer; further connections are closed at once.
        max_handshaking: connections of strangers (in their handshake) at a time over TCP, and as many from this host.
            For a further one over TCP another one is closed (see `admission`); from this host it is closed itself.
        max_connections_per_peer: at a time, of a peer that has proven its identity; only one of them is used.
        dial_timeout_s: for one attempt to connect, including its handshake.
        handshake_timeout_s: for a peer that has dialled to say hello, including TLS.
        heartbeat_s: interval of heartbeats on an idle connection.
        deadline_s: silence after which a connection is closed.
        max_deadline_s: the same for a peer that is heard at irregular intervals; None: `deadline_s`.
        flush_timeout_s: how long closing waits for what is queued.
        socket_buffer_bytes: asked of the kernel for each Unix socket; it may give less.
    """

    wire: WireLimits = field(default_factory=WireLimits)
    piece_bytes: int = MIB // 4
    control_batch_bytes: int = MIB // 4
    high_water_bytes: int = 8 * MIB
    max_queued_bytes: int = 1024 * MIB
    max_unsent_bytes: int = 64 * MIB
    max_unsent_total_bytes: int = 1024 * MIB
    max_unread_bytes: int = 256 * MIB
    max_unread_total_bytes: int = 1024 * MIB
    max_unfinished_total_bytes: int = 1024 * MIB
    max_pooled_bytes: int = 256 * MIB
    pool_trim_s: float = 10.0
    listen_again_s: float = 5.0
    max_connections: int = 1024
    max_handshaking: int = 64
    max_connections_per_peer: int = 4
    dial_timeout_s: float = 5.0
    handshake_timeout_s: float = 5.0
    heartbeat_s: float = 0.25
    deadline_s: float = 2.0
    max_deadline_s: float | None = None
    flush_timeout_s: float = 1.0
    socket_buffer_bytes: int = MIB


DEFAULT_LIMITS: Final = TransportLimits()
_UNFINISHED_SHARE: Final = 4
"""One in so many bytes of a host's free memory: what is whole, and what is made of it, needs more than that."""
UNAWAITED_ROLES: Final = frozenset({"monitor"})
"""No step and no round waits for who has these: on connections with them heartbeats are as seldom as the deadline
allows."""


def limits_for(health: HealthConfig, role: str) -> TransportLimits:
    """Return the usual limits of a role on this host, with the heartbeats that the user wants.

    One of `UNAWAITED_ROLES` is woken as seldom as it has to say something: others of its host it finds dead a heartbeat
    or two later than others do.
    """
    seldom_s = health.deadline_s / LEAST_HEARTBEATS
    usual_bytes = DEFAULT_LIMITS.max_unfinished_total_bytes
    return TransportLimits(
        max_unfinished_total_bytes=max(usual_bytes, free_memory_bytes() // _UNFINISHED_SHARE),
        heartbeat_s=seldom_s if role in UNAWAITED_ROLES else health.heartbeat_s,
        deadline_s=health.deadline_s,
        max_deadline_s=health.longest_deadline_s,
    )
