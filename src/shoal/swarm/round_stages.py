"""The coordinator's watch over the stages: which ones nobody can be trained on, and what is restored when.

Puts together who is there (`RoundReplicas`), which bytes stand for the tip's (`Restoration`), and who keeps bytes
beside the replicas (`RoundMirrors`): no stage is restored from older bytes than a mirror holds of it, as long as the
mirror is there and a replica of the stage can take them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from shoal.ids import Ballot, PeerId
from shoal.swarm.records import Tip
from shoal.swarm.round_effects import CoordinatorEffect, Restored, Stuck
from shoal.swarm.round_mirrors import RoundMirrors
from shoal.swarm.round_replicas import RoundReplicas
from shoal.swarm.round_restoration import Restoration
from shoal.wire.messages.round import Basis, Record, SignedRecord

Effects = list[CoordinatorEffect]


class RoundStages:
    """The stages of a run as one coordinator sees them."""

    def __init__(
        self,
        num_stages: int,
        replicas: RoundReplicas,
        restoration: Restoration,
        mirrors: RoundMirrors,
        unseal: Callable[[SignedRecord], Record],
    ) -> None:
        self._num_stages = num_stages
        self._replicas = replicas
        self._restoration = restoration
        self._mirrors = mirrors
        self._unseal = unseal

    def without(self, stages: Collection[int]) -> set[int]:
        """The stages that are not among these."""
        return set(range(self._num_stages)) - set(stages)

    def miss(self, stages: Collection[int], now_s: float) -> Effects:
        """These stages have nobody that can be trained on; reported when it changes."""
        return [Stuck(tuple(sorted(stages)))] if self._restoration.miss(stages, now_s) else []

    def lost(self, tip: Tip, now_s: float) -> dict[int, Basis]:
        """What the missing stages go on from whose bytes of a record are gone; not those that may yet come back."""
        if self._mirrors.is_waited_for(self._restoration.patience_s, now_s):
            return {}
        record = None if tip.signed is None else self._unseal(tip.signed)
        kept = self._kept(tip)
        missing = [stage for stage in self._restoration.missing if stage not in kept]
        silent = bool(self._replicas.silent) or self._mirrors.is_silent
        return self._restoration.due(record, missing, self._replicas.here, silent, now_s)

    def doubted(self, tip: Tip, now_s: float) -> set[int]:
        """The stages of a record that are held by nobody but with bytes that they were restored from, while this
        coordinator heard of the record's own a moment ago: that a stage was restored once does not make it so again."""
        outcomes = () if tip.signed is None else self._unseal(tip.signed).stages
        own = {outcome.stage: outcome.hashes for outcome in outcomes}
        there = [here for here in self._replicas.at(tip) if here.stage in own]
        has_own = {here.stage for here in self._replicas.here.values() if here.basis.hashes == own.get(here.stage)}
        doubted = {here.stage for here in there} - has_own
        return {stage for stage in doubted if self._restoration.was_heard(own[stage], now_s)}

    def _kept(self, tip: Tip) -> dict[int, Tip]:
        """Of the missing stages, those whose bytes of a record, or newer ones than any replica has, can be had from
        somebody who keeps them; but not those of which a replica has the bytes already."""
        kept = self._mirrors.kept(tip) if self._restoration.missing else {}
        own = {here.stage: here.basis.hashes for here in self._mirrors.own(tip)} if kept else {}
        has_own = {each.stage for each in self._replicas.here.values() if each.basis.hashes == own.get(each.stage)}
        return {
            stage: kept[stage]
            for stage in self._restoration.missing
            if stage in kept and stage not in has_own
            if stage in own or self._replicas.takers(stage, kept[stage])
        }

    def hint(self, ballot: Ballot, tip: Tip) -> Effects:
        """Tell the replicas of the missing stages what to look for that somebody keeps for them."""
        effects: Effects = []
        for stage, kept in self._kept(tip).items():
            effects += self._replicas.offer_kept(self._replicas.takers(stage, kept), kept, ballot)
        return effects

    def parted(self, tip: Tip) -> set[int]:
        """The missing stages whose bytes of the tip somebody keeps, while all their replicas are of other chains: they
        can fetch them only when the tip is chosen over what they hold."""
        kept = self._kept(tip)
        there = {here.stage for here in self._replicas.here.values()}
        return {
            stage
            for stage, its in kept.items()
            if stage in there and its.hash == tip.hash and not self._replicas.takers(stage, its)
        }

    def watch(self, tip: Tip, now_s: float) -> Effects:
        """Between the records: report what is missing."""
        if self._replicas.told:
            return []
        holders = self._replicas.holders(tip)
        self._restoration.seen(holders)
        return self.miss(self.without(holders.values()), now_s)

    def is_lost(self, tip: Tip, now_s: float) -> bool:
        """Whether some stage is to be restored, by what the replicas have said until now."""
        return not self._replicas.told and bool(self.lost(tip, now_s))

    def restore(self, lost: Mapping[int, Basis], ballot: Ballot, tip: Tip, others: Iterable[PeerId] = ()) -> Effects:
        """These stages go on from these bytes; whoever has them, or has to fetch the record's, is told."""
        effects: Effects = []
        for stage, basis in lost.items():
            effects.append(Restored(stage, tip.round, self._restoration.restore(stage, basis)))
            self._replicas.invite(stage, basis)
        return effects + self._replicas.tell(ballot, tip, others)

    def go_on(self, lost: Mapping[int, Basis], ballot: Ballot, tip: Tip, others: Iterable[PeerId]) -> Effects:
        """A coordinator has chosen the tip: what others have restored for it stays so."""
        before = self._restoration.bases
        everyone = [*self._replicas.here.values(), *self._mirrors.own(tip)]
        self._restoration.bases = self._restoration.continued(self._replicas.at(tip), everyone)
        found = self._restoration.bases.items()
        effects: Effects = [Restored(stage, tip.round, basis) for stage, basis in found if before.get(stage) != basis]
        return effects + self.restore(lost, ballot, tip, others)

    def reconsider(self, peer: PeerId, ballot: Ballot, tip: Tip) -> Effects:
        """A replica with better bytes than those that its stage was restored from has come before the quorums."""
        here = self._replicas.here[peer]
        return self.restore({here.stage: here.basis}, ballot, tip) if self._restoration.is_better(here) else []

    def reconsider_kept(self, ballot: Ballot, tip: Tip) -> Effects:
        """Somebody who keeps the record's own bytes of a stage that was restored has come before the quorums."""
        own = {here.stage: here.basis for here in self._mirrors.own(tip) if self._restoration.is_own(here)}
        return self.restore(own, ballot, tip)
