"""What goes wrong while a run goes on: one event when it is noticed, and one when it is over and its cost is known.

`swarm.incidents` makes them of what is lost, heard again and back (`losses`), and of the troubles that roles report.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from logging import WARNING
from typing import Any, Final, NamedTuple

from shoal.events.base import Event
from shoal.file_thread import WANTED_FILES
from shoal.ids import PeerId


class Cause(enum.StrEnum):
    """What has happened to whom. `SILENT` is what a freeze and a cut look like until it is heard again."""

    ENDED = "ended"
    SILENT = "silent"
    FROZEN = "frozen"
    CUT = "cut off"
    LEFT = "left"
    MEMORY = "out of memory"
    CLOCK = "wrong clock"
    DISK = "disk full"
    FILES = "no more files"
    SPLIT = "split"
    TAKEN_OVER = "taken over"


_WAS = {
    Cause.ENDED: "had ended",
    Cause.SILENT: "was frozen or cut off",
    Cause.FROZEN: "was frozen",
    Cause.CUT: "was cut off",
    Cause.LEFT: "has left",
    Cause.MEMORY: "was out of memory",
    Cause.CLOCK: "had another time",
    Cause.DISK: "could not write to its disk",
    Cause.FILES: "took no more connections",
    Cause.SPLIT: "had gone on apart",
    Cause.TAKEN_OVER: "was lost, and this client goes on in its place",
}


DISK: Final = "{who} cannot write to its disk ({what}): {do}; training goes on, and {costs}"
DISK_COSTS: Final = {
    "replica log": "unless it soon can, this run cannot be replayed",
    "log": "what it logs is lost",
    "checkpoint": "no checkpoint is written",
    "client state": "a client that is killed meanwhile counts less when it is started again",
}
"""What is lost where that cannot be written."""
FILES: Final = (
    "{who} may open no more files: it goes on with the connections that it has, and takes no more; allow more there "
    f"with `ulimit -n {WANTED_FILES}` before the next start, or now with `prlimit --nofile={WANTED_FILES} --pid` and "
    "its number"
)
MEMORY: Final = "{who} has no memory for a microbatch: the step is tried again, in smaller microbatches if any fit"
CLOCK: Final = (
    "the clock of {who} is {by_s} s {way} this host's, so neither believes what the other announces: set both, best by "
    "NTP"
)


class IncidentOpened(Event, frozen=True, tag="incident.opened", rename={"what": "says"}):
    """Something goes wrong that costs the run time or work, and is noticed now; `incident.closed` says when it is over.

    Attributes:
        number: which one of this run it is, from 1; both of its events have it.
        kind: the role of whom it has happened to.
        stage: of a server, where it is known.
        noticed_after_s: since its first sign.
        what: one sentence for a person.
        shown: whether the screen has it of this event; else the host's launcher says it.
    """

    level = WARNING
    why = "a process or its host has ended, is frozen, cut off, lacks memory, disk or files, has another time or leaves"
    number: int
    kind: str
    cause: Cause
    who: str
    host: str
    stage: int | None
    round: int
    noticed_after_s: float
    at_s: float
    what: str
    shown: bool = True

    def say(self) -> str:
        return self.what if self.shown else ""


def explained_by(name: str, values: Mapping[str, Any]) -> str:
    """Return the name of the event whose `why` and `do` a person is told of one with this name and these values: of an
    incident that begins with a loss, those of the loss."""
    if name == "incident.opened" and values.get("cause") in (Cause.ENDED, Cause.SILENT):
        return f"{values.get('kind')}.lost"
    return name


class IncidentClosed(Event, frozen=True, tag="incident.closed"):
    """What had gone wrong is over, or the run is, and what it has cost is known.

    Attributes:
        number: that of its `incident.opened`; so are `kind`, `who`, `host`, `stage` and `round`.
        cause: what has happened, as far as it has turned out since.
        noticed_after_s: since its first sign, as all times are.
        recovered_after_s: when the last trainer that it has hit had committed a step; None: it has not.
        back_after_s: when who was lost, or what took its place, took part again, who leaves had gone, or it was over;
            None: that has not come before the run's end.
        steps_lost: in which its stage has no part because of it.
        replayed: steps that had to be begun again.
        hit: how many trainers it has hit.
    """

    number: int
    kind: str
    cause: Cause
    who: str
    host: str
    stage: int | None
    round: int
    noticed_after_s: float
    recovered_after_s: float | None
    back_after_s: float | None
    steps_lost: int
    replayed: int
    hit: int

    def say(self) -> str:
        was = "wanted to leave" if self._has_stayed else _WAS[self.cause]
        return f"{placed(self.who, self.host)} {was}: {'; '.join((self._course(), *self._cost()))}"

    @property
    def _has_stayed(self) -> bool:
        return self.cause == Cause.LEFT and self.back_after_s is None

    def _course(self) -> str:
        end = self._end()
        if self.cause in TROUBLES:
            return end
        noticed = f"noticed after {self.noticed_after_s:.1f} s" if self.noticed_after_s else "noticed at once"
        goes_on = "no trainer was hit"
        if self.hit:
            goes_on = "no step since"
            if self.recovered_after_s is not None:
                goes_on = f"training went on after {self.recovered_after_s:.1f} s"
        # Who has taken a place is there with the first step.
        return ", ".join((noticed, goes_on) if self.cause == Cause.TAKEN_OVER else (noticed, goes_on, end))

    def _end(self) -> str:
        if self.cause in TROUBLES:
            if self.back_after_s is None:
                return "it was so to the end of the run"
            return f"over after {self.back_after_s:.1f} s"
        if self._has_stayed:
            return "still there when the run ended"
        if self.back_after_s is None:
            return "not back when the run ended"
        verb = "gone" if self.cause == Cause.LEFT else "back"
        again = " as a new process" if self.cause == Cause.ENDED else ""
        return f"{verb} after {self.back_after_s:.1f} s{again}"

    def _cost(self) -> tuple[str, ...]:
        if self.cause in TROUBLES:
            return ()
        of = "" if self.stage is None else f" of stage {self.stage}"
        lost = f"{self.steps_lost} step{'s' * (self.steps_lost != 1)}{of} lost" if self.steps_lost else "no step lost"
        return (f"{lost}, {self.replayed} begun again" if self.replayed else lost,)


TROUBLES = (Cause.MEMORY, Cause.CLOCK, Cause.DISK, Cause.FILES, Cause.SPLIT)
"""Nobody is lost by these."""
REPORTED = (Cause.MEMORY, Cause.DISK, Cause.FILES)
"""By who has them: of one that is lost nobody knows whether it still has."""


class LostSteps(NamedTuple):
    """So many steps of a round in which a stage has no part, and the server that has computed them there."""

    round: int
    stage: int
    peer: PeerId
    steps: int


class StepsLost(Event, frozen=True, tag="steps.lost"):
    """A record is written down, and it is known which steps have no part in it; looked for after losses only."""

    round: int
    lost: tuple[LostSteps, ...]


class CostsUnknown(Event, frozen=True, tag="costs.unknown"):
    """A record is written down, and a file that tells what a loss has cost cannot be read; the run goes on."""

    level = WARNING
    why = "the disk does not give it, or it was changed, cut short or taken away"
    do = "restore it from a copy before the run ends: the summary counts by it"
    says = "what was lost until round {round} is not known: {reason}"
    round: int
    reason: str


class StepsUncounted(Event, frozen=True, tag="steps.uncounted"):
    """The step log of a round cannot be read when the run is summed up: its samples count by the round's record."""

    level = WARNING
    why = "the disk does not give it, or it was changed, cut short or taken away"
    do = "restore it from a copy before shoal replay"
    says = "the steps of round {round} are not counted: {reason}"
    round: int
    reason: str


class RecordUnread(Event, frozen=True, tag="record.unread"):
    """The record of a round, or D_0, cannot be read when the run is summed up, or when a client goes on from the record
    of another one: what other files say of it counts."""

    level = WARNING
    why = "the disk does not give it, or it was changed, cut short or taken away"
    do = "restore it from a copy before --resume or shoal replay, which need it"
    says = "the summary does without the record of round {round}: {reason}"
    round: int
    reason: str


class LossExplained(Event, frozen=True, tag="loss.explained"):
    """A server that was lost has said what it had counted, and from that it is known what had happened to it."""

    peer: PeerId
    cause: Cause


class TroubleSeen(Event, frozen=True, tag="trouble.seen"):
    """Somebody who is not lost has reported, or shown, that something is wrong there.

    Attributes:
        kind: its role.
        what: one sentence for a person.
        began_s: the first sign of it.
    """

    kind: str
    cause: Cause
    peer: PeerId
    who: str
    host: str
    what: str
    began_s: float
    at_s: float
    stage: int | None = None


class TroubleOver(Event, frozen=True, tag="trouble.over"):
    """What was wrong somewhere is so no more."""

    cause: Cause
    peer: PeerId
    at_s: float


def placed(who: str, host: str) -> str:
    """Say who it is and where; the names of servers have their host in them."""
    return who if "@" in who or not host else f"{who.removeprefix('the ')}@{host}"
