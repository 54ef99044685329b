"""Whether the swarm can be joined at the initial peers, looked at before anything is started there.

    how it is written -> name -> TCP connection -> what listens there -> TLS -> whose certificate it is

libp2p says only that it could not connect, half a minute later. Each step that can fail here is an error of its own,
with what to do about it. Nothing is trusted: a peer that passes is one that is worth joining, and libp2p proves who it
is; a peer whose address has a form that is not known here is left to libp2p as well.

See https://github.com/multiformats/multistream-select and https://github.com/libp2p/specs/blob/master/tls/tls.md.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSAttribute, TLSStream
from cryptography import x509

from shoal.clock import Clock, Deadline
from shoal.errors import BootstrapError, IdentityError
from shoal.identity import peer_id_of, public_key_of
from shoal.ids import PeerId
from shoal.transport.reach import DIAL_TIMEOUT_S, DialFailure, dial_failure
from shoal.transport.tls import UNREADABLE_CERTIFICATE

PATIENCE_S: Final = 3.0
"""What starts at this moment may not listen yet: so long it is tried again."""
_PAUSE_S: Final = 0.25
_ANSWER_TIMEOUT_S: Final = DIAL_TIMEOUT_S

_MADDR: Final = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d+)(?:/p2p/([^/]+))?/?")
_FAMILIES: Final = {"ip4": socket.AF_INET, "dns4": socket.AF_INET, "ip6": socket.AF_INET6, "dns6": socket.AF_INET6}

_KINDS: Final = frozenset({*_FAMILIES, "dns", "dnsaddr", "ip6zone", "memory", "onion", "onion3", "p2p", "unix"})
"""What an address of libp2p begins with."""

_AS_PRINTED: Final = (
    "take it as a whole, as the client's host has printed it: /ip4/203.0.113.7/tcp/50000/p2p/12D3KooW..."
)

_GREETING: Final = b"\x13/multistream/1.0.0\n"
_WANTED: Final = b"\x0b/tls/1.0.0\n"
_EXTENSION: Final = x509.ObjectIdentifier("1.3.6.1.4.1.53594.1.1")
# DER: a sequence of two byte strings. The first one is a protobuf with an Ed25519 key, type 1.
_SIGNED_KEY: Final = re.compile(rb"\x30.\x04\x24\x08\x01\x12\x20(.{32})\x04", re.DOTALL)
_SHOWN_BYTES: Final = 24
_MOST_TOLD: Final = 2
"""Of so few addresses each is named that does not answer."""
_RUN_UP: Final = "see whether the run is up there; its addresses of now: logs/<run_id>/initial_peers.txt on its hosts"


@dataclass(frozen=True)
class PeerAddress:
    """Where an initial peer listens.

    Attributes:
        peer: expected there; None: any peer.
    """

    maddr: str
    family: socket.AddressFamily
    host: str
    port: int
    peer: PeerId | None


@dataclass(frozen=True)
class Obstacle:
    """Why the swarm cannot be joined at an address: what was found there, and what to do about it."""

    maddr: str
    cause: str
    remedy: str


def listed(obstacles: Sequence[Obstacle]) -> str:
    """Return a text of all of them, in which what is to be done at several addresses stands once, below these."""
    lines: list[str] = []
    for remedy in dict.fromkeys(obstacle.remedy for obstacle in obstacles):
        for obstacle in obstacles:
            if obstacle.remedy == remedy:
                lines += (obstacle.maddr, f"  {obstacle.cause}")
        lines.append(f"  {remedy}")
    return "\n".join(lines)


async def require_reachable(
    maddrs: Sequence[str], clock: Clock, say: Callable[[str], None], *, patience_s: float = PATIENCE_S
) -> None:
    """Return if the swarm may be joined at one of the initial peers, and say what is wrong with the others.

    Raises:
        BootstrapError: the swarm can be joined at none of them. The message says why and what to do, for each.
    """
    deadline = Deadline.after(clock, patience_s)
    was_said = False
    while True:
        found = await look(maddrs)
        obstacles = [obstacle for obstacle in found if obstacle is not None]
        if len(obstacles) < len(found):
            if 0 < len(obstacles) <= _MOST_TOLD:
                for obstacle in obstacles:
                    say(f"{obstacle.maddr}: {obstacle.cause}")
            elif obstacles:
                # Peers come and go, and one that answers is enough.
                say(f"{len(obstacles)} of {len(found)} addresses do not answer: one that does is enough")
            say("the swarm answers; starting what joins it")
            return
        if deadline.expired() or all(obstacle.remedy == _AS_PRINTED for obstacle in obstacles):
            break
        if not was_said:
            say(f"{obstacles[0].cause}; trying again for {patience_s:.0f} s")
            was_said = True
        await clock.sleep_s(_PAUSE_S)
    raise BootstrapError(
        f"the swarm cannot be joined at {'the initial peer' if len(found) == 1 else 'any of the initial peers'}:\n"
        + listed(obstacles)
    )


async def look(maddrs: Sequence[str]) -> tuple[Obstacle | None, ...]:
    """Return for each address why the swarm cannot be joined there; None: it may be. All are looked at at once."""
    found: list[Obstacle | None] = [None] * len(maddrs)

    async def look_at(index: int, place: PeerAddress) -> None:
        found[index] = await _obstacle(place)

    async with anyio.create_task_group() as tasks:
        for index, maddr in enumerate(maddrs):
            found[index] = misspelt(maddr)
            if found[index] is None and (place := parse(maddr)) is not None:
                tasks.start_soon(look_at, index, place)
    return tuple(found)


def parse(maddr: str) -> PeerAddress | None:
    """Return what a multiaddress says, or None if it is of a form that is not known here."""
    match = _MADDR.fullmatch(maddr)
    if match is None or not 0 < int(match[3]) < 65536:
        return None
    peer = None if match[4] is None else PeerId(match[4])
    return PeerAddress(maddr, _FAMILIES.get(match[1], socket.AF_UNSPEC), match[2], int(match[3]), peer)


def misspelt(maddr: str) -> Obstacle | None:
    """Return what is wrong with how an address is written; None: nothing, or nobody here can tell."""
    place, kind = parse(maddr), maddr.removeprefix("/").partition("/")[0]
    cause = None
    if kind not in _KINDS:
        cause = f"no address begins with /{kind}"
    elif place is not None and kind in ("ip4", "ip6") and not _is_ip(place.host, int(kind[-1])):
        cause = f"{place.host} is no IPv{kind[-1]} address"
    elif place is not None and place.peer is not None and not _is_peer(place.peer):
        cause = f"{place.peer} is no peer id"
    return None if cause is None else Obstacle(maddr, cause, _AS_PRINTED)


def _is_ip(host: str, version: int) -> bool:
    try:
        return ip_address(host).version == version
    except ValueError:
        return False


def _is_peer(peer: PeerId) -> bool:
    try:
        public_key_of(peer)
    except IdentityError:
        return False
    return True


def unknown_name(place: PeerAddress) -> Obstacle:
    """Return what stands in the way where a name is not known on this host."""
    cause = f"the name {place.host} is not known on this host"
    return Obstacle(place.maddr, cause, "check how it is written, or give the address instead of the name")


async def _obstacle(place: PeerAddress) -> Obstacle | None:
    here = f"{place.host} port {place.port}"
    try:
        with anyio.fail_after(_ANSWER_TIMEOUT_S):
            known = await anyio.getaddrinfo(place.host, place.port, family=place.family, type=socket.SOCK_STREAM)
    except (socket.gaierror, TimeoutError, UnicodeError):
        return unknown_name(place)
    try:
        with anyio.fail_after(_ANSWER_TIMEOUT_S):
            # A name of which any kind of address will do may have several of them.
            host = place.host if place.family == socket.AF_UNSPEC else str(known[0][4][0])
            stream = await anyio.connect_tcp(host, place.port)
    except (TimeoutError, OSError) as error:
        return Obstacle(place.maddr, *_unconnected(here, place.port, error))
    async with stream:
        try:
            with anyio.fail_after(_ANSWER_TIMEOUT_S):
                there = await _peer_behind(stream)
        except TimeoutError:
            cause = f"{here}: something listens there and says nothing: a program that hangs, or another one than shoal"
            return Obstacle(place.maddr, cause, "see what runs there, and compare the port with the printed one")
        except (OSError, ssl.SSLError, anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead):
            cause = f"{here}: what listens there closes the connection: it may be ending, or another program than shoal"
            return Obstacle(place.maddr, cause, "see whether the run is up there, and compare the port")
    if isinstance(there, bytes):
        cause = f"{here}: another program than shoal listens there; it said {there!r}"
        return Obstacle(place.maddr, cause, "compare the port with the one that the client's host has printed")
    if place.peer is None or there in (None, place.peer):
        return None
    return Obstacle(
        place.maddr,
        f"{here}: another peer is there, {there}",
        "the address is of an earlier start, or of another run: take the one that the client's host prints now",
    )


def _unconnected(here: str, port: int, error: BaseException) -> tuple[str, str]:
    """Say why there is no connection, and what to do."""
    match failure := dial_failure(error):
        case DialFailure.NO_WAY:
            remedy = (
                "a private address (10., 172.16., 192.168.) means something in its own network only: then the client's "
                "host needs --public-ip and a forwarded port"
            )
        case DialFailure.SILENT:
            remedy = f"open TCP port {port} there and have it forwarded; {_RUN_UP}"
        case _:
            remedy = _RUN_UP
    return f"{here}: {failure}", remedy


async def _peer_behind(stream: ByteStream) -> PeerId | bytes | None:
    """Return who has the certificate of a libp2p program at the other end; None if it is not told this way.

    Of another program, what it has said.

    Raises:
        OSError, SSLError: the connection breaks; anyio's errors of streams likewise.
    """
    await stream.send(_GREETING + _WANTED)
    said = b""
    while said != _GREETING:
        said += await stream.receive(len(_GREETING) - len(said))
        if not _GREETING.startswith(said):
            return said[:_SHOWN_BYTES]
    # The answer to the second line may be a shorter one, which says no.
    length = await stream.receive(1)
    line = await BufferedByteReceiveStream(stream).receive_exactly(length[0])
    if length + line != _WANTED:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["libp2p"])
    tls = await TLSStream.wrap(stream, server_side=False, ssl_context=context, standard_compatible=False)
    return _peer_of(tls.extra(TLSAttribute.peer_certificate_binary))


def _peer_of(certificate: bytes | None) -> PeerId | None:
    """Return the peer whose key a libp2p certificate names; only a hint, so its signature is not checked."""
    if certificate is None:
        return None
    try:
        extension = x509.load_der_x509_certificate(certificate).extensions.get_extension_for_oid(_EXTENSION)
        value = extension.value
        found = _SIGNED_KEY.match(value.value) if isinstance(value, x509.UnrecognizedExtension) else None
        return None if found is None else peer_id_of(found[1])
    except (IdentityError, *UNREADABLE_CERTIFICATE):
        return None
