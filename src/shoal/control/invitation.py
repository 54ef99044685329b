"""One text by which another host joins a swarm: `shoal invite` prints it, `shoal join` takes it.

    shoal1: base32( msgpack(prefix, key, expiry, addresses by peer), first bytes of its SHA-256 )

It holds the swarm's key. Whoever has read it is a member for good: the expiry only keeps an old one from being taken by
mistake, and the checksum one that was not copied whole.
"""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec

from shoal.errors import MALFORMED, ConfigError
from shoal.identity import KEY_BYTES
from shoal.ids import PREFIX_PATTERN

MARK: Final = "shoal1:"
MAX_PEERS: Final = 5
"""Addresses that are named: one that answers is enough."""
_CHECKSUM_BYTES: Final = 5
_MAX_CHARACTERS: Final = 2000
_PEER: Final = "/p2p/"


class Invitation(msgspec.Struct, frozen=True):
    """What a host needs to join a swarm.

    Attributes:
        experiment_prefix: the name of its runs.
        swarm_key: 32 bytes, the secret of its members.
        initial_peers: multiaddresses of members, with their peer ids.
        expires_unix_s: in whole seconds.
    """

    experiment_prefix: str
    swarm_key: bytes
    initial_peers: tuple[str, ...]
    expires_unix_s: int


_Peer = Annotated[str, msgspec.Meta(max_length=200, pattern=r"^[A-Za-z0-9]+\Z")]
_Where = Annotated[str, msgspec.Meta(max_length=200, pattern=r"^/[A-Za-z0-9._/:%-]+\Z")]


class _Body(msgspec.Struct, frozen=True, array_like=True):
    """What is written: a peer once, with all of its addresses. Nothing in it can mean more than it says: what begins
    with an @ would be the name of a file."""

    experiment_prefix: Annotated[str, msgspec.Meta(pattern=PREFIX_PATTERN)]
    swarm_key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    expires_unix_s: Annotated[int, msgspec.Meta(ge=0)]
    addresses: Annotated[dict[_Peer, list[_Where]], msgspec.Meta(min_length=1, max_length=MAX_PEERS)]


def written(invitation: Invitation) -> str:
    """Return the text of an invitation, with at most `MAX_PEERS` addresses.

    Raises:
        ConfigError: an address has no peer id.
    """
    addresses: dict[str, list[str]] = {}
    for maddr in invitation.initial_peers[:MAX_PEERS]:
        where, mark, peer = maddr.rpartition(_PEER)
        if not mark:
            raise ConfigError(f"{maddr} does not say which peer is there: it ends with {_PEER}<peer id>")
        addresses.setdefault(peer, []).append(where)
    body = msgspec.msgpack.encode(
        _Body(invitation.experiment_prefix, invitation.swarm_key, invitation.expires_unix_s, addresses)
    )
    return MARK + base64.b32encode(body + _checksum(body)).decode().rstrip("=").lower()


def read(text: str, now_unix_s: float) -> Invitation:
    """Return what a text says; blanks and line ends in it mean nothing.

    Raises:
        ConfigError: it is no invitation, is not whole, is of another version, or has expired. The message repeats
            nothing of it: it is a secret.
    """
    text = "".join(text.split())
    if not text.startswith(MARK):
        other = re.match(r"shoal\d+:", text)
        raise ConfigError(
            "the invitation is of another version of shoal: install the same one on both hosts"
            if other
            else f"this is no invitation: it begins with {MARK}, and `shoal invite` prints it on a host of the swarm"
        )
    if len(text) > _MAX_CHARACTERS:
        raise ConfigError("this is no invitation: it is too long")
    encoded = text.removeprefix(MARK).upper()
    try:
        whole = base64.b32decode(encoded + "=" * (-len(encoded) % 8))
        body, checksum = whole[:-_CHECKSUM_BYTES], whole[-_CHECKSUM_BYTES:]
        if checksum != _checksum(body):
            raise ValueError
        found = msgspec.msgpack.decode(body, type=_Body)
    except MALFORMED as error:
        raise ConfigError("the invitation is not whole: copy all of it, from the mark to the last letter") from error
    if now_unix_s > found.expires_unix_s:
        at = datetime.fromtimestamp(found.expires_unix_s, UTC)
        raise ConfigError(
            f"the invitation has expired at {at:%Y-%m-%d %H:%M} UTC: ask for another one (`shoal invite`)"
        )
    peers = tuple(f"{where}{_PEER}{peer}" for peer, each in found.addresses.items() for where in each)
    return Invitation(found.experiment_prefix, found.swarm_key, peers, found.expires_unix_s)


def _checksum(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:_CHECKSUM_BYTES]
