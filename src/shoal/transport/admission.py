"""Who may open a connection: limits on strangers, so that none of them keeps peers or each other out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import anyio

from shoal.errors import HandshakeError, Offence
from shoal.ids import PeerId
from shoal.transport.connection import Connection
from shoal.transport.limits import TransportLimits


class Admission:
    """Counts the connections of one endpoint. Those from this host and those over TCP do not compete for places."""

    def __init__(self, limits: TransportLimits) -> None:
        self._limits = limits
        self._open: set[Connection] = set()
        self._strangers: set[Connection] = set()

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Every connection whose socket is connected."""
        return tuple(self._open)

    def connected(self, connection: Connection) -> None:
        """Count a connection from now on; one that this side has dialled is never refused.

        Raises:
            HandshakeError: there are too many.
        """
        self._open.add(connection)
        if connection.dialled is not None:
            return
        if len(self._open) > self._limits.max_connections:
            raise HandshakeError(f"{self._limits.max_connections} connections are open already", Offence.CROWDED)
        sources = Counter(stranger.source for stranger in self._strangers)
        from_host, from_others = sources.pop("", 0), sources.total()
        if (from_others if connection.source else from_host) >= self._limits.max_handshaking:
            raise HandshakeError(
                f"{self._limits.max_handshaking} connections are in their handshake already", Offence.CROWDED
            )
        if connection.source and sources[connection.source] >= self._limits.max_handshaking_per_host:
            raise HandshakeError(
                f"{self._limits.max_handshaking_per_host} connections from {connection.source} are in their handshake "
                "already",
                Offence.CROWDED,
            )
        self._strangers.add(connection)

    def proven(self, peer: PeerId) -> None:
        """Check a connection whose peer has proven its identity, and that counts already.

        Raises:
            HandshakeError: that peer has too many.
        """
        if sum(connection.proven == peer for connection in self._open) > self._limits.max_connections_per_peer:
            raise HandshakeError(
                f"{peer} has {self._limits.max_connections_per_peer} connections already", Offence.CROWDED
            )

    def introduced(self, connection: Connection) -> None:
        """Count the connection as a stranger's no more."""
        self._strangers.discard(connection)

    def ended(self, connection: Connection) -> None:
        """Count the connection no more."""
        self._open.discard(connection)
        self._strangers.discard(connection)

    async def await_hello(self, connection: Connection, on_late: Callable[[Connection, HandshakeError], None]) -> None:
        """Report a connection whose peer does not introduce itself in time, however busily it sends."""
        with anyio.move_on_after(self._limits.handshake_timeout_s):
            await connection.settled.wait()
        if not connection.settled.is_set():
            on_late(connection, HandshakeError(f"no hello within {self._limits.handshake_timeout_s:g} s", Offence.SLOW))
