"""Ed25519 keys that nobody owns, computed from the curve itself: what a stranger signs with who has no key at all.

For the points of small order, `[8]A` is the identity, so `SIGNATURE` (R = the identity, S = 0) holds under them for one
message in eight, and under the identity for every message (RFC 8032, 5.1.7, as OpenSSL checks it).
"""

from __future__ import annotations

from shoal.identity import _PEER_ID_PREFIX, _base58_encode
from shoal.ids import PeerId

P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
SIGN = 1 << 255
Point = tuple[int, int]
IDENTITY: Point = (0, 1)
SIGNATURE = (1).to_bytes(32, "little") + bytes(32)


def add(one: Point, two: Point) -> Point:
    (x1, y1), (x2, y2) = one, two
    t = D * x1 * x2 * y1 * y2 % P
    return (x1 * y2 + x2 * y1) * pow(1 + t, -1, P) % P, (y1 * y2 + x1 * x2) * pow(1 - t, -1, P) % P


def times(factor: int, point: Point) -> Point:
    total = IDENTITY
    for bit in f"{factor:b}":
        total = add(total, total)
        if bit == "1":
            total = add(total, point)
    return total


def on_curve(y: int) -> Point | None:
    """A point with this y, the x of which is even."""
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P:
        return None
    return (P - x if x % 2 else x), y


def encoded(point: Point) -> bytes:
    x, y = point
    return (y | (SIGN if x % 2 else 0)).to_bytes(32, "little")


def _generator_of_torsion() -> Point:
    order = 2**252 + 27742317777372353535851937790883648493
    for y in range(2, 100):
        point = on_curve(y)
        if point is not None and times(4, torsion := times(order, point)) != IDENTITY:
            return torsion
    raise AssertionError("no point of order 8")


TORSION = tuple(times(i, _generator_of_torsion()) for i in range(8))
SMALL_ORDER = tuple(encoded(point) for point in TORSION)
"""The eight keys under which anybody signs."""

NON_CANONICAL = tuple(
    value.to_bytes(32, "little")
    for value in (1 | SIGN, (P - 1) | SIGN, P, P | SIGN, P + 1, (P + 1) | SIGN, P + 3, (1 << 255) - 1, (1 << 256) - 1)
)
"""Other ways of writing small-order points, which OpenSSL reads as well, and numbers that are no coordinate."""


def peer_id(public_key: bytes) -> PeerId:
    """The peer id that would contain a key; `identity.peer_id_of` makes none of these."""
    return PeerId(_base58_encode(_PEER_ID_PREFIX + public_key))
