"""What a client that is killed leaves to its next start: a file from which the totals and the round go on.

    client.state    [ Saved ] [ event ] [ event ] ...     each with its length before it, in msgpack

`Saved` is how things stood when the round began; it replaces the file as a whole, before anybody hears of the round.
What happens in the round is appended when it is counted. So the file never holds more than one round, and a reader who
counts its events again knows what its writer knew. It survives the process and is not forced to the disk: whoever
could start the client again, the launcher, would not survive the machine either.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shoal.client.counters import Counted
from shoal.client.failovers import Failovers
from shoal.client.progress import Progress
from shoal.control.records import VerifiedRecord
from shoal.errors import RecordRejected, StorageError
from shoal.ids import PeerId
from shoal.swarm.routing import Pipeline
from shoal.swarm.sample_ranges import Ranges
from shoal.wire.messages.base import StepRange, Struct
from shoal.wire.messages.control import EvalReport, StepReport, TrainerDone

FILE_NAME = "client.state"
_LENGTH_BYTES = 4


@dataclass(frozen=True)
class RoundPlan:
    """A round as it was given to the trainers.

    Attributes:
        round: 1-based; the evaluation at the end of the run has the number after the last round.
        steps: of each slot; none in that evaluation.
        pipelines: the home of each slot.
        generations: of the slots' trainers when the round began.
        begun_s: on the monotonic clock.
        speeds: samples per second of the pipelines, 0 where not known; empty where shares are fixed.
    """

    round: int
    steps: StepRange
    pipelines: tuple[Pipeline, ...]
    generations: dict[int, int]
    begun_s: float
    speeds: tuple[float, ...] = ()


class RestoredStage(Struct, frozen=True):
    """A stage whose state was lost.

    Attributes:
        in_round: the round in which it starts again.
        lost_rounds: the first and the last round of which nothing is left of the stage.
        parameters: the hash of the parameters from which the stage starts again.
    """

    stage: int
    in_round: int
    lost_rounds: tuple[int, int]
    parameters: str


class LeftChain(Struct, frozen=True):
    """A chain of records that was not chosen when it met another one.

    Attributes:
        base_round: of its newest record.
        record: the hash of its newest record.
        common_round: the last round that the chain which stands shares with it.
        samples: how many it has recorded, including those of the common rounds.
        samples_freed: how many of them the other chain has not recorded.
    """

    base_round: int
    record: str
    common_round: int
    samples: int
    samples_freed: int


@dataclass
class Saved:
    """Everything that a client knows beyond the records, when a round begins.

    Attributes:
        generation: which start of the client has written this, counted from 1.
        ballot_number: 0 before the first ballot.
        plan: None before the first round.
        is_finished: the run is trained and evaluated.
        rounds, num_replicas, idle_rounds, durations_s: see `client.rounds`.
        hashes: of each stage's outer parameters.
        recorded: samples of all records.
        last_numbers: the last step that each slot has reported.
        seconds_to_first_step: see `client.watch`; None before that step.
        servers: as the registry named them.
        stages_restored: see `client.stage_watch`.
        servers_moved: see `client.reassignment`.
        base: hash of the record on top of which the round is trained.
        chain: hash of the record from which the run went on when another client last overtook this one; empty: none.
        chains_left: see `client.chain_watch`.
    """

    run_id: str
    generation: int = 1
    ballot_number: int = 0
    plan: RoundPlan | None = None
    is_finished: bool = False
    rounds: int = 0
    num_replicas: int = 0
    idle_rounds: int = 0
    durations_s: list[float] = field(default_factory=list[float])
    hashes: dict[int, str] = field(default_factory=dict[int, str])
    recorded: Ranges = ()
    num_train: int = 0
    num_holdout: int = 0
    progress: Progress = field(default_factory=Progress)
    last_numbers: dict[int, int] = field(default_factory=dict[int, int])
    seconds_to_first_step: float | None = None
    failovers: Failovers = field(default_factory=Failovers)
    servers: tuple[VerifiedRecord, ...] = ()
    counted: Counted = field(default_factory=Counted)
    stages_restored: tuple[RestoredStage, ...] = ()
    servers_moved: int = 0
    base: str = ""
    chain: str = ""
    chains_left: tuple[LeftChain, ...] = ()


class ClientStarted(Struct, frozen=True, tag="started"):
    """A client has read the file and goes on from it."""


class SlotDone(Struct, frozen=True, tag="done"):
    """A trainer has done its steps."""

    generation: int
    report: TrainerDone


class Lost(Struct, frozen=True, tag="lost"):
    """A process was lost; see `Failovers.lost`."""

    kind: str
    slots: tuple[int, ...]
    at_s: float


class Counts(Struct, frozen=True, tag="counts"):
    """What a process has counted since it was started."""

    peer: PeerId
    counts: dict[str, int]


class StagesRestored(Struct, frozen=True, tag="restored"):
    """All stages that had to be restored so far."""

    stages: tuple[RestoredStage, ...]


class ServersMoved(Struct, frozen=True, tag="moved"):
    """How many servers have come to another stage so far."""

    number: int


class ChainsLeft(Struct, frozen=True, tag="chains_left"):
    """All chains of records that were left so far."""

    chains: tuple[LeftChain, ...]


Event = ClientStarted | StepReport | EvalReport | SlotDone | Lost | Counts | StagesRestored | ServersMoved | ChainsLeft

_decode_saved = msgspec.msgpack.Decoder(Saved).decode
_decode_event: Callable[[bytes], Event] = msgspec.msgpack.Decoder(Event).decode


class Diary:
    """The file of one run's client.

    Attributes:
        saved: how things stood when the round began.
        events: what an earlier start has counted since then.
        generation: which start of the client this is, counted from 1.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        """Read what an earlier start has left, if there was one.

        Raises:
            RecordRejected: the file is damaged, of another run, or gone although there are records.
            OSError: it cannot be read.
            StorageError: it cannot be written.
        """
        self._path = directory / FILE_NAME
        self._file: int | None = None
        self.saved = Saved(run_id)
        self.events: tuple[Event, ...] = ()
        if self._path.exists():
            self.saved, self.events, num_bytes = _read(self._path)
            if self.saved.run_id != run_id:
                raise RecordRejected(f"{self._path} is of run {self.saved.run_id}, this is run {run_id}: remove it")
            self.generation = self.saved.generation + sum(isinstance(event, ClientStarted) for event in self.events) + 1
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.ftruncate(self._file, num_bytes)
            self.note(ClientStarted())
        elif any(path.stem != "round_0000" for path in (directory / "rounds").glob("round_*.json")):
            raise RecordRejected(
                f"{self._path} is gone, but {directory / 'rounds'} holds records: without it nobody knows where the "
                "run was; restore it from a copy, or start a new run"
            )
        else:
            self.generation = 1
            self.save(self.saved)

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier start of the client was here before this one."""
        return self.generation > 1

    def save(self, saved: Saved) -> None:
        """Put down how things stand, in place of everything before.

        Raises:
            StorageError: it cannot be written.
        """
        aside = self._path.with_name(f".{self._path.name}.unfinished")
        with _storing(self._path):
            file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                _append(file, saved)
                aside.replace(self._path)
            except OSError:
                os.close(file)
                aside.unlink(missing_ok=True)
                raise
        self.close()
        self._file = file

    def note(self, event: Event) -> None:
        """Append what has been counted; nothing after `close`.

        Raises:
            StorageError: it cannot be written.
        """
        if self._file is not None:
            with _storing(self._path):
                _append(self._file, event)

    def close(self) -> None:
        """Write nothing more."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextmanager
def _storing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write {path} ({error.strerror or error}): without it a client that is killed could not be started "
            "again, so the run ends; free space there, or start again with --log-dir on another disk"
        ) from error


def _append(file: int, what: Saved | Event) -> None:
    body = msgspec.msgpack.encode(what)
    content = len(body).to_bytes(_LENGTH_BYTES) + body
    # In one call, so that a process that is killed leaves all of it or a beginning, which is recognised.
    written = os.write(file, content)
    if written != len(content):
        raise OSError(f"only {written} of {len(content)} bytes were written; is the disk full?")


def _read(path: Path) -> tuple[Saved, tuple[Event, ...], int]:
    """Return what a file holds, and how many bytes of it are whole."""
    content = path.read_bytes()
    parts: list[bytes] = []
    position = 0
    while position + _LENGTH_BYTES <= len(content):
        stop = position + _LENGTH_BYTES + int.from_bytes(content[position : position + _LENGTH_BYTES])
        if stop > len(content):
            break  # its writer was killed in the middle of the last one
        parts.append(content[position + _LENGTH_BYTES : stop])
        position = stop
    try:
        if not parts:
            raise ValueError("it ends before it has begun")
        return _decode_saved(parts[0]), tuple(map(_decode_event, parts[1:])), position
    except (msgspec.MsgspecError, ValueError) as error:
        raise RecordRejected(
            f"{path} does not say how the client left the run: {error}; restore it from a copy, or start a new run"
        ) from error
