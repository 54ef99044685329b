"""The rules of a run that is resumed, each left out on purpose, with the first seed that notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.simulation.round.lost_commits import LostCommitWorld as World
from tests.simulation.round.resuming import Keeping

from shoal.ids import NO_BALLOT
from shoal.swarm.records import Tip
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_mirrors import RoundMirrors
from shoal.swarm.sample_ranges import Ranges
from shoal.wire.messages.round import Record, SignedRecord

Make = Callable[[int], World]


class BeginsWithD0(RoundCoordinatorMachine):
    """Does not know of the record that it is given."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments[:7])


class BeginsBelowTheRecord(RoundCoordinatorMachine):
    """Takes its first ballot as if there had been none before."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.highest = NO_BALLOT


class _KeepsNothing(RoundMirrors):
    def keep(self, stage: int, tip: Tip | None) -> None:
        """It has none."""


class RestoresWhatItsClientKeeps(RoundCoordinatorMachine):
    """Does not count what its client has of the stages."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mirrors.__class__ = _KeepsNothing
        self.keep = self._mirrors.keep


class SaysWhatItHasRead(Keeping):
    """Tells its coordinator of a stage only when that is read."""

    def say(self, stages: dict[int, str]) -> None:
        """It waits."""


class PassesMirrorsOver(RoundCoordinatorMachine):
    """Begins with a record that no replica holds though a mirror that is there has not answered yet."""

    def _is_held(self, tip: Tip) -> bool:
        return True


class ResumesForEver(Keeping):
    """Begins each start with the checkpoint's record, also when the run has gone on."""

    @staticmethod
    def still_resumes(resumed: SignedRecord | None, base: str) -> SignedRecord | None:
        return resumed


class KeepsUntilALaterRecord(Keeping):
    """Drops what it has of the stages when a later record stands, though no server holds that."""

    def release(self) -> None:
        """All at once."""
        if self.client.machine.tip.round > self.checkpoint.tip.round:
            for stage in self.checkpoint.theta:
                self.copies.pop(stage, None)
                self.client.machine.keep(stage, None)


class FreesAllSamples(Keeping):
    """Has the data server begin as if nothing was trained."""

    @staticmethod
    def used(record: Record) -> Ranges:
        return ()


class RecordsFromNothing(RoundCoordinatorMachine):
    """Does not know which samples the records have until then."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._recorded = ()


def _make(first_seed: int, **classes: type) -> tuple[Make, int]:
    return lambda seed: World(seed, **classes), first_seed


MUTANTS: dict[str, tuple[Make, int]] = {
    mutant.__name__: _make(first_seed, coordinator_class=mutant)
    for mutant, first_seed in (
        (BeginsWithD0, 11),
        (BeginsBelowTheRecord, 85),
        (RestoresWhatItsClientKeeps, 85),
        (RecordsFromNothing, 11),
        (PassesMirrorsOver, 28),
    )
}
MUTANTS |= {
    mutant.__name__: _make(first_seed, keeping_class=mutant)
    for mutant, first_seed in (
        (SaysWhatItHasRead, 181),
        (FreesAllSamples, 11),
        (ResumesForEver, 46),
        (KeepsUntilALaterRecord, 181),
    )
}
