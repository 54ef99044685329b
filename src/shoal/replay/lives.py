"""The lives of a run's replicas, and which of them a round's record speaks of. Pure.

A *life* is one replica from its start to its end: a server that is started again, or sent to another stage, begins
another one. A *segment* is what a life did between one load of a state and the next: its part in one round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.errors import RecordRejected
from shoal.ids import PeerId, StepKey
from shoal.pipeline.replica_log import Applied, Began, Line, Loaded, Place, Resumed
from shoal.swarm.records import Logs
from shoal.wire.messages.round import Record
from shoal.wire.messages.step import StepEntry

Event = Loaded | Resumed | Began | Applied


@dataclass(frozen=True, slots=True)
class Boundary:
    """A life as it was after its first `commits` steps of a round."""

    life: int
    round: int
    commits: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a life.

    Attributes:
        life: Whose.
        round: In which it trained: the one after the record that was loaded.
        start: Index of the load among the life's events.
        stop: Index of the next load, or the number of events.
        log: What it committed, as a step log has it; that of the life from whose snapshot it went on comes first.
        origin: Where that snapshot was taken; None where there is none.
    """

    life: int
    round: int
    start: int
    stop: int
    log: tuple[StepEntry, ...]
    origin: Boundary | None = None


@dataclass(frozen=True, slots=True)
class Life:
    """One replica.

    Attributes:
        number: Its place among the lives of the run.
        peer: Who it was.
        stage: Which it served.
        place: Where it computed.
        events: What it did, in order.
        segments: The same, cut at the loads.
    """

    number: int
    peer: PeerId
    stage: int
    place: Place
    events: tuple[Event, ...]
    segments: tuple[Segment, ...]


def life_of(
    number: int,
    peer: PeerId,
    stage: int,
    place: Place,
    lines: Sequence[Line],
    earlier: Mapping[int, Life] | None = None,
) -> Life:
    """Return a life from the lines of its log behind the first one.

    Args:
        number: Its place among the lives of the run.
        peer: Who it was.
        stage: Which it served.
        place: Where it computed.
        lines: Of its log.
        earlier: Those of the same peer, by the numbers of their files: it may go on from one.

    Raises:
        RecordRejected: It goes on from one that is not there.
    """
    events = tuple(line for line in lines if isinstance(line, Event))
    loads = [index for index, event in enumerate(events) if isinstance(event, Loaded)]
    stops = [*loads[1:], len(events)]
    known = earlier or {}
    segments = tuple(_segment(number, events, start, stop, known) for start, stop in zip(loads, stops, strict=True))
    return Life(number, peer, stage, place, events, segments)


def _segment(life: int, events: Sequence[Event], start: int, stop: int, earlier: Mapping[int, Life]) -> Segment:
    loaded = events[start]
    round = loaded.round + 1 if isinstance(loaded, Loaded) else 0
    begun: dict[StepKey, tuple[int, Began]] = {}
    log: list[StepEntry] = []
    origin: Boundary | None = None
    for event in events[start + 1 : stop]:
        if isinstance(event, Resumed):
            before = _resumed(event, round, earlier)
            origin = Boundary(before.life, round, event.commits)
            log += before.log[: event.commits]
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
                    scale=event.scale,
                    lr=event.lr,
                    skipped=event.skipped,
                )
            )
    return Segment(life, round, start, stop, tuple(log), origin)


def _resumed(event: Resumed, round: int, earlier: Mapping[int, Life]) -> Segment:
    """The segment from whose snapshot a life goes on.

    Raises:
        RecordRejected: It is not there, or not as long.
    """
    life = earlier.get(event.life)
    segments = [segment for segment in life.segments if segment.round == round] if life is not None else []
    if not segments or len(segments[-1].log) < event.commits:
        raise RecordRejected(
            f"a replica goes on from a snapshot of life {event.life} of its server, after {event.commits} steps of "
            f"round {round}, and the log of that life does not have them; copy it from its host"
        )
    return segments[-1]


Members = Mapping[tuple[int, PeerId], Segment]
"""Of one record: what each member, by stage and peer, did in the round; one whose log is missing is not there."""


def members_of(record: Record, lives: Sequence[Life], logs: Logs) -> Members:
    """Return the segments that a record speaks of.

    A peer may have had several lives in a round. It is the last one whose steps are those that it has joined with; if
    there is none, the last one of all, and whoever compares the logs will see it.

    Args:
        record: Of the round.
        lives: All of the run.
        logs: The round's step log, by replica; without one, the last life counts.
    """
    found: dict[tuple[int, PeerId], Segment] = {}
    for outcome in record.stages:
        for peer in outcome.members:
            segments = [
                life_segments[-1]
                for life in lives
                if (life.peer, life.stage) == (peer, outcome.stage)
                and (life_segments := [s for s in life.segments if s.round == record.round])
            ]
            wanted = logs[peer][1] if peer in logs else None
            equal = [segment for segment in segments if segment.log == wanted]
            if segments:
                found[outcome.stage, peer] = (equal or segments)[-1]
    return found
