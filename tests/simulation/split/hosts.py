"""Clients with pools of their own, that take the run over and are overtaken; replicas that change chains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.round.hosts import ClientHost, ReplicaHost

from shoal.ids import PeerId
from shoal.swarm.records import used_samples
from shoal.swarm.round_effects import ChainLeft, CoordinatorEffect, Deposed, Fetch, MemberEffect, Overtaken, RoundReady
from shoal.swarm.run_effects import RunPhase

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
    """A client whose trainers know of the replicas what it has told them: it may have changed meanwhile."""

    world: SplitWorld

    def __init__(self, world: SplitWorld, peer: PeerId) -> None:
        self.told: dict[PeerId, int] = {}
        super().__init__(world, peer)

    @property
    def trains(self) -> bool:
        return self.run is not None and self.run.phase in (RunPhase.TRAIN, RunPhase.AVERAGE)

    def _act(self, effects: list[CoordinatorEffect]) -> None:
        super()._act(effects)
        if not self.is_here:
            return
        for effect in effects:
            match effect:
                case Overtaken() | Deposed():
                    self.told = {}
                case ChainLeft():
                    self.world.checks.tells(self.machine, effect)
                    self.world.chains_left.append(effect)
                case _:
                    pass
        holders = self.machine.holders
        if self.trains and holders is not None:
            self.told = dict(holders)

    def begin_anew(self, ready: RoundReady) -> None:
        """The pool of samples follows from the record alone."""
        super().begin_anew(ready)
        used = () if ready.tip.signed is None else used_samples(self._record(ready))
        self.world.pool_of(self.peer).begin_anew(ready.tip.round, used)
