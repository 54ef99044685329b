"""TCP between hosts, always under TLS: listening, dialling, and the addresses to announce."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError
from shoal.runtime.linux_calls import LinuxCall, has
from shoal.transport.connection import Connection
from shoal.transport.rests import Rests
from shoal.transport.tls import TlsContexts
from shoal.transport.tls_stream import TlsStream
from shoal.transport.uplink import Uplink

_SCHEME: Final = "tcp:"
_BACKLOG: Final = 128
_KEEPALIVE_IDLE_S: Final = 1
# macOS has the second name for the same.
_KEEPALIVE_IDLE: Final = getattr(socket, "TCP_KEEPIDLE", getattr(socket, "TCP_KEEPALIVE", None))
_KEEPALIVE_INTERVAL_S: Final = 1
_KEEPALIVE_PROBES: Final = 3
_UNSENT_BYTES: Final = 128 * 1024
_CONGESTION_CONTROL: Final = b"bbr"
"""It takes the rate that the link has for its measure, not the packets that are lost (Cardwell et al., ACM Queue 2016):
at 20 Mbit/s, 150 ms and 0.5 % loss it brings 12 times what cubic does."""
ANY_6: Final = "::"
"""Listens on all addresses of this host, of both kinds."""
_WILDCARDS: Final = ("0.0.0.0", ANY_6)
_UNKNOWN: Final = "0.0.0.0"
_ELSEWHERE: Final = ("192.0.2.1", 9)
"""Of nobody (RFC 5737)."""
_ELSEWHERE_6: Final = ("2001:db8::1", 9)
"""Likewise (RFC 3849)."""
# From <linux/sockios.h>: the IPv4 address of a network interface.
_SIOCGIFADDR: Final = 0x8915
_ADDRESSES_6: Final = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE: Final = 0x00
# From <linux/if_addr.h>: not to be used, or not any more.
_FAILED, _DEPRECATED, _TENTATIVE = 0x08, 0x20, 0x40


class TcpCarrier:
    """A `Carrier` of `tcp:host:port`."""

    scheme = _SCHEME

    def __init__(
        self,
        contexts: TlsContexts,
        *,
        listen_on: tuple[str, int] | None,
        announce: Sequence[str],
        uplink: Uplink,
    ) -> None:
        """Remember what to do; nothing is opened yet.

        Args:
            listen_on: address (0.0.0.0: all interfaces; `::`: also by IPv6) and port (0: any free one); None: only
                dials.
            announce: hosts, or `host:port`, under which others reach this one; empty: the addresses listened on.
            uplink: decides which connection sends tensors next.
        """
        self._contexts = contexts
        self._listen_on = listen_on
        self._announce = tuple(announce)
        self._uplink = uplink
        self._rests = Rests()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._hosts: tuple[str, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        if self._server is None:
            return ()
        return tuple(_SCHEME + _with_port(host, self._port) for host in self._announce or self._reached())

    async def listen(self, make: Callable[[], Connection]) -> None:
        if self._listen_on is None:
            return
        host, port = self._listen_on

        def accept() -> TlsStream:
            connection = make()
            connection.prepare = partial(self._prepare, connection)
            connection.leave_by(self._uplink)
            return TlsStream(connection, self._contexts.server, self._rests, server_side=True)

        loop = asyncio.get_running_loop()
        try:
            if host == ANY_6:
                self._server = await loop.create_server(accept, sock=_bound_to_both(port), backlog=_BACKLOG)
            else:
                self._server = await loop.create_server(accept, host, port, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigError(f"cannot listen on {join_host_port(host, port)}: {error.strerror or error}") from error
        self._port = int(self._server.sockets[0].getsockname()[1])

    async def connect(self, address: str, connection: Connection) -> None:
        host, port = split_host_port(address.removeprefix(_SCHEME))
        connection.prepare = partial(self._prepare, connection)
        connection.leave_by(self._uplink)
        loop = asyncio.get_running_loop()
        await loop.create_connection(
            lambda: TlsStream(connection, self._contexts.client, self._rests, server_side=False), host, port
        )

    async def listen_again(self) -> None:
        """Nobody can remove a port."""

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    def _reached(self) -> tuple[str, ...]:
        """Return the addresses of this host, which its network may change at any time."""
        host = "" if self._listen_on is None else self._listen_on[0]
        found = own_hosts(also_6=host == ANY_6) if host in _WILDCARDS else (host,)
        # Without a network it will most likely be again where it was.
        if not self._hosts or not all(map(_is_loopback, found)):
            self._hosts = found
        return self._hosts

    def _prepare(self, connection: Connection, sock: socket.socket) -> None:
        """Note where the other end is, and set the socket's options.

        No TCP_USER_TIMEOUT: Linux also ends connections by it whose other end is alive and only reads too slowly (its
        window is closed for that long). Heartbeats tell the two apart; keepalive is for what has none, such as a
        handshake. The sizes of the buffers are left to the kernel, which follows the link's bandwidth and delay; but
        what it holds beyond what is under way cannot be overtaken any more, so that is bounded. Where the system does
        not have BBR, or does not allow it to this user, its own congestion control stays.
        """
        # It may be gone already; it is none of this host's all the same, which have places of their own.
        connection.source = _UNKNOWN
        with suppress(OSError):
            connection.source = str(sock.getpeername()[0])
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        if hasattr(socket, "TCP_CONGESTION"):
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _CONGESTION_CONTROL)
        if _KEEPALIVE_IDLE is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _KEEPALIVE_IDLE, _KEEPALIVE_IDLE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(text: str) -> tuple[str, int]:
    """Return host and port of `host:port` or `[IPv6]:port`.

    Raises:
        OSError: it is neither.
    """
    host, _, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    host = host[1:-1] if bracketed else host
    is_port = len(port) <= 5 and port.isascii() and port.isdecimal() and 0 < int(port) < 65536
    if not host or not is_port or (":" in host and not bracketed):
        raise OSError(f"{text!r} is not host:port")
    return host, int(port)


def _with_port(announced: str, port: int) -> str:
    """Return `announced` with the port, unless it names one."""
    try:
        return join_host_port(*split_host_port(announced))
    except OSError:
        return join_host_port(announced, port)


def own_hosts(*, also_6: bool = False) -> tuple[str, ...]:
    """Return the addresses of this host's interfaces: those of IPv4, or of IPv6 if there are no others; the loopback
    one only if there is none.

    First the one of the way out: bridges of containers lead nobody here, and there may be more than a peer can name.

    Args:
        also_6: those of both kinds.
    """
    found = _outside(_interface_addresses(), _way_out(socket.AF_INET, _ELSEWHERE))
    if also_6 or not found:
        found6 = _outside(_interface_addresses_6(), _way_out(socket.AF_INET6, _ELSEWHERE_6))
        found = [*found[:1], *found6[:1], *found[1:], *found6[1:]]
    return tuple(found) or ("127.0.0.1",)


def _outside(hosts: Sequence[str], way_out: str) -> list[str]:
    return sorted((host for host in hosts if not _is_loopback(host)), key=lambda host: host != way_out)


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _way_out(family: socket.AddressFamily, elsewhere: tuple[str, int]) -> str:
    """Return the address from which this host would send to others; empty: to none. Nothing is sent."""
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(elsewhere)
        return str(probe.getsockname()[0])
    return ""


def _interface_addresses() -> list[str]:
    if not has(LinuxCall.INTERFACE_ADDRESS):
        from shoal.runtime.by_psutil import own_addresses

        return own_addresses(socket.AF_INET)
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                found.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]))
    return found


def _interface_addresses_6() -> list[str]:
    """Return the addresses that mean the same on other hosts: none that is of one link alone."""
    if not has(LinuxCall.INTERFACE_ADDRESS):
        from shoal.runtime.by_psutil import own_addresses

        found = (address for address in own_addresses(socket.AF_INET6) if "%" not in address)
        return [address for address in found if not ip_address(address).is_link_local]
    with suppress(OSError):  # a system without IPv6
        lines = [line.split() for line in _ADDRESSES_6.read_text().splitlines()]
        return [
            str(IPv6Address(bytes.fromhex(digits)))
            for digits, _, _, scope, flags, *_ in lines
            if int(scope, 16) == _GLOBAL_SCOPE and not int(flags, 16) & (_FAILED | _DEPRECATED | _TENTATIVE)
        ]
    return []


def _bound_to_both(port: int) -> socket.socket:
    """Return a socket that takes connections by IPv6 and IPv4: asyncio's own takes those of one alone.

    Raises:
        OSError: the port is taken, or the system has no IPv6.
    """
    sock = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((ANY_6, port))
    except OSError:
        sock.close()
        raise
    return sock
