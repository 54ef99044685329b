"""A record as what differs from the one before it, which all members of its quorums hold.

    body of D_r-1   [ members of stage 0 | weights | hashes ][ members of stage 1 | ...
                      ~~~~~~~~~~~~~~~~~~~                      ~~~~~~~~~~~~~~~~~~~
    body of D_r     [ copied             | fresh            ][ copied             | fresh ...

Most of a record are names of members, and those of the next one are mostly the same. What is copied is found by blocks
of the older body, wherever they stand in the newer one. The result is judged by its hash and signature as any record.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import RemoteProtocolError
from shoal.wire.messages.round import MAX_COPIED, MAX_RECORD_BYTES, Copied

BLOCK_BYTES = 32
"""Shorter parts that two records share are mostly not found."""

MOST_SCANNED = 1 << 16
"""So many bytes are looked at that are in no block of the older body; what follows is fresh. Some hundredths of a
second."""


def changes(body: bytes, base: bytes) -> tuple[bytes, tuple[Copied, ...]]:
    """Return the bytes of `body` that are not copied from `base`, and what is."""
    blocks = {base[at : at + BLOCK_BYTES]: at for at in range(0, len(base) - BLOCK_BYTES + 1, BLOCK_BYTES)}
    fresh: list[bytes] = []
    copied: list[Copied] = []
    at = done = scanned = 0
    while at <= len(body) - BLOCK_BYTES and scanned < MOST_SCANNED and len(copied) < MAX_COPIED:
        start = blocks.get(body[at : at + BLOCK_BYTES])
        if start is None:
            at, scanned = at + 1, scanned + 1
            continue
        while at > done and start > 0 and body[at - 1] == base[start - 1]:
            at, start = at - 1, start - 1
        length = _common(body, at, base, start)
        fresh.append(body[done:at])
        copied.append(Copied(at - done, start, length))
        at = done = at + length
    return b"".join((*fresh, body[done:])), tuple(copied)


def completed(fresh: bytes, copied: Sequence[Copied], base: bytes) -> bytes:
    """Return the body of which these are the changes.

    Raises:
        RemoteProtocolError: They are not those of `base`, or the body would be too long.
    """
    num_fresh = sum(part.fresh for part in copied)
    num_bytes = len(fresh) + sum(part.length for part in copied)
    is_there = num_fresh <= len(fresh) and all(part.start + part.length <= len(base) for part in copied)
    if not is_there or num_bytes > MAX_RECORD_BYTES:
        raise RemoteProtocolError(
            f"a record of {num_bytes} bytes cannot be made of {len(fresh)} bytes and {len(copied)} parts of one of "
            f"{len(base)}"
        )
    parts: list[bytes] = []
    at = 0
    for part in copied:
        parts += (fresh[at : at + part.fresh], base[part.start : part.start + part.length])
        at += part.fresh
    return b"".join((*parts, fresh[at:]))


def _common(one: bytes, at: int, other: bytes, start: int) -> int:
    """How many bytes are the same from these places on."""
    left, length, step = min(len(one) - at, len(other) - start), 0, BLOCK_BYTES

    def are_next_the_same() -> bool:
        begin, end = length, length + step
        return one[at + begin : at + end] == other[start + begin : start + end]

    # Parts that grow, up to one that is not all the same; of that one, half after half.
    while (step := min(step, left - length)) and are_next_the_same():
        length += step
        step *= 2
    while step := step // 2:
        if are_next_the_same():
            length += step
    return length
