"""Clients with pools of their own, that take the run over and are overtaken; replicas that change chains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.round.hosts import ClientHost, ReplicaHost

from shoal.ids import PeerId
from shoal.swarm.records import used_samples
from shoal.swarm.round_effects import (
    ChainLeft,
    CoordinatorEffect,
    Deposed,
    Fetch,
    MemberEffect,
    Overtaken,
    RoundReady,
)

if TYPE_CHECKING:
    from tests.simulation.split.world import SplitWorld


class Replica(ReplicaHost):
    """A replica that takes steps of its own chain alone."""

    world: SplitWorld
    _is_ordered = False

    def takes(self, round: int, base: str) -> bool:
        """Whether a step of this round, on top of this record, is opened: `StepReplica` compares both."""
        return self.trains and (self.machine.round, self.machine.tip.hash) == (round, base)

    def deliver(self, sender: str, message: object) -> None:
        self._is_ordered = True
        super().deliver(sender, message)
        self._is_ordered = False

    def _act(self, effects: list[MemberEffect]) -> None:
        for effect in effects:
            # A fetch that no message orders goes on with a swap that failed: an earlier coordinator may have chosen it.
            if isinstance(effect, Fetch) and self._is_ordered:
                self.world.checks.leaves(self, effect.record)
        super()._act(effects)


class Client(ClientHost):
    """A client that, before it trains, ends the round that it has found with the steps that it has.

    What its trainers know of the replicas is what it has told them: it may have changed meanwhile.
    """

    world: SplitWorld

    def __init__(self, world: SplitWorld, peer: PeerId) -> None:
        self.inherited: str | None = None  # hash of the record on top of which it has taken over
        self.trains = False
        self.told: dict[PeerId, int] = {}
        super().__init__(world, peer)

    def _act(self, effects: list[CoordinatorEffect]) -> None:
        super()._act(effects)
        if self.world.network.hosts.get(self.peer) is not self:
            return
        for effect in effects:
            match effect:
                case Overtaken() | Deposed():
                    self.leaves()
                case ChainLeft():
                    self.world.checks.tells(self.machine, effect)
                    self.world.chains_left.append(effect)
                case RoundReady():
                    self._ready(effect)
                case _:
                    pass
        holders = self.machine.holders
        if self.trains and holders is not None:
            self.told = dict(holders)

    def leaves(self) -> None:
        """What it knew of the run is void."""
        self.inherited, self.trains, self.told = None, False, {}

    def _ready(self, ready: RoundReady) -> None:
        if self.inherited is None:
            self.inherited = ready.tip.hash
            self.begin_anew(ready)
        self.trains = self.trains or ready.tip.hash != self.inherited
        if not self.trains:
            self.close()

    def begin_anew(self, ready: RoundReady) -> None:
        """The pool of samples follows from the record alone."""
        signed = ready.tip.signed
        used = () if signed is None else used_samples(self.world.unseal(signed))
        self.world.pool_of(self.peer).begin_anew(ready.tip.round, used)
