"""What a client that is killed leaves to its next start: a file from which the totals and the round go on.

    client.state    [ Saved ] [ event ] [ event ] ...     each with its length before it, in msgpack

`Saved` is how things stood when the round began; it replaces the file as a whole, before anybody hears of the round.
What happens in the round is appended when it is counted. So the file never holds more than one round, and a reader who
counts its events again knows what its writer knew. It survives the process and is not forced to the disk: whoever
could start the client again, the launcher, would not survive the machine either. Where the disk does not answer, or
takes nothing, events wait in memory and the client goes on, up to the next round: that begins when `Saved` is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from shoal.averaging.journal import ELSEWHERE
from shoal.client.totals import RunTotals
from shoal.control.records import VerifiedRecord
from shoal.errors import MALFORMED, RecordRejected, StorageError, os_error_as
from shoal.events.incidents import IncidentClosed, LossExplained, TroubleOver, TroubleSeen
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
)
from shoal.events.run import (
    ClientStarted,
    RoleCounted,
    RunLaunched,
    RunPaused,
    RunResumed,
    ShareEvaluated,
    StepReported,
    TrainerFinished,
)
from shoal.events.stages import ChainLost, MoveEnded, StageBeganAnew, StageStands
from shoal.file_thread import FileThread, number_of, remedy, said_by_disk
from shoal.swarm.run_effects import RoundPlan
from shoal.swarm.sample_ranges import Ranges
from shoal.wire.messages.round import SignedRecord

FILE_NAME = "client.state"
_LENGTH_BYTES = 4


@dataclass
class Saved:
    """Everything that a client knows beyond the records, when a round begins.

    Attributes:
        totals: what all events until then come to.
        generation: which start of the client has written this, counted from 1.
        ballot_number: 0 before the first ballot.
        plan: None before the first round.
        is_finished: the run is trained and evaluated.
        servers: as the registry named them.
        base: hash of the record on top of which the round is trained.
        chain: hash of the record from which the run went on when another client last overtook this one, or when it was
            resumed; empty: none.
        resumed: the record of the checkpoint from which the run is resumed here, until a round is begun on a later
            one; None: it was not, or has gone on.
        marks: of the windows of a stream that the records have samples of.
    """

    run_id: str
    # Without a default: in a file of an older version they are not, and a run does not go on from nothing.
    totals: RunTotals
    generation: int = 1
    ballot_number: int = 0
    plan: RoundPlan | None = None
    is_finished: bool = False
    recorded: Ranges = ()
    servers: tuple[VerifiedRecord, ...] = ()
    base: str = ""
    chain: str = ""
    resumed: SignedRecord | None = None
    marks: bytes = b""


DiaryEvent = (
    (RunLaunched | ClientStarted | StepReported | ShareEvaluated | TrainerFinished | RoleCounted)
    | (ServerLost | TrainerLost | DataServerLost | LossFound | ServerLeaving | ClientReplaced)
    | (ServerHeard | ServerBack | TrainerReady | DataServerBack)
    | (LossExplained | TroubleSeen | TroubleOver | IncidentClosed)
    | (StageBeganAnew | StageStands | MoveEnded | ChainLost)
    | (RunPaused | RunResumed)
)
"""What the next start counts again. Of the end of a round it learns from the record, and closes the round itself."""

_decode_saved = msgspec.msgpack.Decoder(Saved).decode
_decode_event: Callable[[bytes], DiaryEvent] = msgspec.msgpack.Decoder(DiaryEvent).decode


class Diary:
    """The file of one run's client.

    Attributes:
        saved: how things stood when the round began.
        events: what earlier starts have counted since then, and that this one was started.
        generation: which start of the client this is, counted from 1.
        failure: why events wait that the disk does not take (`file_thread.number_of`); 0: none does.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        """Read what an earlier start has left, if there was one.

        Raises:
            RecordRejected: the file is damaged, of another run, or gone although there are records.
            OSError: it cannot be read.
            StorageError: it cannot be written.
        """
        self._path = directory / FILE_NAME
        self._thread = FileThread("diary", path=self._path)
        self._file: int | None = None
        self._waiting = bytearray()
        self._saving: Future[None] | None = None
        self.failure = 0
        self.saved = Saved(run_id, RunTotals())
        self.events: tuple[DiaryEvent, ...] = ()
        if self._path.exists():
            self.saved, self.events, num_bytes = _read(self._path)
            if self.saved.run_id != run_id:
                raise RecordRejected(f"{self._path} is of run {self.saved.run_id}, this is run {run_id}: remove it")
            self.events += (ClientStarted(),)
            self.generation = self.saved.generation + sum(isinstance(event, ClientStarted) for event in self.events)
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.ftruncate(self._file, num_bytes)
            self.note(self.events[-1])
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
        """Put down how things stand, in place of everything before, also of what waits.

        Raises:
            StorageError: it cannot be written, and what was there still is.
        """
        self._saving = self._thread.do(partial(self._replace, _framed(saved)))
        self._look()

    def note(self, event: DiaryEvent) -> None:
        """Append what has been counted; nothing after `close`.

        Raises:
            StorageError: `save` could not write what it was given, as is known only now.
        """
        self._look()
        self._thread.do(partial(self._append, _framed(event)))

    def close(self) -> None:
        """Write nothing more."""
        self._thread.do(self._close)
        self._thread.end()

    def _look(self) -> None:
        if self._saving is not None and self._saving.done():
            saving, self._saving = self._saving, None
            saving.result()

    # -- in the thread

    def _replace(self, content: bytes) -> None:
        file = _put(self._path, content)
        self._close()
        self._file = file
        self._waiting.clear()
        self.failure = 0

    def _append(self, content: bytes) -> None:
        if self._file is None:
            return
        self._waiting += content
        try:
            _write(self._file, self._waiting)
        except OSError as error:
            self.failure = number_of(error)
        else:
            self.failure = 0

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def leave_saved(directory: Path, saved: Saved) -> None:
    """Leave to the next start of a client how things stand, in place of what an earlier one has left.

    Raises:
        StorageError: it cannot be written.
    """
    os.close(_put(directory / FILE_NAME, _framed(saved)))


def _put(path: Path, content: bytes) -> int:
    """Put a new file in place, and return it open."""
    aside = path.with_name(f".{path.name}.unfinished")
    with _storing(path):
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            _write(file, bytearray(content))
            aside.replace(path)
        except OSError:
            os.close(file)
            aside.unlink(missing_ok=True)
            raise
    return file


def _storing(path: Path) -> AbstractContextManager[None]:
    return os_error_as(
        lambda error: StorageError(
            f"cannot write {path} ({said_by_disk(error, path)}): without it a client that is killed could not be "
            f"started again; {remedy(error, path, ELSEWHERE)}"
        )
    )


def _framed(what: Saved | DiaryEvent) -> bytes:
    body = msgspec.msgpack.encode(what)
    return len(body).to_bytes(_LENGTH_BYTES) + body


def _write(file: int, content: bytearray) -> None:
    """Write it, and leave in it what the disk has not taken.

    In one call, unless the disk takes a part: a process that is killed leaves all of it or a beginning, which is
    recognised.

    Raises:
        OSError: the disk does not take all of it.
    """
    while content:
        del content[: os.write(file, content)]


def _read(path: Path) -> tuple[Saved, tuple[DiaryEvent, ...], int]:
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
    except MALFORMED as error:
        raise RecordRejected(
            f"{path} does not say how the client left the run: {error}; restore it from a copy, or start a new run"
        ) from error
