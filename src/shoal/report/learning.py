"""How a run has learned, by what its clients have noted in `events.jsonl`.

events.jsonl --read_course--> events --learning_of--> Learning: losses, rounds, incidents over the run's samples
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.errors import MALFORMED
from shoal.events.base import EVENTS_FILE, Event, name_of
from shoal.events.losses import DataServerLost, LossFound, ServerLost, TrainerLost
from shoal.events.run import EvaluationDone, LossPart, RoundBegun, RoundRecorded
from shoal.events.stages import StageBeganAnew, StagesGiven
from shoal.log import written_lines

_COURSE = (RoundBegun, RoundRecorded, EvaluationDone)
_INCIDENTS = (ServerLost, TrainerLost, DataServerLost, LossFound, StageBeganAnew, StagesGiven)
_KINDS: dict[str, type[Event]] = {name_of(kind): kind for kind in (*_COURSE, *_INCIDENTS)}


@dataclass(frozen=True)
class Trained:
    """The training loss of some steps in a row; `samples` is where they end in the run, `loss` their samples' loss."""

    samples: int
    loss: LossPart


@dataclass(frozen=True)
class Learning:
    """How a run has learned. Numbers of samples count from the beginning of the run, also of one that came from another
    host; losses are means over targets, in nats.

    Attributes:
        trained: in the order of the run.
        held_out: samples before an evaluation, and its loss.
        rounds: samples at the end of each round whose record is known.
        incidents: samples at which something was lost or begun anew, and what.
    """

    trained: tuple[Trained, ...]
    held_out: tuple[tuple[int, float], ...]
    rounds: dict[int, int]
    incidents: tuple[tuple[int, str], ...]
    seconds: float


def read_learning(log_dir: Path) -> Learning:
    """Return how the run in this folder has learned; nothing if its client has noted nothing.

    Raises:
        OSError: what it has noted cannot be read.
    """
    return learning_of(read_course(log_dir))


def learning_of(noted: Iterable[tuple[float, Event]]) -> Learning:
    """Return what these events come to.

    Args:
        noted: with the time of each, in seconds; of rounds that were trained again the last one counts.
    """
    fold = _Fold()
    for unix_s, event in noted:
        fold.apply(unix_s, event)
    return fold.result()


def read_course(log_dir: Path) -> Iterator[tuple[float, Event]]:
    """Yield what the client of the run in this folder has noted of its rounds and losses, each with its Unix time.

    Raises:
        OSError: it cannot be read.
    """
    for line in written_lines(log_dir / EVENTS_FILE):
        try:
            head = msgspec.json.decode(line, type=_LineHead)
            if (kind := _KINDS.get(head.event)) is not None:
                yield head.time.timestamp(), msgspec.json.decode(line, type=kind)
        except MALFORMED:
            continue  # whoever wrote it was killed meanwhile, or it is of another version


class _LineHead(msgspec.Struct):
    time: Annotated[datetime, msgspec.Meta(tz=True)]
    event: str


@dataclass
class _Fold:
    _rounds: dict[int, RoundRecorded] = field(default_factory=dict[int, RoundRecorded])
    _losses: dict[int, float] = field(default_factory=dict[int, float])
    _incidents: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    _open: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    _begun_s: float = 0.0

    def apply(self, unix_s: float, event: Event) -> None:
        match event:
            case RoundBegun():
                self._begun_s = unix_s
            case RoundRecorded():
                self._recorded(unix_s, event)
            case EvaluationDone():
                self._losses[event.base_round] = event.loss
            case _ if isinstance(event, _INCIDENTS):
                self._open.append((unix_s, _said(event)))
            case _:
                pass

    def _recorded(self, unix_s: float, event: RoundRecorded) -> None:
        # Later ones are of a chain from which the run has not gone on, as before it was resumed.
        for kept in (self._rounds, self._losses):
            for number in [number for number in kept if number >= event.round]:
                del kept[number]
        self._rounds[event.round] = event
        trained = samples_after(event) - event.samples_before
        took_s = unix_s - self._begun_s
        for at_s, said in self._open:
            share = (at_s - self._begun_s) / took_s if took_s > 0 else 1.0
            self._incidents.append((event.samples_before + round(min(max(share, 0.0), 1.0) * trained), said))
        self._open.clear()

    def result(self) -> Learning:
        rounds = {number: samples_after(event) for number, event in sorted(self._rounds.items())}
        # What a round trains on begins where the one before ended, also if that one was another host's.
        evaluable = {number - 1: event.samples_before for number, event in self._rounds.items()} | rounds
        last = max(rounds.values(), default=0)
        incidents = [*self._incidents, *((last, said) for _, said in self._open)]
        return Learning(
            trained=tuple(part for number in rounds for part in _parts(self._rounds[number])),
            held_out=tuple((evaluable[at], loss) for at, loss in sorted(self._losses.items()) if at in evaluable),
            rounds=rounds,
            incidents=tuple((min(at, last), said) for at, said in incidents),
            seconds=sum(event.duration_s or 0.0 for event in self._rounds.values()),
        )


def _parts(event: RoundRecorded) -> Iterator[Trained]:
    samples = event.samples_before
    for part in event.curve:
        samples += part.samples
        yield Trained(samples, part)


def samples_after(event: RoundRecorded) -> int:
    """Return how many samples of the run are behind the end of this round."""
    return event.samples_before + sum(part.samples for part in event.curve)


def _said(event: Event) -> str:
    """Name what was lost in few words."""
    match event:
        case ServerLost() | LossFound():
            return f"{event.who} lost"
        case TrainerLost():
            return f"trainer {event.slot} lost"
        case DataServerLost():
            return "data server lost"
        case StageBeganAnew():
            return f"stage {event.stage} began anew"
        case _:
            return "resumed from a checkpoint"
