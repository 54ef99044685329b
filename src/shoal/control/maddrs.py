"""Which of a node's multiaddresses mean something on other hosts."""

from __future__ import annotations

from collections.abc import Sequence

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
