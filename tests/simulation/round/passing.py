"""Orders that members pass on, in some of the runs, and a member that does not do it as it should."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from shoal.ids import PeerId
from shoal.swarm.passed_orders import IN_LARGE_RINGS, PassedOrder, PassingRule
from shoal.wire.messages.round import OrderPassed, PrepareRecord, Propose

if TYPE_CHECKING:
    from tests.simulation.round.world import World

_PASSING = PassingRule(least_members=2, num_first=1, patience_s=1.0)


class Passing:
    """Who lies in one run about what it is to pass on, and how: to its end, for that must cost nothing but time.

    Attributes:
        rule: Of the run.
    """

    def __init__(self, world: World, seed: int, num_stages: int, num_slots: int) -> None:
        self._world, self._rng = world, random.Random(f"passing {seed}")
        rng = self._rng
        self.rule = _PASSING if rng.random() < 0.35 else IN_LARGE_RINGS
        place = rng.choice((0, 0, rng.randrange(num_slots)))  # where the first of a ring mostly is
        self._liar = PeerId(f"R{rng.randrange(num_stages)}.{place}")
        self._lie = rng.choice(("", "", "withholds", "alters", "delays")) if world.has_faults else ""

    def send(self, sender: PeerId, receiver: PeerId, message: object) -> None:
        """Send what a replica says."""
        world = self._world
        if type(message) is not OrderPassed or sender != self._liar or not self._lie:
            world.send(sender, receiver, message)
        elif self._lie == "alters":
            world.send(sender, receiver, self._altered(sender, message))
        elif self._lie == "delays":
            world.network.on_host(sender, self._rng.uniform(0.2, 6.0), world.send, sender, receiver, message)

    def _altered(self, liar: PeerId, message: OrderPassed) -> OrderPassed:
        """Another order: a quorum in another order, or a record without samples."""
        order = msgspec.msgpack.decode(message.order, type=PassedOrder)
        if isinstance(order, Propose):
            turned = {"members": order.members[::-1], "order": order.order[::-1]}
            return OrderPassed(msgspec.msgpack.encode(msgspec.structs.replace(order, **turned)))
        signed = self._world.network.hosts[liar].machine.prepared  # type: ignore[attr-defined]
        if signed is None:
            return message
        record = msgspec.structs.replace(self._world.unseal(signed), samples=(), skipped=())
        forged = msgspec.structs.replace(signed, body=msgspec.msgpack.encode(record))
        return OrderPassed(msgspec.msgpack.encode(PrepareRecord(order.ballot, forged)))
