"""The rules of mirrors, each left out on purpose, with the first seed that notices. `test_mutants.py` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from tests.simulation.round.lost_commits import LostCommitWorld
from tests.simulation.round.world import World
from tests.simulation.split.world import SplitWorld

from shoal.ids import Ballot, PeerId
from shoal.swarm.mirror import Effects as MirrorEffects
from shoal.swarm.mirror import MirrorMachine
from shoal.swarm.records import Tip
from shoal.swarm.round_coordinator import RoundCoordinatorMachine
from shoal.swarm.round_effects import CoordinatorEffect
from shoal.swarm.round_mirrors import RoundMirrors
from shoal.swarm.round_replicas import RoundReplicas
from shoal.swarm.round_stages import RoundStages
from shoal.wire.messages.mirror import Follow

Make = Callable[[int], World]


class _KnowsOfNothingKept(RoundStages):
    def _kept(self, tip: Tip) -> dict[int, Tip]:
        return {}


class RestoresWhatIsMirrored(RoundCoordinatorMachine):
    """Restores a stage though a mirror holds newer bytes of it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._stages.__class__ = _KnowsOfNothingKept


class _IsNeverSilent(RoundMirrors):
    @property
    def is_silent(self) -> bool:
        return False


class WaitsForNoMirror(RoundCoordinatorMachine):
    """Restores a stage, or begins with D_0, though a mirror that is there has not answered yet."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mirrors.__class__ = _IsNeverSilent


class _OnlyTells(RoundMirrors):
    def tell(self, ballot: Ballot, stands: Tip | None) -> list[CoordinatorEffect]:
        return [] if stands is None else super().tell(ballot, stands)


class AsksNoMirror(RoundCoordinatorMachine):
    """Does not ask the mirrors when it takes over, but only tells them what it has chosen."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mirrors.__class__ = _OnlyTells


class _OffersNothing(RoundReplicas):
    def offer_kept(self, takers: Iterable[PeerId], kept: Tip, ballot: Ballot) -> list[CoordinatorEffect]:
        return []


class HintsNothingThatIsKept(RoundCoordinatorMachine):
    """Does not tell newcomers of the older record whose bytes a mirror holds."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._replicas.__class__ = _OffersNothing


class _LosesNobody(RoundMirrors):
    def lose(self, peer: PeerId) -> None:
        self.unanswered.add(peer)


class CountsMirrorsThatAreGone(RoundCoordinatorMachine):
    """Goes on counting what a mirror held whose connection has ended."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mirrors.__class__ = _LosesNobody


class _KnowsNoRecords(RoundMirrors):
    @property
    def tips(self) -> set[Tip]:
        return set()


class ForgetsMirroredRecords(RoundCoordinatorMachine):
    """Does not take what mirrors hold for committed."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mirrors.__class__ = _KnowsNoRecords


class _ToldOnce(RoundMirrors):
    def repeat(self, to_all: bool) -> list[CoordinatorEffect]:
        return []


class RepeatsNoFollow(RoundCoordinatorMachine):
    """Does not tell a mirror anew that was lost."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mirrors.__class__ = _ToldOnce


class SaysWhatItHasNotFetched(MirrorMachine):
    """Counts a stage as held as soon as it is told of the record."""

    def follow(self, peer: PeerId, message: Follow) -> MirrorEffects:
        effects = super().follow(peer, message)
        self.held |= {stage: tip for stage, (_, tip) in self._wanted.items()}
        return effects


class GoesBack(MirrorMachine):
    """Follows whatever it is told, also what is older than what it holds."""

    def _goes_on(self, held: Tip, tip: Tip, instead_of: str) -> bool:
        return held.hash != tip.hash


class StaysOnItsChain(MirrorMachine):
    """Leaves no chain that was not chosen."""

    def _goes_on(self, held: Tip, tip: Tip, instead_of: str) -> bool:
        return super()._goes_on(held, tip, "")


def _make(first_seed: int, world: type[World] = LostCommitWorld, **classes: type) -> tuple[Make, int]:
    return lambda seed: world(seed, **classes), first_seed  # type: ignore[arg-type]


MUTANTS: dict[str, tuple[Make, int]] = {
    mutant.__name__: _make(first_seed, coordinator_class=mutant)
    for mutant, first_seed in (
        (RestoresWhatIsMirrored, 0),
        (WaitsForNoMirror, 15),
        (AsksNoMirror, 32),
        (HintsNothingThatIsKept, 67),
        (CountsMirrorsThatAreGone, 44),
        (ForgetsMirroredRecords, 15),
        (RepeatsNoFollow, 11),
    )
}
MUTANTS |= {
    mutant.__name__: _make(first_seed, mirror_class=mutant) for mutant, first_seed in ((SaysWhatItHasNotFetched, 0),)
}
MUTANTS |= {
    mutant.__name__: _make(first_seed, SplitWorld, mirror_class=mutant)
    for mutant, first_seed in ((GoesBack, 22), (StaysOnItsChain, 28))
}
