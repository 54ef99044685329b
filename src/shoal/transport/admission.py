"""Who may open a connection: limits on strangers and peers, so that none of them keeps peers or each other out.

When all places over TCP are taken, a newcomer has that of another: of those whose peer has not proven its identity, the
one that has waited longest, of the address that has most, the newcomer counted. So whoever floods pushes out his own
connections, and a peer, which holds its place for one round trip, is through before it would be its turn.

When as many connections are open as may be, those of peers among them, it is the same: a newcomer has the place of the
newest of the address that has most, unless that is its own or has no more than it. So whoever has the key and comes
under many names from few addresses keeps nobody out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address

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
        # The networks that each comes from; the one that has waited longest is the first.
        self._strangers: dict[Connection, tuple[bytes, ...]] = {}
        # The same of all that others have dialled.
        self._networks: dict[Connection, tuple[bytes, ...]] = {}

    @property
    def connections(self) -> tuple[Connection, ...]:
        """Every connection whose socket is connected."""
        return tuple(self._open)

    def connected(self, connection: Connection) -> Connection | None:
        """Count a connection from now on; one that this side has dialled is never refused.

        Returns:
            The one that makes way for it, and has no place any more: the caller ends it. None: a place was free.

        Raises:
            HandshakeError: there are too many, and none of them makes way.
        """
        self._open.add(connection)
        if connection.dialled is not None:
            return None
        networks = _networks_of(connection.source)
        leaving = self._making_way(connection.source, networks)
        if leaving is None and len(self._open) > self._limits.max_connections:
            leaving = self._crowding(networks)
        if leaving is not None:
            self._strangers.pop(leaving, None)
            self._networks.pop(leaving)
        self._strangers[connection] = self._networks[connection] = networks
        return leaving

    def _crowding(self, networks: tuple[bytes, ...]) -> Connection:
        """Return the connection of which its address has too many for a newcomer to be kept out. Raises as `connected`
        does."""
        held = Counter(networks)
        for each in self._networks.values():
            held.update(each)
        newest_first = reversed(self._networks.items())
        leaving, most = max(newest_first, key=lambda each: [held[network] for network in each[1]], default=(None, ()))
        if leaving is None or [held[network] for network in most] <= [held[network] for network in networks]:
            raise HandshakeError(f"{self._limits.max_connections} connections are open already", Offence.CROWDED)
        return leaving

    def _making_way(self, source: str, networks: tuple[bytes, ...]) -> Connection | None:
        """Return the stranger whose place a newcomer takes; None: one is free. Raises as `connected` does."""
        rivals = [stranger for stranger in self._strangers if bool(stranger.source) == bool(source)]
        if len(rivals) < self._limits.max_handshaking:
            return None
        # Those of this host are the same user's: of too many, the first ones get through their handshake.
        unproven = [stranger for stranger in rivals if stranger.source and stranger.proven is None]
        if not unproven:
            raise HandshakeError(
                f"{self._limits.max_handshaking} connections are in their handshake already", Offence.CROWDED
            )
        held = Counter(networks)
        for stranger in rivals:
            held.update(self._strangers[stranger])
        # Of equals `max` returns the first one, which has waited longest.
        return max(unproven, key=lambda stranger: [held[network] for network in self._strangers[stranger]])

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
        self._strangers.pop(connection, None)

    def ended(self, connection: Connection) -> None:
        """Count the connection no more."""
        self._open.discard(connection)
        self._strangers.pop(connection, None)
        self._networks.pop(connection, None)

    async def await_hello(self, connection: Connection, on_late: Callable[[Connection, HandshakeError], None]) -> None:
        """Report a connection whose peer does not introduce itself in time, however busily it sends."""
        with anyio.move_on_after(self._limits.handshake_timeout_s):
            await connection.settled.wait()
        if connection in self._strangers:
            on_late(connection, HandshakeError(f"no hello within {self._limits.handshake_timeout_s:g} s", Offence.SLOW))


def _networks_of(source: str) -> tuple[bytes, ...]:
    """Return by which prefixes an address is counted: what one subscriber has, then what surrounds it; none of this
    host.

    An address of IPv4 and its /24; of IPv6 the /64, within which a host may call itself what it likes, and the /48.
    """
    if not source:
        return ()
    address = ip_address(source)
    # As a socket for both kinds has an address of IPv4.
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    packed = (mapped or address).packed
    return (packed, packed[:3]) if len(packed) == 4 else (packed[:8], packed[:6])
