"""Trainers that died, or are frozen for so long that they are taken for dead, and those that take their places."""

from __future__ import annotations

from tests.simulation.network import DEADLINE_S, Network
from tests.simulation.step.hosts import TrainerHost


class Replacement:
    """What a world with trainers does about them; it has a network and the generation of each slot."""

    network: Network
    generations: dict[int, int]

    def trainer_peers(self) -> list[str]:
        return [f"T{slot}.{generation}" for slot, generation in self.generations.items()]

    def trainer_died(self, peer: str, slot: int, generation: int) -> None:
        """Settle what a trainer has left, before the next one starts."""
        raise NotImplementedError

    def _froze(self, peer: str, duration_s: float) -> None:
        if peer[0] == "T" and duration_s > DEADLINE_S and self.network.rng.random() < 0.7:
            # Frozen beyond the deadline: declared dead, replaced, and it wakes up later.
            self.network.after(DEADLINE_S + 0.1, self._replace_trainer, peer)

    def _replace_trainer(self, peer: str) -> None:
        if peer not in self.trainer_peers():
            return
        slot, generation = int(peer[1]), int(peer.split(".")[1])
        self.generations[slot] = generation + 1
        self.trainer_died(peer, slot, generation)
        self.network.after(self.network.rng.uniform(0.1, 1.0), TrainerHost, self, slot, generation + 1, 0)
