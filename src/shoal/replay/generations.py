"""The generations of a run's replicas, and which of them a round's record speaks of. Pure.

A *generation* is one replica from its start to its end: a server that is started again, sent to another stage, or takes
the state of another chain of records with an optimizer that has done no step, begins another one. A *segment* is what a
generation did between one load of a state and the next: its part in one round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.errors import RecordRejected
from shoal.ids import PeerId, StepKey
from shoal.pipeline.replica_log import Applied, Began, Line, Loaded, Place, Resumed
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.swarm.records import Logs
from shoal.swarm.sample_ranges import count
from shoal.swarm.step_operations import is_loss_scale
from shoal.wire.messages.round import Record
from shoal.wire.messages.step import StepEntry, StepsTrained


@dataclass(frozen=True, slots=True)
class Inherited:
    """The inner optimizer goes on with what the first checkpoint of a fork has of a slot."""

    slot: int


Event = Loaded | Resumed | Inherited | Began | Applied


class AttemptedStep(NamedTuple):
    """One attempt at a step. Trainers of two sides of a split may give the same key, over other replicas."""

    key: StepKey
    path: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class Boundary:
    """A generation as it was after its first `commits` steps of a round."""

    generation: int
    round: int
    commits: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a generation.

    Attributes:
        loaded: the record that it began with.
        round: in which it trained: the one after the record that was loaded.
        start: index of the load among the generation's events.
        stop: index of the next load, or the number of events.
        log: what it committed, as a step log has it. The log of the generation whose snapshot it went on from comes
            first.
        origin: where that snapshot was taken; None: there is none.
        earlier: what it had trained in earlier rounds that counts in this one, as it must have joined with.
        num_targets: its weight in the average of its round, if it counts.
    """

    generation: int
    loaded: Loaded
    round: int
    start: int
    stop: int
    log: tuple[StepEntry, ...]
    origin: Boundary | None = None
    earlier: tuple[StepsTrained, ...] = ()
    num_targets: int = 0


@dataclass(frozen=True, slots=True)
class Generation:
    """One replica.

    Attributes:
        number: place among the generations of the run.
        events: in the order in which they happened.
        segments: the events, cut at the loads.
        heir: the same replica's next generation, on the chain of records that it took after this one's; None: there is
            none.
    """

    number: int
    peer: PeerId
    stage: int
    place: Place
    events: tuple[Event, ...]
    segments: tuple[Segment, ...]
    heir: int | None = None


Earlier = Mapping[tuple[PeerId, int], Sequence[Generation]]
"""Generations by their peer and the number of their file."""


def origins_of(lines: Sequence[Line | Inherited], peer: PeerId) -> set[tuple[PeerId, int]]:
    """Return which files have the generations that those of a file go on from."""
    return {(line.peer or peer, line.generation) for line in lines if isinstance(line, Resumed)}


def generations_of(
    number: int,
    peer: PeerId,
    stage: int,
    place: Place,
    lines: Sequence[Line | Inherited],
    earlier: Earlier | None = None,
    cuts: CutRule = EVERY_STEP,
) -> list[Generation]:
    """Return the generations of a replica from the lines of its log behind the first one; at least one.

    Args:
        number: place of the first generation among those of the run.
        earlier: generations that are known already; the first new one may go on from one of them.
        cuts: see `generation_of`.

    Raises:
        RecordRejected: the generation goes on from one that is missing, or its log contradicts itself.
    """
    begins = [0, *(index for index, line in enumerate(lines) if isinstance(line, Loaded) and line.anew)]
    stops = [*begins[1:], len(lines)]
    last = number + len(begins) - 1
    return [
        generation_of(each, peer, stage, place, lines[start:stop], earlier, None if each == last else each + 1, cuts)
        for each, (start, stop) in enumerate(zip(begins, stops, strict=True), number)
    ]


def generation_of(
    number: int,
    peer: PeerId,
    stage: int,
    place: Place,
    lines: Sequence[Line | Inherited],
    earlier: Earlier | None = None,
    heir: int | None = None,
    cuts: CutRule = EVERY_STEP,
) -> Generation:
    """Return a generation from its lines.

    Args:
        number: place among the generations of the run.
        earlier: see `generations_of`.
        heir: see `Generation`.
        cuts: which steps the average of a round has.

    Raises:
        RecordRejected: the generation goes on from one that is missing, or its log contradicts itself.
    """
    events = tuple(line for line in lines if isinstance(line, Event))
    _require_whole_steps(peer, events)
    loads = [(index, event) for index, event in enumerate(events) if isinstance(event, Loaded)]
    stops = [*(index for index, _ in loads[1:]), len(events)]
    segments: list[Segment] = []
    for (start, loaded), stop in zip(loads, stops, strict=True):
        kept: tuple[StepsTrained, ...] = ()
        if loaded.keeps_rest and segments:
            kept = cuts.still_earlier(segments[-1].round, segments[-1].earlier, segments[-1].log)
        segments.append(_segment(number, peer, loaded, events, start, stop, earlier or {}, kept, cuts))
    return Generation(number, peer, stage, place, events, tuple(segments), heir)


def _require_whole_steps(peer: PeerId, events: Sequence[Event]) -> None:
    """Check that the microbatches of each step are its samples.

    Raises:
        RecordRejected: They are not, or one is empty.
    """
    for event in events:
        if not isinstance(event, Began):
            continue
        sizes, num_samples = event.microbatch_samples, count(event.samples)
        is_whole = sum(sizes) == num_samples and min(sizes, default=0) >= 1
        if not is_loss_scale(event.loss_scale):
            raise RecordRejected(
                f"the log of {peer} has changed since it was written: step {event.key} has the loss scale "
                f"{event.loss_scale}, which is no power of two; copy it from its host once more"
            )
        if not is_whole or len(event.microbatch_targets) != len(sizes) or min(event.microbatch_targets) < 0:
            raise RecordRejected(
                f"the log of {peer} has changed since it was written: step {event.key} has {num_samples} samples in "
                f"microbatches of {list(sizes)}, with {list(event.microbatch_targets)} targets; copy it from its host "
                "once more"
            )


def _segment(
    generation: int,
    peer: PeerId,
    loaded: Loaded,
    events: Sequence[Event],
    start: int,
    stop: int,
    earlier: Earlier,
    kept: tuple[StepsTrained, ...],
    cuts: CutRule,
) -> Segment:
    """`kept`: what it had trained in the rounds before, and has not lost with its load."""
    round = loaded.round + 1
    begun: dict[StepKey, tuple[int, Began]] = {}
    log: list[StepEntry] = []
    origin: Boundary | None = None
    for event in events[start + 1 : stop]:
        if isinstance(event, Resumed):
            before = _resumed(event, loaded, peer, earlier)
            origin = Boundary(before.generation, round, event.commits)
            log += before.log[: event.commits]
            # Without a step it is another one's optimizer that it goes on with, on the parameters of the record.
            kept = before.earlier if event.commits else ()
        elif isinstance(event, Began):
            begun[event.key] = (len(log), event)
        elif isinstance(event, Applied) and event.key in begun:
            version, began = begun[event.key]
            log.append(
                StepEntry(
                    key=event.key,
                    path=began.path,
                    version=version,
                    samples=began.samples,
                    num_samples=sum(began.microbatch_samples),
                    num_targets=sum(began.microbatch_targets),
                    scale=event.scale,
                    lr=event.lr,
                    skipped=event.skipped,
                )
            )
    num_targets = cuts.brought(round, log, kept).num_targets
    return Segment(generation, loaded, round, start, stop, tuple(log), origin, kept, num_targets)


def _resumed(event: Resumed, loaded: Loaded, peer: PeerId, earlier: Earlier) -> Segment:
    """The segment from whose snapshot a generation goes on: it began with the same record.

    Raises:
        RecordRejected: It is not there, or not as long.
    """
    round, owner = loaded.round + 1, event.peer or peer
    segments = [
        segment
        for generation in earlier.get((owner, event.generation), ())
        for segment in generation.segments
        if (segment.round, segment.loaded.record) == (round, loaded.record)
    ]
    if not segments or len(segments[-1].log) < event.commits:
        raise RecordRejected(
            f"a replica goes on from a snapshot of generation {event.generation} of server {owner}, after "
            f"{event.commits} steps of round {round}, and the log of that generation does not have them; copy it from "
            "its host"
        )
    return segments[-1]


def steps_at(generation: Generation) -> dict[int, AttemptedStep]:
    """Return the steps that a generation began or committed, by event; what it did not begin has no path."""
    found: dict[int, AttemptedStep] = {}
    begun: dict[StepKey, AttemptedStep] = {}
    for index, event in enumerate(generation.events):
        if isinstance(event, Began):
            begun[event.key] = found[index] = AttemptedStep(event.key, event.path)
        elif isinstance(event, Applied):
            found[index] = begun.get(event.key, AttemptedStep(event.key, ()))
    return found


Members = Mapping[tuple[int, PeerId], Segment]
"""Of one record: what each member, by stage and peer, did in the round; one whose log is missing is not there."""


def members_of(record: Record, generations: Sequence[Generation], logs: Logs) -> Members:
    """Return the segments that a record speaks of.

    A peer may have had several generations in a round. The record speaks of the last generation whose steps equal those
    of its join or, without a step log, whose number of targets equals its weight. If none does, the last generation of
    all is taken, and a comparison of the logs shows the difference.

    Args:
        logs: the round's, by replica.
    """
    found: dict[tuple[int, PeerId], Segment] = {}
    for outcome in record.stages:
        for peer, due in zip(outcome.members, outcome.weights, strict=True):
            segments = [
                generation_segments[-1]
                for generation in generations
                if (generation.peer, generation.stage) == (peer, outcome.stage)
                and (generation_segments := [s for s in generation.segments if s.round == record.round])
            ]
            wanted = logs[peer][1] if peer in logs else None
            equal = [s for s in segments if (s.num_targets == due if wanted is None else s.log == wanted)]
            if segments:
                found[outcome.stage, peer] = (equal or segments)[-1]
    return found
