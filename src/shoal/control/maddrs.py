"""Multiaddresses of DHT nodes: which mean something on other hosts; ports, refused if taken, kept over a restart."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence

from shoal.errors import ConfigError

_LOOPBACK = ("/ip4/127.", "/ip6/::1/")


def is_loopback(maddr: str) -> bool:
    """Whether an address means this very host."""
    return maddr.startswith(_LOOPBACK)


def peer_in(maddr: str) -> str:
    """The id of the peer that a multiaddress of a DHT node ends with; empty if it ends with none."""
    _, ends_with_id, peer = maddr.rpartition("/p2p/")
    return peer if ends_with_id else ""


def outward(maddrs: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses that mean something on other hosts; all of them if none does."""
    found = tuple(maddr for maddr in maddrs if not is_loopback(maddr))
    return found or tuple(maddrs)


def check_port_free(maddr: str) -> None:
    """Refuse a TCP port that somebody listens on: p2pd would share it (SO_REUSEPORT) and get half of the connections.

    Raises:
        ConfigError: the port is taken.
    """
    parts = maddr.split("/")
    if (
        len(parts) < 5
        or parts[1] not in ("ip4", "ip6")
        or parts[3] != "tcp"
        or not parts[4].isdecimal()
        or parts[4] == "0"
    ):
        return
    with socket.socket(socket.AF_INET if parts[1] == "ip4" else socket.AF_INET6, socket.SOCK_STREAM) as probe:
        # Connections of a run that has just ended do not count as somebody who listens.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((parts[2], int(parts[4])))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return  # p2pd says more about an address that is not ours
            raise ConfigError(
                f"cannot listen on {maddr}: port {parts[4]} is taken; choose another one, or 0 for any"
            ) from error


def pinned(host_maddrs: Sequence[str], visible: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses to listen on with the ports of `visible` in place of any free ones (port 0)."""
    ports = {maddr.split("/")[1]: maddr.split("/")[4] for maddr in visible if "/tcp/" in maddr}

    def pin(maddr: str) -> str:
        port = ports.get(maddr.split("/")[1])
        return maddr if port is None or not maddr.endswith("/tcp/0") else f"{maddr.removesuffix('0')}{port}"

    return tuple(pin(maddr) for maddr in host_maddrs)
