"""Quorums and records that a whole ring is told: few members get them, and pass them on from neighbour to neighbour.

    coordinator --OrderNamed, OrderPassed--> first member --OrderPassed--> neighbour --OrderPassed--> ...
                '-OrderNamed---------------> every member

Whoever is told such an order learns of all its members, so the bytes that a coordinator would send grow with the square
of these. Only the coordinator says which order counts, by its SHA-256. So who passes it on can withhold it and do no
more; and as everybody gets it from two sides, one member alone withholds it from nobody.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from shoal.errors import MALFORMED, RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.swarm.round_effects import Send
from shoal.wire.messages.round import MAX_ORDER_BYTES, OrderNamed, OrderPassed, PrepareRecord, Propose, QuorumTag

PassedOrder = Propose | PrepareRecord
"""What may be passed on."""

_MOST_HELD = 2
"""Orders that have come before their name: one quorum and one record."""

_decoder = msgspec.msgpack.Decoder(PassedOrder)


@dataclass(frozen=True, slots=True)
class PassingRule:
    """When orders are passed on.

    Attributes:
        least_members: of a ring; in smaller ones the coordinator tells each member itself.
        num_first: members of a ring that it tells itself also in others, as far from each other as can be.
        patience_s: after this time it tells a record itself to those that have not prepared it.
    """

    least_members: int = 16
    num_first: int = 3
    patience_s: float = 10.0


IN_LARGE_RINGS: Final = PassingRule()
"""What three members are told of a round of 1,000 in 8 stages are 50 kB."""


def spread(sends: Sequence[Send], ballot: Ballot, rule: PassingRule) -> list[Send]:
    """Return how the members of a ring are told an order.

    Args:
        sends: The same order for each, in ring order. Those that are told it in another form than most are told that
            form as well: they know then what is passed on, and to whom.
    """
    if len(sends) < rule.least_members:
        return list(sends)
    forms = {id(send.message): send.message for send in sends}
    common = max(forms.values(), key=lambda form: sum(send.message is form for send in sends))
    encoded = msgspec.msgpack.encode(common)
    if len(encoded) > MAX_ORDER_BYTES:
        return list(sends)
    name, passed = OrderNamed(ballot, hashlib.sha256(encoded).digest()), OrderPassed(encoded)
    first = {len(sends) * number // rule.num_first for number in range(rule.num_first)}
    told: list[Send] = []
    for place, send in enumerate(sends):
        if send.message is not common:
            told.append(send)
        told.append(Send(send.peer, name))
        if place in first:
            told.append(Send(send.peer, passed))
    return told


class Arrived(NamedTuple):
    """An order that the coordinator has named, and who has passed it on."""

    order: PassedOrder
    passed: OrderPassed
    by: PeerId


class PassedOrders:
    """What one member has of orders that are passed on.

    At most one is waited for: the last that was named, and nothing else was told since.
    """

    def __init__(self) -> None:
        self._name: OrderNamed | None = None
        self._done = b""
        self._held: deque[tuple[bytes, PeerId, OrderPassed]] = deque(maxlen=_MOST_HELD)

    def forget(self) -> None:
        """The coordinator has told something else since: what was named before is late."""
        self._name = None

    def named(self, name: OrderNamed) -> Arrived | None:
        """Return the order if it is there; else it is waited for.

        Raises:
            RemoteProtocolError: The coordinator has named what is no order of its own.
        """
        self._name = None if name.digest == self._done else name
        return self._arrived()

    def passed(self, peer: PeerId, message: OrderPassed) -> Arrived | None:
        """Return the order if it is the one that is waited for; else it is held, as its name may be late.

        Raises:
            RemoteProtocolError: The coordinator has named what is no order of its own.
        """
        digest = hashlib.sha256(message.order).digest()
        if digest != self._done and all(digest != held for held, _, _ in self._held):
            self._held.append((digest, peer, message))
        return self._arrived()

    def _arrived(self) -> Arrived | None:
        name = self._name
        found = next((each for each in self._held if name is not None and each[0] == name.digest), None)
        if name is None or found is None:
            return None
        self._held.remove(found)
        self._name, (self._done, peer, message) = None, found
        try:
            order = _decoder.decode(message.order)
        except MALFORMED as error:
            raise RemoteProtocolError(f"{name.ballot.peer} has named what is no order: {error}") from error
        if order.ballot != name.ballot:
            raise RemoteProtocolError(f"{name.ballot.peer} has named an order of {order.ballot} under {name.ballot}")
        return Arrived(order, message, peer)


def pass_on(arrived: Arrived, quorum: Propose | None, me: PeerId) -> list[Send]:
    """Give an order to the neighbours in the ring, but for the one that it is from. A quorum is passed on by who is in
    it, a record by who is in any."""
    order, passed, by = arrived
    if quorum is None or (isinstance(order, Propose) and QuorumTag.of(order) != QuorumTag.of(quorum)):
        return []
    ring = [hop.peer for hop in quorum.members]
    place = ring.index(me)
    neighbours = dict.fromkeys((ring[place - 1], ring[(place + 1) % len(ring)]))
    return [Send(peer, passed) for peer in neighbours if peer not in (me, by)]
