"""The rules of chains that meet, each left out on purpose, with the first seed that notices (`test_mutants.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from tests.simulation.round.hosts import digest
from tests.simulation.round.mutants import RestoresAtOnce
from tests.simulation.run.mutants import TrainsWhatItFinds
from tests.simulation.split.hosts import Client, Replica
from tests.simulation.split.world import SplitWorld

from shoal.ids import Ballot, PeerId, StepKey
from shoal.swarm.records import Tip, used_samples
from shoal.swarm.round_choice import choose
from shoal.swarm.round_coordinator import Effects as CoordinatorEffects
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import CoordinatorEffect, Fetch, MemberEffect, Overtaken, RoundReady, Send
from shoal.swarm.round_joins import RoundJoins
from shoal.swarm.round_judgement import Judgement
from shoal.swarm.round_member import Effects as MemberEffects
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_replicas import RoundReplicas
from shoal.wire.messages.round import CommitRecord, Join


class _KnowsTheChoice(Judgement):
    def is_new(self, tip: Tip, stage: int, standing: Tip) -> bool:
        return tip.round > standing.round and super().is_new(tip, stage, standing)


class ChoosesByArrival(RoundCoordinatorMachine):
    """The chain that it has heard of first stands, unless another one has come further."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._judgement.__class__ = _KnowsTheChoice


class _KnowsNoChain(Judgement):
    def _was_left(self, tip: Tip) -> bool:
        return tip in self._left


class TellsItTwice(RoundCoordinatorMachine):
    """Says again that a chain is left when one more of its records is heard of."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._judgement.__class__ = _KnowsNoChain


class WaitsForNoChain(RoundCoordinatorMachine):
    """Chooses among the chains that are whole now, though replicas are heard of one after the other."""

    def _choose(self, now_s: float) -> CoordinatorEffects:
        settings, states = self.settings, self._replicas.states
        if states and choose(states, settings.num_stages, settings.genesis, self._unseal, False, True).is_contested:
            self._since_s = now_s - 1e6
        return super()._choose(now_s)


class _KeepsTheFirstFate(RoundJoins):
    def _contradicting(self) -> dict[PeerId, StepKey]:
        return {peer: key for peer, key in super()._contradicting().items() if self._is_aborted(key)}


class KeepsTheFirstFate(RoundCoordinatorMachine):
    """Takes the join of a replica that has aborted, by another coordinator's order, what is committed here."""

    def _joined(self, peer: PeerId, join: Join) -> None:
        self._joins.__class__ = _KeepsTheFirstFate
        super()._joined(peer, join)


class _LeavesOutTheLast(RoundJoins):
    def leave_out(self) -> dict[PeerId, StepKey]:
        out = self._contradicting()
        self.joins = {peer: join for peer, join in self.joins.items() if peer not in out}
        return out


class LeavesOutTheLast(RoundCoordinatorMachine):
    """Goes on without who contradicts, also where nobody else serves the stage."""

    def _joined(self, peer: PeerId, join: Join) -> None:
        self._joins.__class__ = _LeavesOutTheLast
        super()._joined(peer, join)


class _NamesNoChain(RoundReplicas):
    def offer(self, peer: PeerId, ballot: Ballot, tip: Tip) -> list[CoordinatorEffect]:
        return [
            Send(effect.peer, msgspec.structs.replace(effect.message, instead_of=""))
            if isinstance(effect, Send) and isinstance(effect.message, CommitRecord)
            else effect
            for effect in super().offer(peer, ballot, tip)
        ]


class NamesNoChain(RoundCoordinatorMachine):
    """Does not tell a replica that its own chain was not chosen."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._replicas.__class__ = _NamesNoChain


class FollowsTheNewest(RoundMemberMachine):
    """Leaves its chain for every record of a later round, whether it names its own one or not."""

    def _commit(self, message: CommitRecord) -> MemberEffects:
        if message.record is not None and self.unseal(message.record).round > self.tip.round:
            message = msgspec.structs.replace(message, instead_of=self.tip.hash)
        return super()._commit(message)


class IsSilentAboutMistakes(RoundMemberMachine):
    """Does not answer to what was chosen in place of a record that it does not hold."""

    def _commit(self, message: CommitRecord) -> MemberEffects:
        is_mistaken = message.instead_of not in ("", self.tip.hash)
        return [] if is_mistaken else super()._commit(message)


class DropsItsStateFirst(Replica):
    """Gives its old state up when it begins to load that of another chain."""

    def _fetch(self, order: Fetch) -> list[MemberEffect]:
        self.theta = digest("nothing")
        return super()._fetch(order)


class TakesAnySteps(Replica):
    """Looks at the number of a step's round alone, which other chains have as well."""

    def takes(self, round: int, base: str) -> bool:
        return self.trains and self.machine.round == round


class KeepsItsPool(Client):
    """Gives the samples that the chain which was left has recorded to nobody."""

    def begin_anew(self, ready: RoundReady) -> None:
        if ready.tip.signed is not None:
            record = self.world.unseal(ready.tip.signed)
            used = {number for item in used_samples(record) for number in range(item.start, item.stop)}
            self.world.pool_of(self.peer).recorded.update(used)


class TrainsOn(Client):
    """Goes on in its own round, over whoever is there, when another chain was chosen."""

    def _act(self, effects: list[CoordinatorEffect]) -> None:
        super()._act([effect for effect in effects if not isinstance(effect, Overtaken)])


class KnowsNobodyElse(Client):
    """Goes on where the record stands that follows its own, whoever has made that and may train on it."""

    def is_own(self, ready: RoundReady, base: str) -> bool:
        return self._record(ready).previous == base


class TrainsAtOnce(Client):
    """Trains on the record of others before the round that they have begun is ended."""

    run_class = TrainsWhatItFinds


def _make(first_seed: int, **classes: type) -> tuple[Callable[[int], SplitWorld], int]:
    return lambda seed: SplitWorld(seed, **classes), first_seed  # type: ignore[arg-type]


def _meets(first_seed: int, **classes: type) -> tuple[Callable[[int], SplitWorld], int]:
    return lambda seed: SplitWorld(seed, meets=True, **classes), first_seed  # type: ignore[arg-type]


MUTANTS: dict[str, tuple[Callable[[int], SplitWorld], int]] = {
    "ChoosesByArrival": _make(4, coordinator_class=ChoosesByArrival),
    "TellsItTwice": _make(28, coordinator_class=TellsItTwice),
    "WaitsForNoChain": _make(9, coordinator_class=WaitsForNoChain),
    "KeepsTheFirstFate": _meets(1003, coordinator_class=KeepsTheFirstFate),
    "LeavesOutTheLast": _meets(757, coordinator_class=LeavesOutTheLast),
    "FollowsTheNewest": _meets(61, member_class=FollowsTheNewest),
    "IsSilentAboutMistakes": _meets(96, member_class=IsSilentAboutMistakes),
    "NamesNoChain": _make(4, coordinator_class=NamesNoChain),
    "DropsItsStateFirst": _make(0, host_class=DropsItsStateFirst),
    "TakesAnySteps": _make(53, host_class=TakesAnySteps),
    "KeepsItsPool": _make(34, client_class=KeepsItsPool),
    "TrainsOn": _make(4, client_class=TrainsOn),
    "KnowsNobodyElse": _make(161, client_class=KnowsNobodyElse),
    "TrainsAtOnce": _make(0, client_class=TrainsAtOnce),
    # Who may come back has been cut off: machines that only die take their bytes with them.
    "RestoresAtOnce": _make(30, coordinator_class=RestoresAtOnce),
}
