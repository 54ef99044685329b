"""Where the roles of one host listen for other hosts, and under which addresses those reach them."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

from shoal.config.host import MAX_PORT, NetworkConfig
from shoal.control.maddrs import is_loopback
from shoal.errors import ConfigError
from shoal.transport.tcp import ANY_6, join_host_port, own_hosts

USUAL_MONITOR_PORT: Final = 50000
LOOPBACK_MADDRS: Final = ("/ip4/127.0.0.1/tcp/0",)
_ANY_4, _ANY_MADDR_6 = "/ip4/0.0.0.0/tcp/", "/ip6/::/tcp/"
_HERE: Final = {
    "/ip4/127.0.0.1": (_ANY_4, "/ip4/127.0.0.1/tcp/"),
    "/ip6/::1": (_ANY_MADDR_6, "/ip6/::1/tcp/"),
}
"""Where this host reaches itself, and what else is listened on then."""


@dataclass(frozen=True)
class HostNetwork:
    """The addresses of a host's roles.

    A role is known by its place among those of the host that listen: where ports are fixed, place n takes the n-th port
    after the first.
    """

    settings: NetworkConfig

    def listen_tcp(self, place: int) -> tuple[str, int]:
        """Return address and port on which the role at `place` listens for tensors.

        Raises:
            ConfigError: the ports after the first one do not suffice.
        """
        port = self.settings.data_port
        maddrs = self._listened
        by_6 = any(maddr.startswith("/ip6/") for maddr in maddrs)
        if all(map(is_loopback, maddrs)):
            host = "::1" if all(maddr.startswith("/ip6/") for maddr in maddrs) else "127.0.0.1"
        else:
            host = ANY_6 if by_6 else "0.0.0.0"
        return (host, _port(port, place, f"network.data_port = {port}") if port else 0)

    def announce(self, place: int) -> tuple[str, ...]:
        """Return where other hosts reach the role at `place`: a host, with the port if a router forwards another one.

        Empty for the addresses of this host's interfaces.

        Raises:
            ConfigError: the ports after the first one do not suffice.
        """
        host, port = self.settings.public_ip, self.settings.announce_data_port
        if not host:
            return ()
        if not port:
            return (host,)
        return (join_host_port(host, _port(port, place, f"network.announce_data_port = {port}")),)

    def dht(self, place: int) -> NetworkConfig:
        """Return the section for the DHT node of the role at `place`.

        Raises:
            ConfigError: the ports after the first one do not suffice.
        """
        return self._with(tuple(_shifted(maddr, place) for maddr in self._listened), place)

    def monitor(self, claim: Callable[[int], bool]) -> NetworkConfig:
        """Return the section for the first peer. Its port is fixed now, so that others can be told of it.

        Args:
            claim: as `RunDir.claim_port`; a run that starts before this one listens would otherwise take the same port.
        """
        wanted = self.settings.monitor_port or free_port(USUAL_MONITOR_PORT if claim(USUAL_MONITOR_PORT) else 0)
        listened = tuple(
            f"{maddr.removesuffix('/tcp/0')}/tcp/{wanted}" if maddr.endswith("/tcp/0") else maddr
            for maddr in self._listened
        )
        return self._with(listened, 0)

    def _with(self, listened: tuple[str, ...], place: int) -> NetworkConfig:
        announced = tuple(_shifted(maddr, place) for maddr in self.settings.announce_maddrs)
        ports = [maddr.partition("/tcp/")[2].partition("/")[0] for maddr in listened]
        if self.settings.public_ip and not announced:
            # Nobody outside knows a port that the system chooses: such a role is found through the others.
            where = _host_maddr(self.settings.public_ip)
            announced = tuple(f"{where}/tcp/{port}" for port in dict.fromkeys(ports) if port != "0")
        return self.settings.model_copy(update={"host_maddrs": listened, "announce_maddrs": announced})

    @property
    def _listened(self) -> tuple[str, ...]:
        """Where DHT nodes listen: all interfaces are meant by IPv6 where this host has nothing else, and by both where
        others know it by such an address."""
        listened = self.settings.host_maddrs
        if not any(maddr.startswith(_ANY_4) for maddr in listened) or not socket.has_dualstack_ipv6():
            return listened
        by_6 = tuple(maddr.replace(_ANY_4, _ANY_MADDR_6) for maddr in listened)
        if ":" in own_hosts()[0]:
            return tuple(dict.fromkeys(by_6))
        return tuple(dict.fromkeys((*listened, *by_6))) if ":" in (self.settings.public_ip or "") else listened


def local_maddrs(monitor: NetworkConfig, peer_id: str) -> tuple[str, ...]:
    """Return where roles of this host find the monitor, also if the network does not lead them back to it."""
    found = [
        f"{here}/tcp/{maddr.rpartition('/')[2]}"
        for maddr in monitor.host_maddrs
        for here, meant in _HERE.items()
        if maddr.startswith(meant)
    ]
    return tuple(f"{maddr}/p2p/{peer_id}" for maddr in found if not maddr.endswith("/tcp/0"))


def free_port(wanted: int) -> int:
    """Return `wanted`, or any free TCP port if it is 0 or somebody has it."""
    with suppress(OSError), socket.socket() as probe:
        # Connections of a run that has just ended do not count as somebody who listens.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", wanted))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])
    return 0


def _shifted(maddr: str, by: int) -> str:
    """Return a multiaddress with a port that is larger by `by`, unless it is any free one.

    Raises:
        ConfigError: there is no such port.
    """
    before, separator, rest = maddr.partition("/tcp/")
    port, slash, after = rest.partition("/")
    if not separator or not port.isdecimal() or port == "0":
        return maddr
    return f"{before}/tcp/{_port(int(port), by, maddr)}{slash}{after}"


def _port(first: int, place: int, origin: str) -> int:
    if first + place > MAX_PORT:
        raise ConfigError(
            f"{origin}: role {place + 1} of this host would need port {first + place}; give a lower first port, or 0"
        )
    return first + place


def _host_maddr(host: str) -> str:
    try:
        return f"/ip{ip_address(host).version}/{host}"
    except ValueError:
        return f"/dns4/{host}"
