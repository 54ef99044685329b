"""The coordinator's watch over the stages: which ones nobody can be trained on, and what is restored when.

Puts together who is there (`RoundReplicas`), which bytes stand for the tip's (`Restoration`), and who keeps bytes
beside the replicas (`RoundMirrors`): no stage is restored from older bytes than a mirror holds of it, as long as the
mirror is there and a replica of the stage can take them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from shoal.ids import Ballot, PeerId
from shoal.swarm.records import Tip
from shoal.swarm.round_effects import CoordinatorEffect, Restored, Stuck
from shoal.swarm.round_mirrors import RoundMirrors
from shoal.swarm.round_replicas import RoundReplicas
from shoal.swarm.round_restoration import Restoration
from shoal.wire.messages.round import Basis, Record, SignedRecord

Effects = list[CoordinatorEffect]


@dataclass(eq=False, repr=False)
class RoundStages:
    """The stages of a run as one coordinator sees them."""

    num_stages: int
    replicas: RoundReplicas
    restoration: Restoration
    mirrors: RoundMirrors
    unseal: Callable[[SignedRecord], Record]

    def without(self, stages: Collection[int]) -> set[int]:
        """The stages that are not among these."""
        return set(range(self.num_stages)) - set(stages)

    def miss(self, stages: Collection[int], now_s: float) -> Effects:
        """These stages have nobody that can be trained on; reported when it changes."""
        return [Stuck(tuple(sorted(stages)))] if self.restoration.miss(stages, now_s) else []

    def lost(self, tip: Tip, now_s: float) -> dict[int, Basis]:
        """What the missing stages go on from whose bytes of a record are gone; not those that may yet come back."""
        if self.mirrors.is_waited_for(self.restoration.patience_s, now_s):
            return {}
        record = None if tip.signed is None else self.unseal(tip.signed)
        kept = self._kept(tip)
        missing = [stage for stage in self.restoration.missing if stage not in kept]
        silent = bool(self.replicas.silent) or self.mirrors.is_silent
        return self.restoration.due(record, missing, self.replicas.here, silent, now_s)

    def doubted(self, tip: Tip, now_s: float) -> set[int]:
        """The stages of a record that are held by nobody but with bytes that they were restored from, while this
        coordinator heard of the record's own a moment ago: that a stage was restored once does not make it so again."""
        outcomes = () if tip.signed is None else self.unseal(tip.signed).stages
        own = {outcome.stage: outcome.hashes for outcome in outcomes}
        there = [here for here in self.replicas.at(tip) if here.stage in own]
        has_own = {here.stage for here in self.replicas.here.values() if here.basis.hashes == own.get(here.stage)}
        doubted = {here.stage for here in there} - has_own
        return {stage for stage in doubted if self.restoration.was_heard(own[stage], now_s)}

    def _kept(self, tip: Tip) -> dict[int, Tip]:
        """Of the missing stages, those whose bytes of a record, or newer ones than any replica has, can be had from
        somebody who keeps them; but not those of which a replica has the bytes already."""
        kept = self.mirrors.kept(tip) if self.restoration.missing else {}
        own = {here.stage: here.basis.hashes for here in self.mirrors.own(tip)} if kept else {}
        has_own = {each.stage for each in self.replicas.here.values() if each.basis.hashes == own.get(each.stage)}
        return {
            stage: kept[stage]
            for stage in self.restoration.missing
            if stage in kept and stage not in has_own
            if stage in own or self.replicas.takers(stage, kept[stage])
        }

    def hint(self, ballot: Ballot, tip: Tip) -> Effects:
        """Tell the replicas of the missing stages what to look for that somebody keeps for them."""
        effects: Effects = []
        for stage, kept in self._kept(tip).items():
            effects += self.replicas.offer_kept(self.replicas.takers(stage, kept), kept, ballot)
        return effects

    def parted(self, tip: Tip) -> set[int]:
        """The missing stages whose bytes of the tip somebody keeps, while all their replicas are of other chains: they
        can fetch them only when the tip is chosen over what they hold."""
        kept = self._kept(tip)
        there = {here.stage for here in self.replicas.here.values()}
        return {
            stage
            for stage, its in kept.items()
            if stage in there and its.hash == tip.hash and not self.replicas.takers(stage, its)
        }

    def watch(self, tip: Tip, now_s: float) -> Effects:
        """Between the records: report what is missing."""
        if self.replicas.told:
            return []
        holders = self.replicas.holders(tip)
        self.restoration.seen(holders)
        return self.miss(self.without(holders.values()), now_s)

    def is_lost(self, tip: Tip, now_s: float) -> bool:
        """Whether some stage is to be restored, by what the replicas have said until now."""
        return not self.replicas.told and bool(self.lost(tip, now_s))

    def restore(self, lost: Mapping[int, Basis], ballot: Ballot, tip: Tip, others: Iterable[PeerId] = ()) -> Effects:
        """These stages go on from these bytes; whoever has them, or has to fetch the record's, is told."""
        effects: Effects = []
        for stage, basis in lost.items():
            effects.append(Restored(stage, tip.round, self.restoration.restore(stage, basis)))
            self.replicas.invite(stage, basis)
        return effects + self.replicas.tell(ballot, tip, others)

    def go_on(self, lost: Mapping[int, Basis], ballot: Ballot, tip: Tip, others: Iterable[PeerId]) -> Effects:
        """A coordinator has chosen the tip: what others have restored for it stays so."""
        before = self.restoration.bases
        everyone = [*self.replicas.here.values(), *self.mirrors.own(tip)]
        self.restoration.bases = self.restoration.continued(self.replicas.at(tip), everyone)
        found = self.restoration.bases.items()
        effects: Effects = [Restored(stage, tip.round, basis) for stage, basis in found if before.get(stage) != basis]
        return effects + self.restore(lost, ballot, tip, others)

    def reconsider(self, peer: PeerId, ballot: Ballot, tip: Tip) -> Effects:
        """A replica with better bytes than those that its stage was restored from has come before the quorums."""
        here = self.replicas.here[peer]
        return self.restore({here.stage: here.basis}, ballot, tip) if self.restoration.is_better(here) else []

    def reconsider_kept(self, ballot: Ballot, tip: Tip) -> Effects:
        """Somebody who keeps the record's own bytes of a stage that was restored has come before the quorums."""
        own = {here.stage: here.basis for here in self.mirrors.own(tip) if self.restoration.is_own(here)}
        return self.restore(own, ballot, tip)
