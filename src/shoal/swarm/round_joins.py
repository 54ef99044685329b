"""The joins of one round, and the fate of the steps that some replica holds in doubt.

A step in doubt was prepared by a replica whose trainer, and then another replica of the path that could tell, was lost.
It is committed if any join holds it and aborted otherwise; that is decided once everyone has joined, and it stays so
for the round.
"""

from __future__ import annotations

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

    def note(self, peer: PeerId, join: Join) -> StepKey | None:
        """Take a join, unless it holds a step that was settled as aborted: returns that step."""
        for entry in join.log:
            fate = self._fates.get(entry.key)
            if fate is not None and not fate.commit:
                return entry.key
        self.joins[peer] = join
        return None

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
