"""The rules of moves, each left out on purpose, with the first seed that notices. `test_mutants.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from tests.simulation.round.moving import MovingWorld

from shoal.ids import PeerId
from shoal.swarm.move_orders import MoveEffect, MoveOrders
from shoal.swarm.round_member import Effects, RoundMemberMachine
from shoal.swarm.view import SwarmView
from shoal.wire.messages.round import Move, RoundMessage


class TwoMovers(MoveOrders):
    """Sends the next one while one is under way."""

    def _order(
        self,
        view: SwarmView,
        holders: Mapping[PeerId, int],
        resting: Collection[PeerId],
        now_s: float,
        only_urgent: bool = False,
    ) -> list[MoveEffect]:
        sent = {self.under_way.peer} if self.under_way is not None else set[PeerId]()
        return super()._order(view, holders, {*resting, *sent}, now_s, only_urgent)

    def recorded(self, view: SwarmView, holders: Mapping[PeerId, int], round: int, now_s: float) -> list[MoveEffect]:
        effects = super().recorded(view, holders, round, now_s)
        return effects + self._order(view, holders, (), now_s) if self.under_way is not None else effects


class FollowsEveryOrder(RoundMemberMachine):
    """Goes where it is sent under any ballot."""

    def receive(self, peer: PeerId, message: RoundMessage) -> Effects:
        if isinstance(message, Move):
            return self._move(message)
        return super().receive(peer, message)


MUTANTS: dict[str, tuple[Callable[[int], MovingWorld], int]] = {
    "TwoMovers": (lambda seed: MovingWorld(seed, orders_class=TwoMovers), 0),
    "FollowsEveryOrder": (lambda seed: MovingWorld(seed, member_class=FollowsEveryOrder), 1),
}
