"""Whether a peer can be dialled where it says, tried without becoming a connection of it; and why a dial has failed."""

from __future__ import annotations

import enum
import errno
import os
import ssl
from collections.abc import Sequence
from typing import Final

import anyio
from anyio.streams.tls import TLSAttribute

from shoal.errors import HandshakeError
from shoal.runtime.hardware import machine_name
from shoal.runtime.role import leaves
from shoal.transport.tcp import split_host_port
from shoal.transport.tls import TlsContexts, explained, peer_of
from shoal.wire.messages.base import Hop

DIAL_TIMEOUT_S: Final = 4.0
"""Linux says after 3 s that no machine has an address of the own network."""
MAX_DIALLED: Final = 4
"""Addresses of one peer."""
_TCP: Final = "tcp:"
_UNIX: Final = "unix:"


class DialFailure(enum.StrEnum):
    """Why there is no connection, in words."""

    REFUSED = "refused: that host is there, but nothing listens on the port"
    NO_WAY = "no way leads there: the host is off, or in a network that this one is not connected to"
    SILENT = "no answer: the host is off, or a firewall or router drops what is sent to it"


def dial_failure(error: BaseException) -> DialFailure | str:
    """Return what an error of connecting means; what the system says where it is none of the usual ones."""
    # Of several addresses of one name the first one that says something counts.
    causes = [each for each in leaves(error.__cause__ or error) if isinstance(each, OSError)]
    numbers = {each.errno for each in causes}
    if errno.ECONNREFUSED in numbers:
        return DialFailure.REFUSED
    if numbers & {errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}:
        return DialFailure.NO_WAY
    if isinstance(error, TimeoutError) or errno.ETIMEDOUT in numbers:
        return DialFailure.SILENT
    return next((each.strerror for each in causes if each.strerror), str(error))


async def why_unreachable(hop: Hop, contexts: TlsContexts) -> str:
    """Return why a peer can be dialled at none of its addresses, with a reason for each; empty: it can be dialled.

    Args:
        hop: the other end must prove to be this peer.
    """
    if _is_here(hop.addresses):
        return ""
    addresses = [address for address in hop.addresses if address.startswith(_TCP)][:MAX_DIALLED]
    reasons = dict.fromkeys(addresses, "")

    async def dial(address: str) -> None:
        reasons[address] = await _why_not(hop, address.removeprefix(_TCP), contexts)
        if not reasons[address]:
            tasks.cancel_scope.cancel()

    async with anyio.create_task_group() as tasks:
        for address in addresses:
            tasks.start_soon(dial, address)
    if not addresses:
        return "it names no address for other hosts"
    if not all(reasons.values()):
        return ""
    return "; ".join(f"{address.removeprefix(_TCP)}: {reason}" for address, reason in reasons.items())


def _is_here(addresses: Sequence[str]) -> bool:
    """Whether the peer has a socket of this user on this machine."""
    own = f"{_UNIX}{machine_name()}:"
    for address in addresses:
        if address.startswith(own):
            try:
                return os.stat(address.removeprefix(own)).st_uid == os.getuid()
            except (OSError, ValueError):
                return False
    return False


async def _why_not(hop: Hop, address: str, contexts: TlsContexts) -> str:
    try:
        host, port = split_host_port(address)
        with anyio.fail_after(DIAL_TIMEOUT_S):
            stream = await anyio.connect_tcp(
                host, port, tls=True, ssl_context=contexts.client, tls_standard_compatible=False
            )
    except ssl.SSLError as error:
        return str(explained(error))
    except (TimeoutError, OSError) as error:
        return str(dial_failure(error))
    except ValueError as error:
        return f"it is no address: {error}"
    except anyio.BrokenResourceError:
        return "whoever listens there closes the connection"
    async with stream:
        try:
            there = peer_of(stream.extra(TLSAttribute.peer_certificate_binary))
        except HandshakeError as error:
            return str(error)
    return "" if there == hop.peer else f"another peer is there, {there}"
