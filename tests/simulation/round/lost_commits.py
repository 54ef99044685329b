"""The world `round`: besides all faults of its base, a commit of which nobody hears, and which may have to go."""

from __future__ import annotations

import random
from typing import Any

from tests.simulation.round.world import FAULTS_END_S, World

from shoal.ids import PeerId
from shoal.wire.messages.round import CommitRecord, Propose


class LostCommitWorld(World):
    """One seeded run; in some of them a coordinator decides, and all who could finish the record are gone.

    One replica is cut off while the quorum of its stage is proposed, so the round ends without it. When the record is
    committed, no `CommitRecord` arrives, and all other replicas of that stage die with the bytes. The one that was left
    out has those of the record before: from there the swarm goes on, if nobody was told of the commit.
    """

    can_resume = True

    def __init__(self, seed: int, *arguments: Any, **classes: Any) -> None:
        # Of its own source: a seed without this fault is the same run as in the base.
        self._loss_rng = random.Random(f"lost decision of {seed}")
        self._proposals_left = self._loss_rng.randint(1, 40) if self._loss_rng.random() < 0.3 else 0
        self._left_out: tuple[int, PeerId] | None = None
        super().__init__(seed, *arguments, **classes)

    def send(self, sender: str, receiver: str, message: object) -> None:
        """Send; one replica does not get what its coordinator proposes, and nobody what that commits then."""
        super().send(sender, receiver, message)
        if not self.has_faults or self.network.now_s > FAULTS_END_S - 9.0:
            return
        if type(message) is Propose and len(message.weights) > 1 and self._proposals_left:
            self._proposals_left -= 1
            if self._proposals_left == 0:
                self.network.cut(sender, receiver, self._loss_rng.uniform(0.1, 1.0))
                self._left_out = (message.round, PeerId(receiver))
        elif type(message) is CommitRecord and self._left_out is not None:
            round, peer = self._left_out
            if _round_of(message, self) == round:
                self._left_out = None
                # When all are on their way, and none has arrived.
                self.network.after(0.0, self._lose_commit, PeerId(sender), peer)

    def _lose_commit(self, client: PeerId, left_out: PeerId) -> None:
        """Cut the coordinator off from everybody; crash all replicas of a stage but the one that was left out."""
        network, rng = self.network, self._loss_rng
        stage = int(left_out[1])
        victims = [host for host in self.replica_hosts() if host.stage == stage and host.peer != left_out]
        if left_out not in network.hosts or not self.is_known_without(victims):
            return
        duration_s = rng.uniform(0.2, 6.0)
        for peer in self.replicas:
            network.cut(client, peer, duration_s)
        if client in network.hosts and rng.random() < 0.5:
            self._crash(client)
        for victim in victims:
            network.crash(victim.peer)
            network.after(rng.uniform(0.5, 4.0), self.restart_replica, victim.peer)
        self.tell_clients()


def _round_of(message: CommitRecord, world: World) -> int:
    if message.known is not None:
        return message.known.round
    return -1 if message.record is None else world.unseal(message.record).round
