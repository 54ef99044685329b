"""The rules of the account, each left out on purpose, with the first seed that notices (`test_mutants.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.simulation.incidents.world import World

from shoal.events.base import Event
from shoal.events.incidents import IncidentClosed, IncidentOpened, StepsLost, TroubleSeen
from shoal.events.losses import LossFound, ServerLost
from shoal.events.stages import StageBeganAnew
from shoal.ids import PeerId
from shoal.swarm.incidents import Incident, Incidents


class ClosesBeforeTheCostIsKnown(Incidents):
    """Does not wait for the record of the round in which something was lost."""

    def _open(self, incident: Incident, what: str, *, shown: bool = True) -> IncidentOpened:
        incident.recorded_in = self._round
        return super()._open(incident, what, shown=shown)


class ForgetsWhatWasTold(Incidents):
    """A client that was started again tells once more what the one before has told since the round began."""

    def _goes_on(self, event: Event) -> None:
        if not isinstance(event, IncidentClosed):
            super()._goes_on(event)


class TakesWhoLeavesForLost(Incidents):
    """Opens another incident when a server that leaves has gone."""

    def _server_lost(self, event: ServerLost) -> Sequence[Event]:
        return (self._lost("server", event, event.slots, event.peer),)


class WaitsForNoTrainer(Incidents):
    """Takes what is back for over, though a trainer that it has hit has committed nothing since."""

    def apply(self, event: Event) -> Sequence[Event]:
        for incident in self.all:
            if incident.back_s is not None and incident.is_loss:
                incident.waiting.clear()
        return super().apply(event)


class CountsEachRecordTwice(Incidents):
    """Adds the steps of each record again."""

    def _recorded(self, event: StepsLost) -> None:
        super()._recorded(event)
        super()._recorded(event)


class SeesTroubleAnew(Incidents):
    """Opens an incident for each report of the same trouble."""

    def _trouble(self, event: TroubleSeen) -> Sequence[Event]:
        known, self._unsettled = self._unsettled, {}
        opened = super()._trouble(event)
        self._unsettled = known | self._unsettled
        return opened


class DoesNotWaitForWhatBeginsAnew(Incidents):
    """Closes the loss of a stage's last server before the record says what the stage has lost."""

    def _begins_anew(self, event: StageBeganAnew) -> None:
        super()._begins_anew(event)
        for incident in self.all:
            incident.due_in = 0


class PutsWhatBeganAnewDownToNobody(Incidents):
    """Does not remember whose loss it was that a stage has begun anew."""

    def _begins_anew(self, event: StageBeganAnew) -> None:
        super()._begins_anew(event)
        for incident in self.all:
            incident.anew_in.clear()


class ForgetsTheLastServerOfAStage(Incidents):
    """Puts the steps of a stage that has begun anew down to nobody."""

    def _recorded(self, event: StepsLost) -> None:
        own = tuple(steps for steps in event.lost if steps.round == event.round)
        super()._recorded(StepsLost(event.round, own))


class ForgetsWhoLeaves(Incidents):
    """Does not notice that a server has left of which the registry says nothing any more."""

    def stage_left_by(self, peer: PeerId) -> int | None:
        return None


class TakesTwoForOne(Incidents):
    """Takes a process that has ended twice while nobody saw it back for the one that was noticed."""

    def unknown(self, found: Sequence[LossFound], within_s: float) -> list[LossFound]:
        return [each for loss in found for each in super(TakesTwoForOne, self).unknown([loss], within_s)]


def _make(machine: type[Incidents]) -> Callable[[int], World]:
    return lambda seed: World(seed, machine)


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    mutant.__name__: (_make(mutant), first_seed)
    for mutant, first_seed in (
        (ClosesBeforeTheCostIsKnown, 0),
        (ForgetsWhatWasTold, 9),
        (TakesWhoLeavesForLost, 0),
        (WaitsForNoTrainer, 0),
        (CountsEachRecordTwice, 0),
        (SeesTroubleAnew, 3),
        (DoesNotWaitForWhatBeginsAnew, 9),
        (PutsWhatBeganAnewDownToNobody, 0),
        (ForgetsTheLastServerOfAStage, 0),
        (ForgetsWhoLeaves, 0),
        (TakesTwoForOne, 773),
    )
}
