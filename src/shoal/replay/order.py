"""In which order a run is computed again: one operation after the other, each with the states that it saw. Pure.

A step ran over several replicas at once, while each of them committed other steps before and after. But a replica
commits nothing between a step's first operation and its last one, and the last stage begins when all others have begun
and before any of them is done. So there was a moment at which all replicas of the path held what the step was computed
with, and it can be computed in that one moment:

    life of stage 0    loaded   began A   applied A   began B             applied B
    life of stage 1    loaded   began C   began A   applied C   applied A   began B ...
                                          ^ A is computed here, before C is applied

A life goes on past a commit or a load only when the steps that have begun with its present state are computed. Those
that nobody has committed are left out: they have left no trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import Contradiction
from shoal.pipeline.replica_log import Applied, Began, Loaded, Resumed
from shoal.replay.lives import AttemptedStep, Boundary, Life, Members, steps_at
from shoal.wire.messages.round import Record


@dataclass(frozen=True, slots=True)
class Begin:
    """A life begins, with the state of D_0."""

    life: Life


@dataclass(frozen=True, slots=True)
class Load:
    """A life takes the state that it has loaded."""

    life: Life
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Keep:
    """A life is where another one, the `heir`, goes on from: its state is needed as it is now."""

    life: Life
    boundary: Boundary
    heir: int


@dataclass(frozen=True, slots=True)
class Resume:
    """A life goes on from a snapshot that was kept."""

    life: Life
    origin: Boundary


@dataclass(frozen=True, slots=True)
class Compute:
    """A step is computed over the lives of its path, in stage order; `keeps` says who of them commits it later.
    `number` counts them, from 1."""

    round: int
    began: Began
    lives: tuple[Life, ...]
    keeps: tuple[bool, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Apply:
    """A life commits a step that was computed."""

    round: int
    life: Life
    applied: Applied


@dataclass(frozen=True, slots=True)
class Average:
    """A round ends; `members` are the lives of each stage, in the order of the record."""

    record: Record
    members: Mapping[int, tuple[Life, ...]]


@dataclass(frozen=True, slots=True)
class End:
    """A life is over, or nothing that it did later matters."""

    life: Life


Action = Begin | Load | Keep | Resume | Compute | Apply | Average | End


class ReplayOrder:
    """The actions of a run up to its last record; iterate over it once.

    Args:
        records: D_1, D_2, ... without a gap.
        lives: all of the run.
        members: of each record.

    Attributes:
        num_steps: steps that will be computed.
    """

    def __init__(self, records: Sequence[Record], lives: Sequence[Life], members: Sequence[Members]) -> None:
        self._records = records
        self._lives = lives
        self._members = members
        self._cursor = {life.number: _first(life, members) for life in lives}
        self._round: dict[int, int] = {}
        self._last = {segment.life: segment.round for of_round in members for segment in of_round.values()}
        self._ended: set[int] = set()
        self._averaged = 0
        self._steps = [steps_at(life) for life in lives]
        self._needed = _applied_by(lives, self._steps, len(records))
        self._begun: defaultdict[AttemptedStep, dict[int, Life]] = defaultdict(dict)
        self._open: defaultdict[int, set[AttemptedStep]] = defaultdict(set)
        self._computed: set[AttemptedStep] = set()
        self._origins = _origins(lives)
        self._commits: dict[int, int] = {}
        self._kept: set[Boundary] = set()

    @property
    def num_steps(self) -> int:
        return len(self._needed)

    def __iter__(self) -> Iterator[Action]:
        """Yield the actions.

        Raises:
            Contradiction: They cannot go on.
        """
        while self._averaged < len(self._records):
            has_moved = False
            for life in self._lives:
                for action in self._advance(life):
                    has_moved = True
                    yield action
            average = self._average()
            if average is not None:
                yield average
                continue
            if not has_moved:
                raise self._contradiction()

    def _advance(self, life: Life) -> Iterator[Action]:
        """Go on in one life as far as can be; what only begins is no action, but lets others go on."""
        number, events = life.number, life.events
        while (cursor := self._cursor[number]) < len(events):
            match events[cursor]:
                case Began() as began:
                    step = self._steps[number][cursor]
                    if step in self._needed and began.path[life.stage : life.stage + 1] == (life.peer,):
                        self._open[number].add(step)
                        self._begun[step][life.stage] = life
                        yield from self._computable(step, began)
                case Applied() as applied:
                    if self._open[number] or self._steps[number][cursor] not in self._computed:
                        return
                    yield Apply(self._round[number], life, applied)
                    self._commits[number] += 1
                    yield from self._wanted(life)
                case Loaded() as loaded:
                    if self._open[number] or loaded.round > self._averaged:
                        return
                    if number not in self._round:
                        yield Begin(life)
                    self._round[number], self._commits[number] = loaded.round + 1, 0
                    yield Load(life, loaded)
                case Resumed(commits=commits):
                    origin = self._origins[number, cursor]
                    if origin not in self._kept:
                        return
                    yield Resume(life, origin)
                    self._commits[number] = commits
                    yield from self._wanted(life)
            self._cursor[number] += 1
        is_over = not self._open[number] and self._last.get(number, 0) <= self._averaged
        if is_over and number in self._round and number not in self._ended:
            self._ended.add(number)
            yield End(life)

    def _wanted(self, life: Life) -> Iterator[Keep]:
        """The boundary at which a life is now, if another one goes on from it."""
        boundary = Boundary(life.number, self._round[life.number], self._commits[life.number])
        for (heir, _), origin in self._origins.items():
            if origin == boundary and boundary not in self._kept:
                yield Keep(life, boundary, heir)
        self._kept.add(boundary)

    def _computable(self, step: AttemptedStep, began: Began) -> Iterator[Compute]:
        """A step that has begun on its whole path."""
        on_path = self._begun[step]
        if len(on_path) < len(step.path):
            return
        lives = tuple(on_path[stage] for stage in range(len(step.path)))
        for life in lives:
            self._open[life.number].discard(step)
        self._computed.add(step)
        keeps = tuple(life.number in self._needed[step] for life in lives)
        yield Compute(self._round[lives[0].number], began, lives, keeps, len(self._computed))

    def _average(self) -> Average | None:
        """The end of the next round, if all its members are there."""
        record, members = self._records[self._averaged], self._members[self._averaged]
        if len(members) < sum(len(outcome.members) for outcome in record.stages):
            return None
        if any(self._cursor[s.life] < s.stop or self._open[s.life] for s in members.values()):
            return None
        self._averaged += 1
        lives = {
            outcome.stage: tuple(self._lives[members[outcome.stage, peer].life] for peer in outcome.members)
            for outcome in record.stages
        }
        return Average(record, lives)

    # ---- what is wrong

    def _contradiction(self) -> Contradiction:
        record, members = self._records[self._averaged], self._members[self._averaged]
        for outcome in record.stages:
            for peer in outcome.members:
                if (outcome.stage, peer) not in members:
                    return Contradiction(
                        "no log of this replica has a part in the round: is the folder `replicas` of its host missing? "
                        "Copy it beside that of this run",
                        record.round,
                        outcome.stage,
                        peer,
                    )
        for life in self._lives:
            cursor = self._cursor[life.number]
            if cursor < len(life.events) and self._round.get(life.number) == record.round:
                is_commit = isinstance(life.events[cursor], Applied)
                waits = sorted(self._open[life.number]) or ([self._steps[life.number][cursor]] if is_commit else [])
                for step in waits:
                    return self._waiting(record.round, life, step)
        (stage, peer), _ = next(item for item in members.items() if self._cursor[item[1].life] < item[1].stop)
        return Contradiction("its log does not lead to the end of the round", record.round, stage, peer)

    def _waiting(self, round: int, life: Life, step: AttemptedStep) -> Contradiction:
        """A step of this life that cannot be computed."""
        key, begun = step.key, self._begun[step]
        if not step.path:
            return Contradiction(f"its log commits step {key} without having begun it", round, life.stage, life.peer)
        for stage, peer in enumerate(step.path):
            if stage not in begun:
                return Contradiction(
                    f"step {key} went through this replica, and its log does not have it where the others have theirs: "
                    "the log is incomplete, or lines have changed places",
                    round,
                    stage,
                    peer,
                )
        return Contradiction(f"step {key} can have been computed in no order", round, life.stage, life.peer)


def _first(life: Life, members: Sequence[Members]) -> int:
    """Index of the first load that matters: what a newcomer only holds until it has fetched something newer does not.

    So a life is not built before the round in which it begins to take part.
    """
    taking_part = {(segment.life, segment.start) for of_round in members for segment in of_round.values()}
    for segment in life.segments:
        if (life.number, segment.start) in taking_part or segment.stop - segment.start > 1:
            return segment.start
    return len(life.events)


def _applied_by(
    lives: Sequence[Life], steps: Sequence[Mapping[int, AttemptedStep]], last_round: int
) -> dict[AttemptedStep, set[int]]:
    """The steps that some life has committed up to a round, and which lives have."""
    found: defaultdict[AttemptedStep, set[int]] = defaultdict(set)
    for life in lives:
        for segment in life.segments:
            if segment.round <= last_round:
                for index in range(segment.start, segment.stop):
                    if isinstance(life.events[index], Applied):
                        found[steps[life.number][index]].add(life.number)
    return dict(found)


def _origins(lives: Sequence[Life]) -> dict[tuple[int, int], Boundary]:
    """Where the snapshots were taken from which lives went on, by life and index of the event."""
    return {
        (life.number, index): segment.origin
        for life in lives
        for segment in life.segments
        if segment.origin is not None
        for index in range(segment.start, segment.stop)
        if isinstance(life.events[index], Resumed)
    }
