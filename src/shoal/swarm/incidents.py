"""What broke while a run went on, from its first sign to its end, and what it cost. A pure machine.

    lost --> heard last -> noticed --a step of each slot that it hit--> recovered     `TrainingGoesOn` for each slot
                               |----heard again -> takes part again--> back
                               |----the next record is written down--> steps lost
                               '--> `IncidentOpened`        all of these --> `IncidentClosed`
    seen --> `IncidentOpened` --over--> `IncidentClosed`    of trouble by which nobody is lost
    audit's lost steps --> `steps_lost_by` --> which of them each loss has cost

A trainer is back with its next generation's hello, and a client when it has heard of its own end. What is open when the
run ends is closed then (`end`). Times are monotonic seconds of the client's host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from shoal.events.base import Event
from shoal.events.incidents import (
    REPORTED,
    TROUBLES,
    Cause,
    IncidentClosed,
    IncidentOpened,
    LossExplained,
    StepsLost,
    TroubleOver,
    TroubleSeen,
)
from shoal.events.losses import (
    ClientReplaced,
    DataServerBack,
    DataServerLost,
    LossFound,
    ServerBack,
    ServerHeard,
    ServerLeaving,
    ServerLost,
    TrainerLost,
    TrainerReady,
    TrainingGoesOn,
)
from shoal.events.run import RoundBegun, StepReported
from shoal.events.stages import ChainLost, StageBeganAnew
from shoal.ids import PeerId

_NUM_STEPS = 64
"""So many steps of each slot are remembered, to see where it paused."""
_ANY_SLOT = -1
"""Training goes on with the first step of anybody."""


@dataclass
class Incident:
    """One process that was lost, or somebody with whom something was wrong.

    Attributes:
        kind: its role.
        round: that was trained.
        began_s: when it was heard last.
        noticed_s: when its loss was known.
        waiting: slots that it has hit and that have committed no step since.
        key: its peer, or the slot of a trainer; empty where there is one of its kind.
        stage: of a server, where it is known.
        hit: how many slots it has hit.
        recovered_s: when the last of these slots has committed a step.
        back_s: when it, or what was started in its place, took part again; of trouble, when it was over.
        gone_s: when a server that has left was not there any more.
        gone_in: the round that was trained then.
        replayed: steps that had to be begun again, however often each of them was.
        steps_lost: as far as records that are written down say.
        recorded_in: the round of the first record that was written down since it was noticed; 0: there is none yet.
        due_in: the record of this round will say what its stage has lost, which begins anew; 0: none will.
        anew_in: rounds in which its stage has begun anew while it was open: what is lost by that, it has cost.
        is_closed: its end has been told.
        is_explained: a server that is heard again has said what it had counted.
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
    cause: Cause = Cause.ENDED
    host: str = ""
    hit: int = 0
    gone_s: float | None = None
    gone_in: int = 0
    steps_lost: int = 0
    recorded_in: int = 0
    due_in: int = 0
    anew_in: list[int] = field(default_factory=list[int])
    is_closed: bool = False
    is_explained: bool = False

    @property
    def is_loss(self) -> bool:
        """Whether somebody who took part is not there any more, or was not."""
        if self.cause in (*TROUBLES, Cause.TAKEN_OVER):
            return False
        return self.cause != Cause.LEFT or self.gone_s is not None

    @property
    def ended_s(self) -> float | None:
        """When it was back, or over, or gone who has left; None: not yet."""
        return self.gone_s if self.cause == Cause.LEFT else self.back_s

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        if self.ended_s is None or self.waiting:
            return False
        return not self.is_loss or (bool(self.recorded_in) and not self.due_in)

    @property
    def is_settled(self) -> bool:
        """Whether no event changes it any more; one that has left may yet come back."""
        return self.is_closed and self.back_s is not None

    def closed(self, number: int) -> IncidentClosed:
        """Return what is told at its end."""
        return IncidentClosed(
            number=number,
            kind=self.kind,
            cause=self.cause,
            who=self.who,
            host=self.host,
            stage=self.stage,
            round=self.round,
            noticed_after_s=round(self.noticed_s - self.began_s, 3),
            recovered_after_s=self.after_s(self.recovered_s),
            back_after_s=self.after_s(self.ended_s),
            steps_lost=self.steps_lost,
            replayed=self.replayed,
            hit=self.hit,
        )

    def after_s(self, at_s: float | None) -> float | None:
        """Return how long after its first sign that was; None: it was not."""
        return None if at_s is None else round(at_s - self.began_s, 3)


class LostStep(NamedTuple):
    """A step in which a stage has no part; `peer` is the server that has computed it there, and `in_round` the record
    since which it is lost: that of its own round, or that with which the stage has begun anew."""

    round: int
    stage: int
    peer: PeerId
    in_round: int


@dataclass
class Incidents:
    """The machine of one run: it can be written down, and goes on from there.

    Attributes:
        all: in the order in which they were noticed.
    """

    all: list[Incident] = field(default_factory=list[Incident])
    _round: int = 0
    _steps_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    def __post_init__(self) -> None:
        # Each step looks at these alone: in weeks there are ten thousands, of links that come and go.
        self._unsettled = {number: each for number, each in enumerate(self.all, 1) if not each.is_settled}

    def apply(self, event: Event) -> Sequence[Event]:
        """Take what has happened; return what follows from it."""
        following = [*self._take(event)]
        for number, incident in list(self._unsettled.items()):
            if not incident.is_closed and incident.is_over:
                incident.is_closed = True
                following.append(incident.closed(number))
            if incident.is_settled:
                del self._unsettled[number]
        return following

    def _take(self, event: Event) -> Sequence[Event]:
        match event:
            case RoundBegun() if event.steps:
                self._round = event.round
                self._go_on_without()
            case ServerLost():
                return self._server_lost(event)
            case TrainerLost():
                return (self._lost("trainer", event, (event.slot,), str(event.slot)),)
            case DataServerLost():
                return (self._lost("data_server", event, event.slots),)
            case LossFound():
                return (self._found(event),)
            case ClientReplaced():
                return (self._replaced(event),)
            case ServerLeaving():
                return self._leaving(event)
            case TroubleSeen():
                return self._trouble(event)
            case ChainLost():
                return (self._apart(event),)
            case StepReported():
                return self._step(event)
            case _:
                self._goes_on(event)
        return ()

    def _goes_on(self, event: Event) -> None:
        """Take what has happened to who is known to be away."""
        match event:
            case ServerHeard():
                for incident in self._away("server", event.peer):
                    incident.is_heard = True
            case ServerBack():
                self._back("server", event.peer, event.at_s)
            case TrainerReady():
                self._back("trainer", str(event.slot), event.at_s)
            case DataServerBack():
                self._back("data_server", "", event.at_s)
            case LossExplained():
                for incident in self._away("server", event.peer):
                    incident.is_explained = True
                    incident.cause = incident.cause if incident.cause == Cause.LEFT else event.cause
            case TroubleOver():
                self._trouble_over(event.peer, event.at_s, (event.cause,))
            case StageBeganAnew():
                self._begins_anew(event)
            case StepsLost():
                self._recorded(event)
            case IncidentClosed() if 0 < event.number <= len(self.all):
                self.all[event.number - 1].is_closed = True
            case _:
                pass

    @property
    def wants_costs(self) -> bool:
        """Whether the next record tells what a loss has cost."""
        return any(each.is_loss and (not each.recorded_in or each.due_in) for each in self._unsettled.values())

    def end(self, costs: Sequence[int]) -> Sequence[IncidentClosed]:
        """The run ends: return what is told of those that are open.

        Args:
            costs: how many steps each incident has cost, see `steps_lost_by`.
        """
        following: list[IncidentClosed] = []
        for number, (incident, steps_lost) in enumerate(zip(self.all, costs, strict=True), 1):
            if not incident.is_closed:
                incident.is_closed, incident.steps_lost = True, steps_lost
                following.append(incident.closed(number))
        return following

    def move(self, by_s: float, now_s: float) -> None:
        """All that has happened was so much later; what was open is over now, with other processes."""
        for each in self.all:
            is_open = each.ended_s is None
            each.began_s += by_s
            each.noticed_s += by_s
            each.recovered_s = None if each.recovered_s is None else each.recovered_s + by_s
            each.back_s = None if each.back_s is None else each.back_s + by_s
            each.gone_s = None if each.gone_s is None else each.gone_s + by_s
            each.waiting.clear()
            if each.hit and each.recovered_s is None:
                each.recovered_s = now_s
            each.back_s = now_s if each.back_s is None else each.back_s
            if is_open and each.cause == Cause.LEFT:
                each.gone_s = now_s
        self._steps_s.clear()

    def unknown(self, found: Sequence[LossFound], within_s: float) -> list[LossFound]:
        """Return those losses of processes that were not noticed, in order: each that was is an incident of its own.

        A loss is noticed at the latest so long afterwards, and the process is away then. Of a client nobody notices
        that it has ended before it is there again: that one must have been noted itself.
        """
        unclaimed, unknown = list(self.all), list[LossFound]()
        for loss in sorted(found, key=lambda loss: loss.at_s):
            known = next((each for each in unclaimed if _is_of(each, loss, within_s)), None)
            if known is None:
                unknown.append(loss)
            else:
                unclaimed.remove(known)
        return unknown

    def is_away(self, kind: str, key: str) -> bool:
        """Whether a process was lost and has not taken part since."""
        return bool(self._away(kind, key))

    def is_missing(self, peer: PeerId) -> bool:
        """Whether a server is lost, and was not heard since."""
        return any(not each.is_heard for each in self._away("server", peer))

    def stage_left_by(self, peer: PeerId) -> int | None:
        """Return the stage of a server that leaves, and is not gone yet."""
        return next((each.stage for each in self._unsettled.values() if _leaves(each, peer)), None)

    def returning(self) -> set[PeerId]:
        """The servers that were lost and are heard again, but do not take part yet."""
        return {
            PeerId(each.key)
            for each in self._unsettled.values()
            if each.kind == "server" and each.is_loss and each.is_heard and each.back_s is None
        }

    def is_unexplained(self, peer: PeerId) -> bool:
        """Whether a server was lost and is heard again, and it is not known yet what it had."""
        return any(each.is_heard and not each.is_explained for each in self._away("server", peer))

    def troubled(self, cause: Cause) -> set[PeerId]:
        """With whom this is wrong now."""
        return {PeerId(each.key) for each in self._unsettled.values() if each.cause == cause and each.back_s is None}

    def began_s(self, peer: PeerId) -> float:
        """Return when a server that is away was heard last. It may have been lost again before it took part."""
        return min(each.began_s for each in self._away("server", peer))

    def _open(self, incident: Incident, what: str, *, shown: bool = True) -> IncidentOpened:
        incident.round, incident.hit = self._round, len(incident.waiting)
        # What hits nobody is over at once.
        if not incident.waiting and incident.is_loss:
            incident.recovered_s = incident.noticed_s
        self.all.append(incident)
        self._unsettled[len(self.all)] = incident
        return IncidentOpened(
            number=len(self.all),
            kind=incident.kind,
            cause=incident.cause,
            who=incident.who,
            host=incident.host,
            stage=incident.stage,
            round=incident.round,
            noticed_after_s=round(incident.noticed_s - incident.began_s, 3),
            at_s=incident.noticed_s,
            what=what,
            shown=shown,
        )

    def _lost(
        self, kind: str, event: ServerLost | TrainerLost | DataServerLost, slots: Iterable[int], key: str = ""
    ) -> IncidentOpened:
        who = {"trainer": f"trainer {key}", "data_server": "the data server"}.get(kind, "")
        if isinstance(event, ServerLost):
            who = event.who
        began_s = event.at_s - max(event.silent_s, event.still_s)
        incident = Incident(kind, who, 0, began_s, event.at_s, set(slots), key, host=event.host)
        incident.stage = event.stage if isinstance(event, ServerLost) else None
        if event.silent_s:
            incident.cause = Cause.SILENT
        elif event.still_s:
            incident.cause = Cause.CUT  # it may be as it was
        else:
            incident.cause = Cause.ENDED
        # Of who has ended on the client's own host its launcher tells.
        return self._open(incident, event.told(), shown=kind == "server" or bool(event.silent_s))

    def _server_lost(self, event: ServerLost) -> Sequence[Event]:
        self._trouble_over(event.peer, event.at_s, REPORTED)
        leaving = [each for each in self._unsettled.values() if _leaves(each, event.peer)]
        for incident in leaving:
            incident.gone_s, incident.gone_in = event.at_s, self._round
            incident.waiting, incident.hit = set(event.slots), len(event.slots)
            incident.recovered_s = None if event.slots else event.at_s
        return () if leaving else (self._lost("server", event, event.slots, event.peer),)

    def _go_on_without(self) -> None:
        """A slot that has had no step in a whole round since a server left has no pipeline any more, and may never have
        one: nobody comes back in the place of that server."""
        for incident in self._unsettled.values():
            if incident.cause == Cause.LEFT and incident.waiting and self._round > incident.gone_in + 1:
                incident.waiting = {_ANY_SLOT}

    def _leaving(self, event: ServerLeaving) -> Sequence[Event]:
        if any(_leaves(each, event.peer) for each in self._unsettled.values()):
            return ()
        incident = Incident("server", event.who, 0, event.at_s, event.at_s, set(), event.peer, event.stage)
        incident.cause, incident.host = Cause.LEFT, event.host
        return (self._open(incident, event.told()),)

    def _found(self, event: LossFound) -> IncidentOpened:
        incident = Incident(event.kind, event.who, 0, event.at_s, event.at_s, set(event.slots), _key(event))
        incident.host = event.host
        opened = self._open(incident, event.told(), shown=False)
        if event.kind == "client":
            incident.back_s = event.found_s
        return opened

    def _replaced(self, event: ClientReplaced) -> IncidentOpened:
        began_s = event.at_s - event.silent_s
        incident = Incident("client", event.who, 0, began_s, event.at_s, {_ANY_SLOT}, event.peer, host=event.host)
        incident.cause = Cause.TAKEN_OVER
        return self._open(incident, event.told())

    def _apart(self, event: ChainLost) -> IncidentOpened:
        """Nobody can know of two sides that have all they need before they meet: until then the other one is lost."""
        away = [each for each in self._unsettled.values() if each.kind == "server" and each.is_loss]
        began_s = min((event.at_s, *(each.began_s for each in away if not each.is_closed)))
        incident = Incident("swarm", "two sides of the swarm", 0, began_s, event.at_s, {_ANY_SLOT})
        incident.cause = Cause.SPLIT
        return self._open(incident, event.told())

    def _trouble(self, event: TroubleSeen) -> Sequence[Event]:
        if any(_troubles(each, event.peer, (event.cause,)) for each in self._unsettled.values()):
            return ()
        incident = Incident(event.kind, event.who, 0, event.began_s, event.at_s, set(), event.peer, event.stage)
        incident.cause, incident.host = event.cause, event.host
        return (self._open(incident, event.what),)

    def _trouble_over(self, peer: PeerId, at_s: float, causes: Sequence[Cause]) -> None:
        for incident in self._unsettled.values():
            if _troubles(incident, peer, causes):
                incident.back_s = at_s

    def _recorded(self, event: StepsLost) -> None:
        for incident in self._unsettled.values():
            incident.recorded_in = incident.recorded_in or event.round * incident.is_loss
            incident.due_in = incident.due_in if incident.due_in > event.round else 0
        causes = _Causes(self.all if event.lost else ())
        for round, stage, peer, steps in event.lost:
            index = causes.of(LostStep(round, stage, peer, event.round))
            if index is not None:
                self.all[index].steps_lost += steps

    def _begins_anew(self, event: StageBeganAnew) -> None:
        """What that costs is found with the round's record: it is put down to a loss whose end is not told yet."""
        known = [each for each in self._unsettled.values() if each.kind == "server" and each.stage == event.stage]
        for incident in [each for each in known if each.is_loss and not each.is_closed][-1:]:
            incident.due_in = event.in_round
            incident.anew_in.append(event.in_round)

    def _away(self, kind: str, key: str) -> list[Incident]:
        unsettled = self._unsettled.values()
        return [each for each in unsettled if (each.kind, each.key, each.back_s) == (kind, key, None) and each.is_loss]

    def _back(self, kind: str, key: str, at_s: float) -> None:
        for incident in self._away(kind, key):
            incident.back_s = at_s

    def _step(self, event: StepReported) -> Sequence[Event]:
        """A step may have been committed before a loss of which the client has heard earlier."""
        slot, at_s = event.slot, event.at_s
        steps_s = self._steps_s.setdefault(slot, [])
        steps_s.append(at_s)
        del steps_s[:-_NUM_STEPS]
        waiting = [each for each in self._unsettled.values() if each.waiting]
        due = [each for each in waiting if {slot, _ANY_SLOT} & each.waiting and at_s >= each.noticed_s]
        # Trainers do not stop for a client.
        stopped = [each for each in due if each.is_loss and each.kind != "client" and slot in each.waiting]
        for incident in due:
            incident.waiting -= {slot, _ANY_SLOT}
            if not incident.waiting:
                incident.recovered_s = at_s
                # Who has taken a place, or met, is there with the first step.
                incident.back_s = incident.back_s if incident.is_loss else at_s
        if not stopped:
            return ()
        # Of several losses at once nobody can tell which has made it begin again.
        stopped[0].replayed += event.attempt > 0
        paused_s = _longest_pause_s(steps_s, min(each.began_s for each in stopped))
        names = dict.fromkeys(each.who for each in stopped)
        return (TrainingGoesOn(slot, round(paused_s, 3), tuple(names)),)


def _leaves(incident: Incident, peer: PeerId) -> bool:
    """Whether it is of a server that leaves, and has not gone yet."""
    return (incident.cause, incident.key, incident.gone_s) == (Cause.LEFT, peer, None)


def _troubles(incident: Incident, peer: PeerId, causes: Sequence[Cause]) -> bool:
    """Whether it is of trouble of such a kind at a peer that is not over."""
    return incident.cause in causes and incident.key == peer and incident.back_s is None


def _is_of(incident: Incident, found: LossFound, within_s: float) -> bool:
    if (incident.kind, incident.key) != (found.kind, _key(found)):
        return False
    if found.kind == "client":
        return incident.noticed_s == found.at_s
    is_in_time = incident.noticed_s - within_s <= found.at_s
    return is_in_time and (incident.back_s is None or found.at_s <= incident.back_s)


def _key(found: LossFound) -> str:
    return str(found.slots[0]) if found.kind == "trainer" else found.peer


def steps_lost_by(incidents: Sequence[Incident], lost: Iterable[LostStep]) -> tuple[list[int], int]:
    """Return how many steps each incident has cost, and how many were lost for another reason.

    A server's steps are gone with it if they are not in the record of their round; those of the rounds before only if
    nobody else had their state either: then they are gone with the last server of the stage whose loss was known.
    """
    costs = [0] * len(incidents)
    others = 0
    causes = _Causes(incidents)
    for step in lost:
        index = causes.of(step)
        if index is None:
            others += 1
        else:
            costs[index] += 1
    return costs, others


class _Causes:
    """Which losses have cost steps, by their indices: of several the last one."""

    def __init__(self, incidents: Sequence[Incident]) -> None:
        self._recorded: dict[tuple[str, int], int] = {}
        self._anew: dict[tuple[int | None, int], int] = {}
        for index, each in enumerate(incidents):
            if each.kind == "server" and each.is_loss:
                self._recorded[each.key, each.recorded_in or each.round] = index
                self._anew |= {(each.stage, round): index for round in each.anew_in}

    def of(self, step: LostStep) -> int | None:
        if step.in_round == step.round:
            return self._recorded.get((step.peer, step.round))
        return self._anew.get((step.stage, step.in_round))


def _longest_pause_s(steps_s: Sequence[float], since_s: float) -> float:
    """Return the longest time without a step that has ended since: the first step may have come before the notice."""
    known_s = sorted((since_s, *steps_s)) if min(steps_s) > since_s else steps_s
    return max((now_s - before_s for before_s, now_s in pairwise(known_s) if now_s > since_s), default=0.0)
