"""In which order a run is computed again: one operation after the other, each with the states that it saw. Pure.

A step ran over several replicas at once, while each of them committed other steps before and after. But a replica
commits nothing between a step's first operation and its last one, and the last stage begins when all others have begun
and before any of them is done. So there was a moment at which all replicas of the path held what the step was computed
with, and it can be computed in that one moment:

    generation of stage 0    loaded   began A   applied A   began B             applied B
    generation of stage 1    loaded   began C   began A   applied C   applied A   began B ...
                                          ^ A is computed here, before C is applied

A generation goes on past a commit or a load only when the steps that have begun with its present state are computed.
Those that nobody has committed are left out: they have left no trace.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import Contradiction
from shoal.pipeline.replica_log import Applied, Began, Loaded, Resumed
from shoal.replay.generations import AttemptedStep, Boundary, Generation, Inherited, Members, steps_at
from shoal.wire.messages.round import Record


@dataclass(frozen=True, slots=True)
class Begin:
    """A generation begins, with the state of D_0."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Load:
    """A generation takes the state that it has loaded."""

    generation: Generation
    loaded: Loaded


@dataclass(frozen=True, slots=True)
class Keep:
    """A generation is where another one, the `heir`, goes on from: its state is needed as it is now."""

    generation: Generation
    boundary: Boundary
    heir: int


@dataclass(frozen=True, slots=True)
class Resume:
    """A generation goes on from a snapshot that was kept."""

    generation: Generation
    origin: Boundary


@dataclass(frozen=True, slots=True)
class Inherit:
    """The inner optimizer of a generation goes on with what the first checkpoint of a fork has of a slot."""

    generation: Generation
    slot: int


@dataclass(frozen=True, slots=True)
class Compute:
    """A step is computed over the generations of its path, in stage order; `keeps` says who of them commits it later.
    `number` counts them, from 1."""

    round: int
    began: Began
    generations: tuple[Generation, ...]
    keeps: tuple[bool, ...]
    number: int


@dataclass(frozen=True, slots=True)
class Apply:
    """A generation commits a step that was computed."""

    round: int
    generation: Generation
    applied: Applied


@dataclass(frozen=True, slots=True)
class Average:
    """A round ends; `members` are the generations of each stage, in the order of the record."""

    record: Record
    members: Mapping[int, tuple[Generation, ...]]


@dataclass(frozen=True, slots=True)
class End:
    """A generation is over, or nothing that it did later matters."""

    generation: Generation


Action = Begin | Load | Keep | Resume | Inherit | Compute | Apply | Average | End


@dataclass(eq=False, repr=False)
class ReplayOrder:
    """The actions of a run up to its last record; iterate over it once.

    Attributes:
        records: those after record `base_round`, without a gap.
        base_round: of the record whose state is there from the start.
    """

    records: Sequence[Record]
    generations: Sequence[Generation]
    members: Sequence[Members]
    base_round: int = 0

    def __post_init__(self) -> None:
        self._cursor = {generation.number: _first(generation, self.members) for generation in self.generations}
        self._round: dict[int, int] = {}
        self._last = {segment.generation: segment.round for of_round in self.members for segment in of_round.values()}
        self._ended: set[int] = set()
        self._averaged = self.base_round
        self._steps = [steps_at(generation) for generation in self.generations]
        self._needed = _applied_by(self.generations, self._steps, self.base_round + len(self.records))
        self._begun: defaultdict[AttemptedStep, dict[int, Generation]] = defaultdict(dict)
        self._open: defaultdict[int, set[AttemptedStep]] = defaultdict(set)
        self._computed: set[AttemptedStep] = set()
        self._origins = _origins(self.generations)
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
        while self._averaged < self.base_round + len(self.records):
            has_moved = False
            for generation in self.generations:
                for action in self._advance(generation):
                    has_moved = True
                    yield action
            average = self._average()
            if average is not None:
                yield average
                continue
            if not has_moved:
                raise self._contradiction()

    def _advance(self, generation: Generation) -> Iterator[Action]:
        """Go on in one generation as far as can be; what only begins is no action, but lets others go on."""
        number, events = generation.number, generation.events
        while (cursor := self._cursor[number]) < len(events):
            match events[cursor]:
                case Began() as began:
                    step = self._steps[number][cursor]
                    if step in self._needed and began.path[generation.stage : generation.stage + 1] == (
                        generation.peer,
                    ):
                        self._open[number].add(step)
                        self._begun[step][generation.stage] = generation
                        yield from self._computable(step, began)
                case Applied() as applied:
                    if self._open[number] or self._steps[number][cursor] not in self._computed:
                        return
                    yield Apply(self._round[number], generation, applied)
                    self._commits[number] += 1
                    yield from self._wanted(generation)
                case Loaded() as loaded:
                    if self._open[number] or loaded.round > self._averaged:
                        return
                    if number not in self._round:
                        yield Begin(generation)
                    self._round[number], self._commits[number] = loaded.round + 1, 0
                    yield Load(generation, loaded)
                    following = events[cursor + 1 : cursor + 2]
                    if not any(isinstance(event, Resumed | Inherited) for event in following):
                        yield from self._wanted(generation)
                case Inherited(slot):
                    yield Inherit(generation, slot)
                    yield from self._wanted(generation)
                case Resumed(commits=commits):
                    origin = self._origins[number, cursor]
                    if origin not in self._kept:
                        return
                    yield Resume(generation, origin)
                    self._commits[number] = commits
                    yield from self._wanted(generation)
            self._cursor[number] += 1
        is_over = not self._open[number] and self._last.get(number, 0) <= self._averaged
        if is_over and number in self._round and number not in self._ended:
            self._ended.add(number)
            yield End(generation)

    def _wanted(self, generation: Generation) -> Iterator[Keep]:
        """The boundary at which a generation is now, if another one goes on from it."""
        boundary = Boundary(generation.number, self._round[generation.number], self._commits[generation.number])
        for (heir, _), origin in self._origins.items():
            if origin == boundary and boundary not in self._kept:
                yield Keep(generation, boundary, heir)
        self._kept.add(boundary)

    def _computable(self, step: AttemptedStep, began: Began) -> Iterator[Compute]:
        """A step that has begun on its whole path."""
        on_path = self._begun[step]
        if len(on_path) < len(step.path):
            return
        generations = tuple(on_path[stage] for stage in range(len(step.path)))
        for generation in generations:
            self._open[generation.number].discard(step)
        self._computed.add(step)
        keeps = tuple(generation.number in self._needed[step] for generation in generations)
        yield Compute(self._round[generations[0].number], began, generations, keeps, len(self._computed))

    @property
    def _next(self) -> tuple[Record, Members]:
        """The record of the round that is under way."""
        place = self._averaged - self.base_round
        return self.records[place], self.members[place]

    def _average(self) -> Average | None:
        """The end of the next round, if all its members are there."""
        record, members = self._next
        if len(members) < sum(len(outcome.members) for outcome in record.stages):
            return None
        if any(self._cursor[s.generation] < s.stop or self._open[s.generation] for s in members.values()):
            return None
        self._averaged += 1
        generations = {
            outcome.stage: tuple(self.generations[members[outcome.stage, peer].generation] for peer in outcome.members)
            for outcome in record.stages
        }
        return Average(record, generations)

    # ---- what is wrong

    def _contradiction(self) -> Contradiction:
        record, members = self._next
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
        for generation in self.generations:
            cursor = self._cursor[generation.number]
            if cursor < len(generation.events) and self._round.get(generation.number) == record.round:
                is_commit = isinstance(generation.events[cursor], Applied)
                waits = sorted(self._open[generation.number]) or (
                    [self._steps[generation.number][cursor]] if is_commit else []
                )
                for step in waits:
                    return self._waiting(record.round, generation, step)
        (stage, peer), _ = next(item for item in members.items() if self._cursor[item[1].generation] < item[1].stop)
        return Contradiction("its log does not lead to the end of the round", record.round, stage, peer)

    def _waiting(self, round: int, generation: Generation, step: AttemptedStep) -> Contradiction:
        """A step of this generation that cannot be computed."""
        key, begun = step.key, self._begun[step]
        if not step.path:
            return Contradiction(
                f"its log commits step {key} without having begun it", round, generation.stage, generation.peer
            )
        for stage, peer in enumerate(step.path):
            if stage not in begun:
                return Contradiction(
                    f"step {key} went through this replica, and its log does not have it where the others have theirs: "
                    "the log is incomplete, or lines have changed places",
                    round,
                    stage,
                    peer,
                )
        return Contradiction(f"step {key} can have been computed in no order", round, generation.stage, generation.peer)


def _first(generation: Generation, members: Sequence[Members]) -> int:
    """Index of the first load that matters: what a newcomer only holds until it has fetched something newer does not.

    So a generation is not built before the round in which it begins to take part.
    """
    taking_part = {(segment.generation, segment.start) for of_round in members for segment in of_round.values()}
    for segment in generation.segments:
        if (generation.number, segment.start) in taking_part or segment.stop - segment.start > 1:
            return segment.start
    return len(generation.events)


def _applied_by(
    generations: Sequence[Generation], steps: Sequence[Mapping[int, AttemptedStep]], last_round: int
) -> dict[AttemptedStep, set[int]]:
    """The steps that some generation has committed up to a round, and which generations have."""
    found: defaultdict[AttemptedStep, set[int]] = defaultdict(set)
    for generation in generations:
        for segment in generation.segments:
            if segment.round <= last_round:
                for index in range(segment.start, segment.stop):
                    if isinstance(generation.events[index], Applied):
                        found[steps[generation.number][index]].add(generation.number)
    return dict(found)


def _origins(generations: Sequence[Generation]) -> dict[tuple[int, int], Boundary]:
    """Where the snapshots were taken from which generations went on, by generation and index of the event."""
    return {
        (generation.number, index): segment.origin
        for generation in generations
        for segment in generation.segments
        if segment.origin is not None
        for index in range(segment.start, segment.stop)
        if isinstance(generation.events[index], Resumed)
    }
