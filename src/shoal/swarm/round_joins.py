"""The joins of one round, and the fate of the steps that some replica holds in doubt.

A step in doubt was prepared by a replica whose trainer, and then another replica of the path that could tell, was lost.
It is committed if any join holds it and aborted otherwise; that is decided once everyone has joined, and it stays so
for the round.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from shoal.ids import PeerId, StepKey
from shoal.swarm.records import steps_held
from shoal.wire.messages.round import Join


class Fate(NamedTuple):
    """How a step in doubt was settled; scale, learning rate and skipped are those of the entry that holds it."""

    key: StepKey
    commit: bool
    scale: float
    lr: float
    skipped: bool


class RoundJoins:
    """What has been joined with.

    Attributes:
        joins: By replica; one whose doubts are being settled joins again.
    """

    def __init__(self) -> None:
        self.joins: dict[PeerId, Join] = {}
        self._fates: dict[StepKey, Fate] = {}

    def restart(self) -> None:
        """Forget the joins, not the fates: replicas have acted on them."""
        self.joins.clear()

    def keep(self, holders: Collection[PeerId]) -> Mapping[PeerId, Join]:
        """Only these replicas still take part; returns their joins."""
        for peer in self.joins.keys() - set(holders):
            del self.joins[peer]
        return self.joins

    def note(self, peer: PeerId, join: Join) -> dict[PeerId, StepKey]:
        """Take a join, with what an earlier coordinator had aborted there.

        Returns:
            The replicas that hold a step which was settled as aborted, and that step: their joins are not kept.
        """
        self.joins[peer] = join
        for key in join.aborted:
            self._fates.setdefault(key, Fate(key, False, 0.0, 0.0, False))
        aborted = {key for key, fate in self._fates.items() if not fate.commit}
        contradicting = {
            other: entry.key for other, held in self.joins.items() for entry in held.log if entry.key in aborted
        }
        for other in contradicting:
            del self.joins[other]
        return contradicting

    def settle(self) -> list[tuple[PeerId, Fate]]:
        """Decide all doubts: who is to be told of which fate. Empty if there are none."""
        held = steps_held(join.log for join in self.joins.values())
        orders: list[tuple[PeerId, Fate]] = []
        for peer, join in list(self.joins.items()):
            for key in join.in_doubt:
                entry = held.get(key)
                if entry is None:
                    fate = Fate(key, False, 0.0, 0.0, False)
                else:
                    fate = Fate(key, True, entry.scale, entry.lr, entry.skipped)
                orders.append((peer, self._fates.setdefault(key, fate)))
                self.joins.pop(peer, None)
        return orders
