"""The rules of succession, each left out on purpose, with the first seed that notices (`test_mutants.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tests.simulation.clients.world import World

from shoal.ids import PeerId
from shoal.swarm.client_order import ClientOrder
from shoal.swarm.view import ClientPeer


class TakesItsTurnAtOnce(ClientOrder):
    """Waits for no launcher to start a lost client again."""

    def is_gone(self, peer: PeerId, now_s: float) -> bool:
        return super().is_gone(peer, now_s + 1e6)

    def is_turn(self, now_s: float) -> bool:
        return super().is_turn(now_s + 1e6)


class WaitsForNobodyElse(ClientOrder):
    """Looks at the client that trains alone, not at those that have waited for longer."""

    def announced(self, clients: Iterable[ClientPeer], now_s: float) -> None:
        super().announced([client for client in clients if not client.waits or client.peer == self._me], now_s)


class WaitsForTheLost(ClientOrder):
    """Never gives up a client that it has known."""

    def is_turn(self, now_s: float) -> bool:
        return not self._ahead


class DialsOnce(ClientOrder):
    """Does not ask a lost client again whether it is back."""

    def lost(self, peer: PeerId, now_s: float) -> None:
        super().lost(peer, now_s)
        if peer in self._ahead:
            self._ahead[peer].dial_at_s = float("inf")


def _make(order_class: type[ClientOrder]) -> Callable[[int], World]:
    return lambda seed: World(seed, order_class)


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    mutant.__name__: (_make(mutant), first_seed)
    for mutant, first_seed in ((TakesItsTurnAtOnce, 1), (WaitsForNobodyElse, 0), (WaitsForTheLost, 0), (DialsOnce, 1))
}
