"""What broke while a run went on, from its first sign to its end, and what it cost. A pure machine.

    lost --> heard last -> noticed --a step of each slot that it hit--> recovered     `TrainingGoesOn` for each slot
                               '----heard again -> takes part again--> back
    audit's lost steps --> `steps_lost_by` --> which of them each loss has cost

A trainer is back with its next generation's hello, and a client when it has heard of its own end. Times are monotonic
seconds of the client's host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from shoal.events.base import Event
from shoal.events.losses import (
    DataServerBack,
    DataServerLost,
    LossFound,
    ServerBack,
    ServerHeard,
    ServerLost,
    TrainerLost,
    TrainerReady,
    TrainingGoesOn,
)
from shoal.events.run import RoundBegun, StepReported
from shoal.events.stages import StageBeganAnew
from shoal.ids import PeerId

_NUM_STEPS = 64
"""So many steps of each slot are remembered, to see where it paused."""


@dataclass
class Incident:
    """One process that was lost.

    Attributes:
        kind: its role.
        round: that was trained.
        began_s: when it was heard last.
        noticed_s: when its loss was known.
        waiting: slots that it has hit and that have committed no step since.
        key: its peer, or the slot of a trainer; empty where there is one of its kind.
        stage: of a server, where it is known.
        recovered_s: when the last of these slots has committed a step.
        back_s: when it, or what was started in its place, took part again.
        replayed: steps that had to be begun again, counted each time.
    """

    kind: str
    who: str
    round: int
    began_s: float
    noticed_s: float
    waiting: set[int]
    key: str = ""
    stage: int | None = None
    is_heard: bool = False
    recovered_s: float | None = None
    back_s: float | None = None
    replayed: int = 0


class LostStep(NamedTuple):
    """A step in which a stage has no part; `peer` is the server that has computed it there."""

    round: int
    stage: int
    peer: PeerId


@dataclass
class Incidents:
    """The machine of one run: it can be written down, and goes on from there.

    Attributes:
        all: in the order in which they were noticed.
    """

    all: list[Incident] = field(default_factory=list[Incident])
    _round: int = 0
    _steps_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def apply(self, event: Event) -> Sequence[Event]:
        """Take what has happened; return what follows from it."""
        match event:
            case RoundBegun() if event.steps:
                self._round = event.round
            case ServerLost():
                self._begin("server", event.who, event.at_s, event.slots, event.silent_s, event.peer, event.stage)
            case TrainerLost():
                who = f"trainer {event.slot}"
                self._begin("trainer", who, event.at_s, (event.slot,), event.silent_s, str(event.slot))
            case DataServerLost():
                self._begin("data_server", "the data server", event.at_s, event.slots)
            case LossFound():
                self._found(event)
            case ServerHeard():
                for incident in self._away("server", event.peer):
                    incident.is_heard = True
            case ServerBack():
                self._back("server", event.peer, event.at_s)
            case TrainerReady():
                self._back("trainer", str(event.slot), event.at_s)
            case DataServerBack():
                self._back("data_server", "", event.at_s)
            case StepReported():
                return self._step(event)
            case _:
                pass
        return ()

    def move(self, by_s: float) -> None:
        """All that has happened was so much later; nobody is waited for any more."""
        for each in self.all:
            each.began_s += by_s
            each.noticed_s += by_s
            each.recovered_s = None if each.recovered_s is None else each.recovered_s + by_s
            each.back_s = None if each.back_s is None else each.back_s + by_s
            each.waiting.clear()
        self._steps_s.clear()

    def is_known(self, found: LossFound, within_s: float) -> bool:
        """Whether a loss of this process was noticed at about that time."""
        process = found.kind, _key(found)
        noticed_s = (each.noticed_s for each in self.all if (each.kind, each.key) == process)
        return any(abs(at_s - found.at_s) <= within_s for at_s in noticed_s)

    def is_away(self, kind: str, key: str) -> bool:
        """Whether a process was lost and has not taken part since."""
        return bool(self._away(kind, key))

    def is_missing(self, peer: PeerId) -> bool:
        """Whether a server is lost, and was not heard since."""
        return any(not each.is_heard for each in self._away("server", peer))

    def returning(self) -> set[PeerId]:
        """The servers that were lost and are heard again, but do not take part yet."""
        return {
            PeerId(each.key) for each in self.all if each.kind == "server" and each.is_heard and each.back_s is None
        }

    def began_s(self, peer: PeerId) -> float:
        """Return when a server that is away was heard last. It may have been lost again before it took part."""
        return min(each.began_s for each in self._away("server", peer))

    def _begin(
        self,
        kind: str,
        who: str,
        at_s: float,
        slots: Iterable[int],
        silent_s: float = 0.0,
        key: str = "",
        stage: int | None = None,
    ) -> Incident:
        waiting = set(slots)
        incident = Incident(kind, who, self._round, at_s - silent_s, at_s, waiting, key, stage)
        # What hits nobody is over at once.
        incident.recovered_s = None if waiting else at_s
        self.all.append(incident)
        return incident

    def _found(self, event: LossFound) -> None:
        incident = self._begin(event.kind, event.who, event.at_s, event.slots, key=_key(event))
        if event.kind == "client":
            incident.back_s = event.found_s

    def _away(self, kind: str, key: str) -> list[Incident]:
        return [each for each in self.all if (each.kind, each.key, each.back_s) == (kind, key, None)]

    def _back(self, kind: str, key: str, at_s: float) -> None:
        for incident in self._away(kind, key):
            incident.back_s = at_s

    def _step(self, event: StepReported) -> Sequence[Event]:
        """A step may have been committed before a loss of which the client has heard earlier."""
        slot, at_s = event.slot, event.at_s
        steps_s = self._steps_s.setdefault(slot, [])
        steps_s.append(at_s)
        del steps_s[:-_NUM_STEPS]
        due = [each for each in self.all if slot in each.waiting and at_s >= each.noticed_s]
        for incident in due:
            incident.waiting.discard(slot)
            if not incident.waiting:
                incident.recovered_s = at_s
        # Trainers do not stop for a client.
        stopped = [each for each in due if each.kind != "client"]
        if not stopped:
            return ()
        # Of several losses at once nobody can tell which has made it begin again.
        stopped[0].replayed += event.attempt
        paused_s = _longest_pause_s(steps_s, min(each.began_s for each in stopped))
        names = dict.fromkeys(each.who for each in stopped)
        return (TrainingGoesOn(slot, round(paused_s, 3), tuple(names)),)


def _key(found: LossFound) -> str:
    return str(found.slots[0]) if found.kind == "trainer" else found.peer


def steps_lost_by(
    incidents: Sequence[Incident], lost: Iterable[LostStep], restored: Sequence[StageBeganAnew]
) -> tuple[list[int], int]:
    """Return how many steps each incident has cost, and how many were lost for another reason.

    A server's steps are gone with it if it is lost in their round; those of the rounds before only if nobody else had
    their state either: then they are gone with the last server of the stage.
    """
    costs = [0] * len(incidents)
    others = 0
    for step in lost:
        index = _cause(incidents, step, restored)
        if index is None:
            others += 1
        else:
            costs[index] += 1
    return costs, others


def _cause(incidents: Sequence[Incident], step: LostStep, restored: Sequence[StageBeganAnew]) -> int | None:
    servers = [(index, each) for index, each in enumerate(incidents) if each.kind == "server"]
    for index, incident in reversed(servers):
        if incident.key == step.peer and incident.round == step.round:
            return index
    for again in restored:
        if again.stage == step.stage and again.base_round < step.round < again.in_round:
            last = [index for index, each in servers if each.stage == step.stage and each.round <= again.in_round]
            return last[-1] if last else None
    return None


def _longest_pause_s(steps_s: Sequence[float], since_s: float) -> float:
    """Return the longest time without a step that has ended since: the first step may have come before the notice."""
    known_s = sorted((since_s, *steps_s)) if min(steps_s) > since_s else steps_s
    return max((now_s - before_s for before_s, now_s in pairwise(known_s) if now_s > since_s), default=0.0)
