"""The rules of succession, each left out on purpose, with the first seed that notices (`test_mutants.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.simulation.clients.world import World

from shoal.ids import PeerId
from shoal.swarm.client_turn import ClientTurn, TurnEffects
from shoal.swarm.view import Run, SwarmView
from shoal.wire.messages.base import Hop


class TakesItsTurnAtOnce(ClientTurn):
    """Waits for no launcher to start a lost client again."""

    def lost(self, peer: PeerId, now_s: float) -> None:
        super().lost(peer, now_s)
        if peer in self._ahead:
            self._ahead[peer].since_s = -1e6


class WaitsForNobodyElse(ClientTurn):
    """Looks at the client that trains alone, not at those that have waited for longer."""

    def look(self, view: SwarmView, now_s: float) -> TurnEffects:
        clients = tuple(client for client in view.clients if not client.waits or client.peer == self._me)
        return super().look(replace(view, clients=clients), now_s)


class WaitsForTheLost(ClientTurn):
    """Never gives up a client that it has known."""

    def _is_first(self, now_s: float) -> bool:
        return not self._ahead


class DialsOnce(ClientTurn):
    """Does not ask a lost client again whether it is back."""

    def lost(self, peer: PeerId, now_s: float) -> None:
        super().lost(peer, now_s)
        if peer in self._ahead:
            self._ahead[peer].dial_at_s = float("inf")


class BelievesTheRegistry(ClientTurn):
    """Takes the run as soon as hosts of servers announce it, whatever servers say."""

    def _has_no_client(self, run: Run | None, now_s: float) -> bool:
        return (run is not None and run.kept) or super()._has_no_client(run, now_s)


class BelievesTheFirstServer(ClientTurn):
    """Does not wait for what the others say: the first one may have lost its own connection."""

    def told(self, peer: PeerId, client: PeerId | None) -> None:
        super().told(peer, client)
        self._asked.clear()


class AsksServersOnce(ClientTurn):
    """What servers have said while there was a client stays."""

    def _ask_servers(self, view: SwarmView, now_s: float) -> list[Hop]:
        return super()._ask_servers(view, now_s) if self._asked_at_s < 0 else []


def _make(turn_class: type[ClientTurn]) -> Callable[[int], World]:
    return lambda seed: World(seed, turn_class)


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    mutant.__name__: (_make(mutant), first_seed)
    for mutant, first_seed in (
        (TakesItsTurnAtOnce, 1),
        (WaitsForNobodyElse, 0),
        (WaitsForTheLost, 0),
        (DialsOnce, 1),
        (BelievesTheRegistry, 0),
        (BelievesTheFirstServer, 0),
        (AsksServersOnce, 0),
    )
}
