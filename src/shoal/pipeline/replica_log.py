"""What one replica did, in the order in which it changed the state of its device: for `shoal replay`.

    replicas/<peer>.<n>.jsonl      the n-th replica that this peer has been, from 1; one line for each event

    started  ->  (loaded -> resumed? -> (began | applied)*)*

The step logs of `averaging.journal` say what was committed. They do not say what a replica did that died, was left out
of a record or trained on beside one; others have computed with its weights, and its optimizer goes on from there. This
does. It is a file of the replica's own host, written line by line before the next operation begins: a kill takes no
line that anybody could have seen the effect of. While the disk takes nothing, or does not answer, lines wait in memory
and training goes on; a file that waits for too long ends early.

New kinds of lines may be added: each says in `event` what it is.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from shoal.errors import MALFORMED, RecordRejected
from shoal.events.base import emit
from shoal.events.steps import ReplicaLogEnded
from shoal.file_thread import FileThread, number_of, remedy_of
from shoal.ids import PeerId, StepKey
from shoal.runtime.hardware import machine_type, program_versions
from shoal.swarm.step_operations import Operation, OperationKind, StepTotals
from shoal.telemetry.registry import MetricRegistry
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.step import Open

logger = logging.getLogger(__name__)

_FOLDER = "replicas"
_SUFFIX = ".jsonl"
_MAX_WAITING_BYTES, _MAX_WAITING = 1 << 20, 10_000
"""Of lines that the disk has not taken, and how many where it does not answer: those of some thousand steps."""


class Place(msgspec.Struct, frozen=True):
    """Where a replica computes: what its bits depend on beside the configuration.

    Attributes:
        device: As torch names it: "cpu", "mps" or "cuda:<i>".
        num_threads: Of the thread that computes.
        machine: Processor and instruction set; for a GPU also its name.
        versions: Of the programs, by name.
    """

    device: str
    num_threads: int
    machine: dict[str, str]
    versions: dict[str, str]


class Started(msgspec.Struct, frozen=True, tag="started", tag_field="event"):
    """A replica with the parameters of D_0 and an optimizer that has done no step."""

    run_id: str
    peer: PeerId
    stage: int
    place: Place


class Loaded(msgspec.Struct, frozen=True, tag="loaded", tag_field="event"):
    """Parameters and buffers are now those of record `round`. Of earlier training, the optimizer's state stays. The
    hashes are those of another record where the stage was restored.

    Attributes:
        hashes: Of parameters, momentum and buffers.
        record: The record's hash, because a split may leave two records of a round. Empty in older logs.
        anew: The record is of another chain than the one before: the optimizer has done no step.
        keeps_rest: Of the parameters only the fragment that the round has averaged is now the record's.
    """

    round: int
    hashes: StageHashes
    record: str = ""
    anew: bool = False
    keeps_rest: bool = False


class Began(msgspec.Struct, frozen=True, tag="began", tag_field="event"):
    """The first operation of a step begins, and with it all of them see the parameters as they are now.
    `microbatch_samples` is how its samples are cut, in their order, `microbatch_targets` what each part weighs.
    `loss_scale` is that of `Open`."""

    key: StepKey
    path: tuple[PeerId, ...]
    samples: tuple[SampleRange, ...]
    microbatch_samples: tuple[int, ...]
    microbatch_targets: tuple[int, ...]
    loss_scale: float = 1.0


class Applied(msgspec.Struct, frozen=True, tag="applied", tag_field="event"):
    """A step was committed: what its gradients came to here, and with what they were applied. Null stands for a number
    that is not finite; `loss` is there in the last stage only."""

    key: StepKey
    scale: float
    lr: float
    skipped: bool
    squared_norm: float | None
    loss: float | None


class Resumed(msgspec.Struct, frozen=True, omit_defaults=True, tag="resumed", tag_field="event"):
    """The replica goes on from a snapshot: it is as the `generation`-th replica of this peer was after its first
    `commits` steps of the round that has just begun. With a `peer` its optimizer is as that one's was before the first
    step."""

    generation: int
    commits: int
    peer: PeerId | None = None


Line = Started | Loaded | Resumed | Began | Applied
"""One line of the file."""

_decoder = msgspec.json.Decoder(Line)


class ReplicaLog:
    """The file of one replica, which `close` ends.

    Args:
        directory: The run's, on this host.
        hashes: Of the state that the replica holds.

    Attributes:
        generation: Which replica of this peer this is, counted in its log files; None: there is no file.
        follows: Whether the generation before served the same stage of the same run.
    """

    def __init__(
        self,
        directory: Path,
        started: Started,
        hashes: Callable[[], StageHashes],
        metrics: MetricRegistry | None = None,
    ) -> None:
        self._hashes = hashes
        self._failing = (metrics or MetricRegistry()).gauge("disk.failing", what="replica_log")
        self._totals: dict[StepKey, StepTotals] = {}
        self._thread = FileThread(
            "replica log", lambda: self._failing.set(errno.ETIMEDOUT), path=_path(directory / _FOLDER, started.peer, 1)
        )
        self._descriptor: int | None = None  # this and what waits is the thread's
        self._waiting = bytearray()
        self._has_ended = False
        self.generation: int | None = None
        self.follows = False
        opened = self._thread.do(partial(self._open, directory / _FOLDER, started))
        try:
            if not opened.done():
                raise OSError(errno.ETIMEDOUT, f"{directory} does not answer")
            self.generation, self.follows = opened.result()
        except OSError as error:
            self._give_up(error.strerror or str(error), number_of(error))
            self._thread.do(self._end)
        self._write(started)

    def loaded(self, round: int, record: str, anew: bool, keeps_rest: bool = False) -> None:
        """The replica holds the state of record `round`, whose hash is `record`; see `Loaded` for the others."""
        self._totals.clear()
        self._write(Loaded(round, self._hashes(), record, anew, keeps_rest))

    def resumed(self, generation: int, commits: int, peer: PeerId | None = None) -> None:
        """The replica goes on from a snapshot of an earlier generation, or of another peer's."""
        self._write(Resumed(generation, commits, peer))

    def begins(self, request: Open) -> None:
        """The first operation of a step is about to be given to the device."""
        path = tuple(hop.peer for hop in request.path)
        sizes, targets = request.microbatch_samples, request.microbatch_targets
        self._write(Began(request.key, path, request.samples, sizes, targets, request.loss_scale))

    def done(self, operation: Operation, totals: StepTotals | None) -> None:
        """The device has done an operation; `totals` as in `StepReplica.finished`."""
        if totals is not None:
            self._totals[operation.key] = totals
        if operation.kind not in (OperationKind.COMMIT, OperationKind.DROP):
            return
        found, decision = self._totals.pop(operation.key, None), operation.decision
        if decision is not None:
            squared_norm, loss = (found.squared_norm, found.loss) if found is not None else (None, None)
            # What is not finite becomes null in JSON.
            self._write(Applied(operation.key, decision.scale, decision.lr, decision.skipped, squared_norm, loss))

    def close(self) -> None:
        """Write nothing more."""
        self._has_ended = True
        self._thread.do(self._end)
        self._thread.end()

    def _write(self, line: Line) -> None:
        if self._has_ended:
            return
        if self._thread.num_waiting > _MAX_WAITING:
            self._give_up("the disk does not answer", errno.ETIMEDOUT)
            self._thread.do(self._end)
            return
        self._thread.do(partial(self._take, msgspec.json.encode(line) + b"\n"))

    def _give_up(self, reason: str, number: int) -> None:
        self._has_ended = True
        self._failing.set(number)
        emit(logger, ReplicaLogEnded(f"{reason}: {remedy_of(number)}", "this run cannot be replayed"))

    # -- in the thread

    def _open(self, folder: Path, started: Started) -> tuple[int, bool]:
        self._descriptor, generation = _create(folder, started.peer)
        return generation, generation > 1 and _is_same(_path(folder, started.peer, generation - 1), started)

    def _take(self, content: bytes) -> None:
        self._waiting += content
        self._write_waiting()

    def _write_waiting(self) -> None:
        """Write what the disk takes of the lines that wait."""
        if self._descriptor is None:
            return
        try:
            while self._waiting:
                del self._waiting[: os.write(self._descriptor, self._waiting)]
        except OSError as error:
            self._failing.set(number_of(error))
            # A line that is missing would make all later ones useless, so none is left out.
            if len(self._waiting) > _MAX_WAITING_BYTES and not self._has_ended:
                self._give_up(error.strerror or str(error), number_of(error))
            if self._has_ended:
                self._close()
        else:
            self._failing.set(0.0)

    def _end(self) -> None:
        """Write what the disk still takes, and nothing more."""
        self._write_waiting()
        self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        self._waiting.clear()
        if descriptor is not None:
            os.close(descriptor)


def place_of(device: str, num_threads: int, capability: str, gpu: str | None) -> Place:
    """Return where a replica of this process computes.

    Args:
        num_threads: Of the thread that computes.
        capability: The instruction set that torch has chosen on this processor.
        gpu: Its name; None: the device is the processor.
    """
    machine = {**machine_type(), "instructions": capability}
    if gpu is not None:
        machine["gpu"] = gpu
    return Place(device, num_threads, machine, program_versions())


def read_replica_log(path: Path) -> list[Line]:
    """Return the lines of a file; one that was not written to its end is none.

    Raises:
        RecordRejected: It holds something else.
        OSError: It cannot be read.
    """
    *lines, _unfinished = path.read_bytes().split(b"\n")
    try:
        return [_decoder.decode(line) for line in lines]
    except MALFORMED as error:
        raise RecordRejected(f"{path} is no log of a replica: {error}; restore it from a copy") from error


def replica_logs(directory: Path) -> list[Path]:
    """Return the files of all replicas in a run's directory, those of a peer in their order."""
    found = [(path.name.removesuffix(_SUFFIX).rpartition("."), path) for path in (directory / _FOLDER).glob("*.jsonl")]
    numbered = [(peer, int(number), path) for (peer, _, number), path in found if number.isdecimal()]
    return [path for _, _, path in sorted(numbered)]


def generation_number(path: Path) -> int:
    """Return which of its peer's replicas a file of `replica_logs` is of."""
    return int(path.name.removesuffix(_SUFFIX).rpartition(".")[2])


def _path(folder: Path, peer: PeerId, number: int) -> Path:
    return folder / f"{peer}.{number}{_SUFFIX}"


def _create(folder: Path, peer: PeerId) -> tuple[int, int]:
    """Open a file of this peer that was not there; returns its number as well."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        with suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            return os.open(_path(folder, peer, number), flags, 0o666), number
        number += 1


def _is_same(path: Path, started: Started) -> bool:
    """Whether a file is of a replica of the same stage of the same run."""
    try:
        with path.open("rb") as file:
            line = _decoder.decode(file.readline())
    except (OSError, *MALFORMED):
        return False
    return isinstance(line, Started) and (line.run_id, line.stage) == (started.run_id, started.stage)
