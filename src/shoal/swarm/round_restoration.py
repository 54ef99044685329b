"""What a stage is trained from when nobody holds the newest record's bytes of it any more, and when that is declared.

    held by some replica --the last one is lost--> missing --certain, or waited for long enough--> restored
          ^                                           |                                               |
          |<-------- a holder comes back -------------'<-- before the quorums of the round are proposed-'
          '<------------------------------- the next record is committed ------------------------------'

A restored stage goes on from the newest bytes that a replica of it has: its *basis*. That is what a replica held that
was left behind, or, of one that was started again, the initial parameters, which follow from seed and configuration.
Bytes are told apart by their hashes alone, so that two of one stage never mix, and only replicas that have exactly the
basis take part until the next record; that one names it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from shoal.ids import PeerId
from shoal.swarm.records import outcome_of
from shoal.swarm.view import NO_BASE
from shoal.wire.messages.round import Basis, Record, StageHashes


class Here(NamedTuple):
    """Who has bytes of a stage: a replica that has answered, a mirror, or a client that keeps them."""

    stage: int
    basis: Basis


class Restoration:
    """The bytes that stand for those of the tip, by stage.

    Args:
        patience_s: how long the machine waits for a holder that may come back.

    Attributes:
        missing: stages that cannot be trained on now, with the time since when (monotonic seconds).
    """

    def __init__(self, patience_s: float) -> None:
        self.bases: dict[int, Basis] = {}
        self.missing: dict[int, float] = {}
        self.patience_s = patience_s
        self._record: Record | None = None
        self._standing: dict[int, Basis] = {}  # the record's own bytes
        self._seen: dict[int, set[PeerId]] = {}
        self._heard_s: dict[StageHashes, float] = {}  # when somebody who has these bytes was heard last

    def begin(self, record: Record | None) -> None:
        """There is a new tip, whose bytes its members hold."""
        self._record = record
        self._standing = {} if record is None else {o.stage: Basis(record.round, o.hashes) for o in record.stages}
        self.bases.clear()
        self._seen.clear()

    def fits(self, here: Here) -> bool:
        """Whether these are the bytes that the stage goes on from. Of D_0 that is `RoundReplicas.compare_starts`."""
        standing = self.standing(here.stage)
        return standing is None or standing.hashes == here.basis.hashes

    def goes_on_from(self, here: Here) -> bool:
        """Whether the stage goes on from these bytes, and from no others."""
        standing = self.standing(here.stage)
        return standing is not None and standing.hashes == here.basis.hashes

    def standing(self, stage: int) -> Basis | None:
        """The bytes that the stage goes on from; None for those of D_0."""
        return self.bases.get(stage) or self._standing.get(stage)

    def seen(self, holders: Mapping[PeerId, int]) -> None:
        """Take note of replicas that hold the tip's bytes."""
        for peer, stage in holders.items():
            if stage not in self.bases:
                self._seen.setdefault(stage, set()).add(peer)

    def hear(self, hashes: StageHashes, now_s: float) -> None:
        """Somebody has these bytes. Who is lost before anything is chosen is waited for from then on."""
        self._heard_s = {each: at_s for each, at_s in self._heard_s.items() if now_s - at_s < self.patience_s}
        self._heard_s[hashes] = now_s

    def was_heard(self, hashes: StageHashes, now_s: float) -> bool:
        """Whether somebody had these bytes a moment ago, so that they may come back."""
        return now_s - self._heard_s.get(hashes, -math.inf) < self.patience_s

    def miss(self, stages: Collection[int], now_s: float) -> bool:
        """Take note of the stages that are missing now; returns whether others were before."""
        was = self.missing
        self.missing = {stage: was.get(stage, now_s) for stage in sorted(stages)}
        return was.keys() != self.missing.keys()

    def wait_anew(self, now_s: float) -> None:
        """Whoever may come back is waited for from now on: nobody has listened before."""
        self.missing = dict.fromkeys(self.missing, now_s)

    def due(
        self, record: Record | None, stages: Iterable[int], here: Mapping[PeerId, Here], silent: bool, now_s: float
    ) -> dict[int, Basis]:
        """For each stage without a holder of `record`, return the bytes that it goes on from.

        If a replica has the record's own bytes all the same, it was left out, or holds the record of another chain that
        names the same bytes. Then the stage goes on from these, also if others have newer ones: those can only be of
        another chain. Else the bytes are certainly lost if all their holders have come back without them. Until then a
        holder may only be frozen or cut off, and the machine waits for it. Of a rebase record, which has no members,
        somebody may hold them who was never seen.

        Args:
            record: the one that stands, or is to stand.
            stages: those to look at; each is in `missing`.
            silent: some known replica, or a mirror, has not answered.
        """
        found: dict[int, Basis] = {}
        for stage in stages:
            outcome = None if record is None else outcome_of(record, stage)
            peers = {peer for peer, each in here.items() if each.stage == stage}
            bases = [here[peer].basis for peer in peers if here[peer].basis.round != NO_BASE]
            if outcome is None or not bases:
                continue
            holders = {*outcome.members, *(self._seen.get(stage, ()) if record == self._record else ())}
            own = [basis for basis in bases if basis.hashes == outcome.hashes]
            is_certain = not silent and not own and bool(holders) and holders <= peers
            since_s = self.missing.get(stage, now_s)
            since_s = since_s if own else max(since_s, self._heard_s.get(outcome.hashes, since_s))
            if is_certain or now_s - since_s >= self.patience_s:
                found[stage] = newest(own or bases)
        return found

    def is_better(self, here: Here) -> bool:
        """Whether these bytes have learnt more than those that the stage was restored from."""
        basis = self.bases.get(here.stage)
        is_own = here.basis.hashes == self._own(here.stage)
        return basis is not None and (is_own or here.basis.round > basis.round)

    def is_own(self, here: Here) -> bool:
        """Whether these are the record's own bytes of a stage that was restored from others."""
        return here.stage in self.bases and here.basis.hashes == self._own(here.stage)

    def restore(self, stage: int, basis: Basis) -> Basis | None:
        """From now on the stage goes on from these bytes; returns them, or None if they are the record's own."""
        if basis.hashes == self._own(stage):
            self.bases.pop(stage, None)
            return None
        self.bases[stage] = basis
        return basis

    def continued(self, holders: Iterable[Here], everyone: Collection[Here]) -> dict[int, Basis]:
        """What other coordinators have restored, from what those say who hold the tip.

        Its own bytes come first, and so whoever has them: also under the record of another chain, where both records
        name the same bytes.
        """
        stages: dict[int, list[Basis]] = {}
        for here in holders:
            stages.setdefault(here.stage, []).append(here.basis)
        have_own = {here.stage for here in everyone if here.basis.hashes == self._own(here.stage)}
        return {
            stage: newest(bases)
            for stage, bases in stages.items()
            if self._record is not None and stage not in have_own
        }

    def _own(self, stage: int) -> StageHashes | None:
        own = self._standing.get(stage)
        return None if own is None else own.hashes


def newest(bases: Iterable[Basis]) -> Basis:
    """The bytes that have learnt most; everybody chooses the same."""
    return min(bases, key=lambda basis: (-basis.round, basis.hashes.parameters, basis.hashes.buffers))
