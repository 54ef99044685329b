"""The joins of one round, and the fate of the steps that some replica holds in doubt.

A step in doubt was prepared by a replica whose trainer, and then another replica of the path that could tell, was lost.
It is committed if any join holds it and aborted otherwise; that is decided once everyone has joined, and it stays so
for the round.
"""

from __future__ import annotations

from shoal.ids import PeerId, StepKey
from shoal.wire.messages.round import Join


class RoundJoins:
    """What has been joined with.

    Attributes:
        joins: By replica; one whose doubts are being settled joins again.
    """

    def __init__(self) -> None:
        self.joins: dict[PeerId, Join] = {}
        self._fates: dict[StepKey, bool] = {}

    def restart(self) -> None:
        """Forget the joins, not the fates: replicas have acted on them."""
        self.joins.clear()

    def note(self, peer: PeerId, join: Join) -> StepKey | None:
        """Take a join, unless it holds a step that was settled as aborted: returns that step."""
        for entry in join.log:
            if self._fates.get(entry.key) is False:
                return entry.key
        self.joins[peer] = join
        return None

    def settle(self) -> list[tuple[PeerId, StepKey, bool]]:
        """Decide all doubts: who is to be told of which step, and whether it is committed. Empty if there are none."""
        held = {entry.key for join in self.joins.values() for entry in join.log}
        orders: list[tuple[PeerId, StepKey, bool]] = []
        for peer, join in list(self.joins.items()):
            for key in join.in_doubt:
                orders.append((peer, key, self._fates.setdefault(key, key in held)))
                self.joins.pop(peer, None)
        return orders
