"""The rules of rounds, each left out on purpose, with the first seed that notices. `test_mutants.py` runs them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
from tests.simulation.round.hosts import ClientHost, ReplicaHost
from tests.simulation.round.lost_commits import LostCommitWorld as World

from shoal.ids import NO_BALLOT, Ballot, PeerId
from shoal.swarm.records import Tip
from shoal.swarm.round_coordinator import Effects as CoordinatorEffects
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import Send
from shoal.swarm.round_member import Effects as MemberEffects
from shoal.swarm.round_member import RoundMemberMachine
from shoal.swarm.round_preparation import RecordPreparation
from shoal.swarm.round_quorums import StageQuorum
from shoal.swarm.round_replicas import RoundReplicas
from shoal.swarm.round_restoration import Here, Restoration
from shoal.swarm.round_settings import CloseRequest
from shoal.wire.messages.round import (
    Basis,
    OrderNamed,
    OrderPassed,
    Propose,
    Record,
    RecordPrepared,
    Resolve,
    RoundMessage,
    RoundState,
    SignedRecord,
    Staged,
    StageHashes,
)

Make = Callable[[int], World]


class NoPreparation(RoundCoordinatorMachine):
    """Commits as soon as everyone has staged."""

    def journaled(self, digest: str) -> CoordinatorEffects:
        if not super().journaled(digest):
            return []
        for peer in self._quorums.members:
            self._preparation.note(peer, RecordPrepared(self.ballot, self.tip.round + 1, digest))
        return self._advance(self._since_s)


class NoJournal(RoundCoordinatorMachine):
    """Has a record prepared while its step logs are still being written."""

    def _prepare(self) -> CoordinatorEffects:
        [journal] = super()._prepare()
        return [journal, *self.journaled(journal.digest)]


class WantsNoCheckpoint(RoundCoordinatorMachine):
    """Forgets that its client wants a checkpoint of the record."""

    def _prepare(self) -> CoordinatorEffects:
        if self._asked is not None:
            self._asked = replace(self._asked, keep=False)
        return super()._prepare()


class NoTakeoverOfPreparedRecords(RoundCoordinatorMachine):
    """Does not finish what replicas hold when it takes over."""

    def _state(self, peer: PeerId, state: RoundState, now_s: float) -> CoordinatorEffects:
        return super()._state(peer, msgspec.structs.replace(state, prepared=None), now_s)


class NoEpochs(RoundCoordinatorMachine):
    """Takes what was staged for an earlier quorum of the round as if it were for the present one."""

    def _staged(self, peer: PeerId, message: Staged) -> CoordinatorEffects:
        quorum = self._quorums.get(message.stage)
        return super()._staged(peer, msgspec.structs.replace(message, epoch=quorum.epoch if quorum else 0))


class AbortsDoubts(RoundCoordinatorMachine):
    """Aborts every step in doubt, whoever holds it."""

    def _settle(self, request: CloseRequest, now_s: float) -> CoordinatorEffects:
        return [
            Send(effect.peer, msgspec.structs.replace(effect.message, commit=False))
            if isinstance(effect, Send) and isinstance(effect.message, Resolve)
            else effect
            for effect in super()._settle(request, now_s)
        ]


class AsksOnce(RoundCoordinatorMachine):
    """Never repeats what was not answered."""

    def tick(self, now_s: float) -> CoordinatorEffects:
        self._tick_at_s = now_s + 1.0
        return []


class RepeatsSeldom(RoundCoordinatorMachine):
    """Repeats what was not answered, but only after many times as long as configured."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.settings = replace(self.settings, retry_s=40 * self.settings.retry_s)


class NoHashCheck(RoundMemberMachine):
    """Swaps whatever was staged last."""

    def _staged_for(self, record: Record) -> StageHashes | None:
        return list(self.staged.values())[-1] if self.staged else None


class NoPromise(RoundMemberMachine):
    """Follows every ballot, also one below that which it has answered."""

    def receive(self, peer: PeerId, message: RoundMessage) -> MemberEffects:
        self.promised = NO_BALLOT
        return super().receive(peer, message)


class FetchesOnce(RoundMemberMachine):
    """Goes on fetching the state of a record when a newer one is committed."""

    def _fetch(self, signed: SignedRecord, record: Record, reason: str) -> MemberEffects:
        return super()._fetch(signed, record, reason) if self.fetching is None else [self._state(reason)]


class AnyBytesWillDo(Restoration):
    """Takes whoever says that it holds the record, whichever bytes it has."""

    def fits(self, here: Here) -> bool:
        return True


class WaitsForNobody(Restoration):
    """Restores a stage as soon as nobody who is there has its bytes."""

    def due(
        self, record: Record | None, stages: Iterable[int], here: Mapping[PeerId, Here], silent: bool, now_s: float
    ) -> dict[int, Basis]:
        return super().due(record, stages, here, silent, now_s + 1e6)


class MixesBases(RoundCoordinatorMachine):
    """Lets restored replicas and holders of the record's bytes into one quorum."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._restoration.__class__ = AnyBytesWillDo


class TakesAnyStart(RoundCoordinatorMachine):
    """Averages what was trained from different initial parameters."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._replicas.compare_starts = lambda _: []


class RestoresAtOnce(RoundCoordinatorMachine):
    """Does not wait for those who may come back."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._restoration.__class__ = WaitsForNobody


class NamesNoBases(RoundCoordinatorMachine):
    """Does not say in the record what a stage was restored from."""

    def _prepare(self) -> CoordinatorEffects:
        bases, self._restoration.bases = self._restoration.bases, {}
        effects = super()._prepare()
        self._restoration.bases = bases
        return effects


class GivesRestoredBytes(RoundMemberMachine):
    """Gives what its stage was restored from as if it were the record's bytes."""

    @property
    def is_restored(self) -> bool:
        return False


class CommitsBeforeAnybodySwaps(RoundCoordinatorMachine):
    """Says that a record is committed when all have prepared it: a successor may still have to drop that."""

    def _set_tip(self, tip: Tip) -> None:
        super()._set_tip(tip)
        self._early = self._say()

    def _advance(self, now_s: float) -> CoordinatorEffects:
        self._early: CoordinatorEffects = []
        effects = super()._advance(now_s)
        return effects + self._early


class SwapsByAnyName(RoundMemberMachine):
    """Takes what it has prepared for what is committed, whatever the name of that is."""

    def _known(self, digest: str) -> SignedRecord | None:
        return super()._known(digest) if self.prepared is None else self.prepared


class _NamesFirst(RoundReplicas):
    lacking: set[PeerId]

    def answer(self, peer: PeerId, state: RoundState) -> Tip:
        if peer in self._named:
            self.lacking.add(peer)
        return super().answer(peer, state)

    def _has(self, peer: PeerId, tip: Tip) -> bool:
        return super()._has(peer, tip) or peer not in self.lacking


class NamesFirst(RoundCoordinatorMachine):
    """Tells everybody a record's name first, and all of it to those that answer: slower, and as safe, so no mutant."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._replicas.__class__ = _NamesFirst
        self._replicas.lacking = set[PeerId]()  # type: ignore[attr-defined]


class _TakesAllForHolders(RoundReplicas):
    def _has(self, peer: PeerId, tip: Tip) -> bool:
        return True


class NamesAlone(RoundCoordinatorMachine):
    """Tells the name of a record alone also to those that lack it, and say so."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._replicas.__class__ = _TakesAllForHolders


class _RemembersTheDead(RoundReplicas):
    def lose(self, peer: PeerId) -> None:
        digest = self._prepared.get(peer, "")
        super().lose(peer)
        self._prepared[peer] = digest

    def prepared(self, peer: PeerId, digest: str) -> None:
        if digest:
            super().prepared(peer, digest)


class NamesWhatIsGone(RoundCoordinatorMachine):
    """Takes whoever has prepared a record for one that has it, also when it has begun anew since."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._replicas.__class__ = _RemembersTheDead


class BelievesWhatIsPassedOn(RoundMemberMachine):
    """Does what others pass on as the coordinator's order, whether that has named it or not."""

    def receive(self, peer: PeerId, message: RoundMessage) -> MemberEffects:
        if isinstance(message, OrderPassed):
            self._orders.named(OrderNamed(self.promised, hashlib.sha256(message.order).digest()))
        return super().receive(peer, message)


class _TellsOnce(RecordPreparation):
    def repeat(self, ballot: Ballot, members: Collection[PeerId], now_s: float) -> list[Send]:
        return []


class LeavesRecordsToOthers(RoundCoordinatorMachine):
    """Never tells a record itself to those to whom nobody has passed it on."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._preparation.__class__ = _TellsOnce


class LeavesQuorumsToOthers(RoundCoordinatorMachine):
    """Has a quorum that does not end passed on again, by the same."""

    def _propose(self, quorum: StageQuorum) -> CoordinatorEffects:
        quorum.is_told = False
        return super()._propose(quorum)


class CountsItsStarts(ClientHost):
    """Has the generation that follows the one on its disk, which a power failure takes back."""

    def generation(self) -> int:
        start = self.disk.read("start", 0) + 1
        self.disk.write("start", start)
        return start


class AveragesInPlace(ReplicaHost):
    """What the ring has made is the replica's state at once, before anything is committed."""

    def _ring(self) -> None:
        super()._ring()
        if self.quorum is None and self.staged:
            self.theta = list(self.staged.values())[-1]


class TagsNoEpochs(ReplicaHost):
    """Frames of a ring do not say of which epoch they are."""

    def _tag(self, quorum: Propose) -> tuple[object, ...]:
        return (quorum.round, quorum.ballot)


def _make(first_seed: int, **classes: type) -> tuple[Make, int]:
    return lambda seed: World(seed, **classes), first_seed  # type: ignore[arg-type]


MUTANTS: dict[str, tuple[Make, int]] = {
    mutant.__name__: _make(first_seed, coordinator_class=mutant)
    for mutant, first_seed in (
        (NoPreparation, 1483),
        (NoJournal, 2),
        (WantsNoCheckpoint, 0),
        (NoTakeoverOfPreparedRecords, 952),
        (NoEpochs, 7),
        (AbortsDoubts, 437),
        (AsksOnce, 1),
        (RepeatsSeldom, 17),
        (MixesBases, 58),
        (TakesAnyStart, 9),
        (NamesNoBases, 9),
        (CommitsBeforeAnybodySwaps, 37),
        (NamesAlone, 1),
        (NamesWhatIsGone, 23),
        (LeavesRecordsToOthers, 3),
        (LeavesQuorumsToOthers, 3),
    )
}
MUTANTS |= {
    mutant.__name__: _make(first_seed, member_class=mutant)
    for mutant, first_seed in (
        (NoHashCheck, 1),
        (NoPromise, 0),
        (FetchesOnce, 9),
        (GivesRestoredBytes, 9),
        (BelievesWhatIsPassedOn, 41),
    )
}
MUTANTS |= {
    mutant.__name__: _make(first_seed, host_class=mutant)
    for mutant, first_seed in ((AveragesInPlace, 0), (TagsNoEpochs, 1))
}
MUTANTS["SwapsByAnyName"] = _make(5, coordinator_class=NamesFirst, member_class=SwapsByAnyName)
MUTANTS["CountsItsStarts"] = _make(68, client_class=CountsItsStarts)
