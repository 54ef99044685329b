"""The files that a run leaves behind about its rounds, written by the client: from them alone it can be checked.

    rounds/round_0000.json         D_0: seed, configuration, thread count, versions, machine
    rounds/round_0001.json         D_1, readable, with its encoded bytes, signature and hash
    steps/round_0001.jsonl         one line for each step that each final member has committed in round 1, as applied
    steps/round_0001.*.prepared    the same while the round's record, whose hash it names, is not committed
    left/1/                        records and step logs of a chain from which the run has not gone on (`set_aside`);
                                   a file that was damaged then has `.damaged` behind its name

A file is there as a whole or not at all: it is written under another name, forced to the disk, and renamed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from shoal.errors import MALFORMED, RecordRejected, StorageError, os_error_as
from shoal.file_thread import remedy, said_by_disk
from shoal.ids import PeerId
from shoal.runtime.durable_files import put_whole, sync_directory
from shoal.swarm.records import Logs, genesis_hash, record_hash, signed_from_json, signed_to_json
from shoal.wire.messages.round import Record, SignedRecord
from shoal.wire.messages.step import StepEntry

_ROUNDS, _STEPS, _LEFT = "rounds", "steps", "left"

ELSEWHERE = "start again with --log-dir on another disk"
"""What helps where the folder of a run cannot be written."""

_FORM = 2
"""Of all files of a run, in `rounds`, `steps` and `replicas`: goes up when one of them changes its form."""


class Genesis(msgspec.Struct, frozen=True):
    """What D_0 follows from, and where the run was begun.

    Attributes:
        authority: Of the swarm; warrants the signers of the records that follow.
        configuration: What the peers share; JSON values only.
        num_threads: Of the servers on the client's host: one number for all, or one for each.
        versions: Of the programs, by name.
        machine: Of the client's host.
    """

    seed: int
    authority: PeerId
    configuration: dict[str, Any]
    num_threads: tuple[int, ...]
    versions: dict[str, str]
    machine: dict[str, str] = {}

    def hash(self, run_id: str) -> str:
        """What D_1 names as the record before it."""
        return genesis_hash(run_id, self.seed, self.configuration, self.authority)


class _OfForm(msgspec.Struct):
    form: int = 1  # of files that do not say it


class StepLine(msgspec.Struct, frozen=True):
    """One line of a step log: which replica of which stage has committed what."""

    peer: PeerId
    stage: int
    entry: StepEntry


def write_genesis(directory: Path, genesis: Genesis) -> None:
    """Write what D_0 follows from into the run's directory.

    Raises:
        StorageError: The file cannot be written.
    """
    write_whole(_round_file(directory, 0), genesis_content(genesis))


def genesis_content(genesis: Genesis) -> bytes:
    """The file of D_0."""
    content = json.dumps({"form": _FORM} | msgspec.to_builtins(genesis), indent=2, sort_keys=True)
    return content.encode() + b"\n"


def genesis_file(directory: Path) -> bytes:
    """Return the file of D_0 as it is; raises OSError."""
    return _round_file(directory, 0).read_bytes()


def restore_genesis(directory: Path, content: bytes) -> str:
    """Write the file of D_0 as a copy of it is, unless there is one that can be read.

    Returns:
        Why the one that was there cannot be read; it gets another name. Empty: it can, or there was none.

    Raises:
        StorageError: The file cannot be written.
        OSError: The one that is there cannot be read or renamed.
    """
    path, problem = _round_file(directory, 0), ""
    if path.exists():
        try:
            here = path.read_bytes()
            if msgspec.json.decode(here, type=_OfForm).form == _FORM:
                genesis_of(here, str(path))
            return ""
        except (RecordRejected, *MALFORMED) as error:
            path.replace(_damaged(path))
            problem = f"{path} is damaged ({error.__cause__ or error})"
    write_whole(path, content)
    return problem


def read_genesis(directory: Path) -> Genesis:
    """Return what D_0 follows from.

    Raises:
        RecordRejected: The file says something else, or another version of shoal has written it.
        OSError: It cannot be read.
    """
    path = _round_file(directory, 0)
    return genesis_of(path.read_bytes(), str(path))


def genesis_of(content: bytes, name: str) -> Genesis:
    """Return what the file of D_0, or a copy of it, says.

    Args:
        name: Of the file, for messages.

    Raises:
        RecordRejected: It says something else, or another version of shoal has written it.
    """
    try:
        form = msgspec.json.decode(content, type=_OfForm).form
        if form != _FORM:
            version = "an earlier" if form < _FORM else "a later"
            raise RecordRejected(f"{name} was written by {version} version of shoal: use that one for this run")
        return msgspec.json.decode(content, type=Genesis)
    except MALFORMED as error:
        raise RecordRejected(f"{name} is no beginning of a run: {error}; restore it from a copy") from error


def keep_steps(directory: Path, round: int, digest: str, logs: Logs) -> None:
    """Write the step logs of a record that may be committed from now on, even if this process ends.

    Raises:
        StorageError: The file cannot be written.
    """
    lines = [
        msgspec.json.encode(StepLine(peer, stage, entry)) + b"\n"
        for peer, (stage, log) in sorted(logs.items(), key=lambda item: (item[1][0], item[0]))
        for entry in log
    ]
    write_whole(_prepared_file(directory, round, digest), b"".join(lines))


def write_round(directory: Path, record: Record, signed: SignedRecord) -> None:
    """Write a committed round: first its step logs, then the record, so that a record is never without its steps.

    The logs are those that were kept for this record; those of records that were not committed are removed. There is no
    file of them only if the coordinator of another host has gathered them. Writing a round again changes nothing.

    Raises:
        StorageError: A file cannot be written.
    """
    steps = _steps_file(directory, record.round)
    prepared = _prepared_file(directory, record.round, record_hash(signed))
    with os_error_as(partial(_cannot_write, steps)):
        if prepared.exists():
            prepared.replace(steps)
            sync_directory(steps.parent)
        for path in steps.parent.glob(f"{steps.stem}.*.prepared"):
            path.unlink()
    content = {"record": _readable(record), **signed_to_json(signed)}
    write_whole(_round_file(directory, record.round), json.dumps(content, indent=2).encode() + b"\n")


def set_aside(directory: Path, record: Record, digest: str) -> dict[int, str]:
    """Put away the records and step logs that are there, unless the run goes on from them with this record.

    They move into `left/`, beside those that were moved there before. D_0 stays, because all chains have it, and so do
    the rounds up to the record if it is among those that are there: then the run goes back to it. A file of that round
    or a later one that is damaged moves too, and gets another name: it is of no chain.

    Args:
        record: The one from which the run goes on.

    Returns:
        Of the rounds whose records are damaged what is wrong with them.

    Raises:
        OSError: A file that is there cannot be read.
        StorageError: A file cannot be moved.
    """
    here: dict[int, str | None] = {}  # the hash of each record; None: it is damaged
    damaged: dict[Path, str] = {}
    for round, path in record_files(directory):
        try:
            found = read_record(path)
        except RecordRejected as error:
            damaged[path] = f"{path} is damaged ({error.__cause__})"
            here[round] = None
        else:
            if found is not None:
                here[round] = record_hash(found[1])
    if not here or here[max(here)] in (record.previous, digest):
        return {}
    if digest in here.values():
        kept_rounds = record.round
    elif record.round in here and here[record.round] is None and record.previous in here.values():
        kept_rounds = record.round - 1
    else:
        kept_rounds = 0
    steps = sorted((directory / _STEPS).glob("round_*"), key=_round_of)
    files = [*(path for _, path in record_files(directory)), *steps]
    files = [path for path in files if _round_of(path) > kept_rounds]
    number = len(list((directory / _LEFT).glob("*"))) + 1
    aside = directory / _LEFT / str(number)
    try:
        for path in files:
            place = aside / path.relative_to(directory)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(_damaged(place) if path in damaged else place)
    except OSError as error:
        raise StorageError(
            f"cannot move records to {aside} ({said_by_disk(error, aside)}): they are of a chain that was left, and "
            f"must not be mixed with others; {remedy(error, aside, ELSEWHERE)}"
        ) from error
    return {_round_of(path): damaged[path] for path in files if path in damaged}


def _damaged(path: Path) -> Path:
    """Where a file is kept that cannot be read: under no name that others are found by."""
    return path.with_name(f"{path.name}.damaged")


def left_folders(directory: Path) -> list[Path]:
    """What was put away by `set_aside`: folders with records and step logs as a run's directory has them, in order."""
    return sorted((path for path in (directory / _LEFT).glob("*") if path.name.isdecimal()), key=lambda p: int(p.name))


def read_records(directory: Path) -> Iterator[tuple[Record, SignedRecord]]:
    """The records of a run in the order of their rounds, from D_1 on; their chain is not checked.

    Raises:
        RecordRejected: A file is none of these.
        OSError: A file cannot be read.
    """
    for _, path in record_files(directory):
        if (found := read_record(path)) is not None:
            yield found


def last_record(directory: Path) -> tuple[Record, SignedRecord] | None:
    """The newest record of a run; None if there is none but D_0. Raises as `read_records` does, if it is the newest."""
    files = reversed(record_files(directory))
    return next((found for _, path in files if (found := read_record(path)) is not None), None)


def record_files(directory: Path) -> list[tuple[int, Path]]:
    """The files of D_0 and of all records, in the order of their rounds; names have more digits from 10000 on."""
    return sorted((_round_of(path), path) for path in (directory / _ROUNDS).glob("round_*.json"))


def read_record(path: Path) -> tuple[Record, SignedRecord] | None:
    """The record in a file; None: it is that of D_0. Raises as `read_records` does."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
        if "body" not in content:
            return None
        signed = signed_from_json(content)
        return msgspec.msgpack.decode(signed.body, type=Record), signed
    except (KeyError, *MALFORMED) as error:
        raise RecordRejected(f"{path} is no round record: {error}; remove it or restore it from a copy") from error


def follows(directory: Path, record: Record) -> bool:
    """Whether a record is the next one of those that are there. A file of its own round that is damaged is not there.
    Else raises as `read_records` does."""
    for round, path in reversed(record_files(directory)):
        try:
            found = read_record(path)
        except RecordRejected:
            if round != record.round:
                raise
            continue
        if found is not None:
            return record.previous == record_hash(found[1])
    return record.round == 1


def read_steps(directory: Path, round: int) -> list[StepLine]:
    """The step log of a round.

    Raises:
        RecordRejected: The file is no step log.
        OSError: It cannot be read.
    """
    path = _steps_file(directory, round)
    try:
        return [msgspec.json.decode(line, type=StepLine) for line in path.read_bytes().splitlines()]
    except MALFORMED as error:
        raise RecordRejected(f"{path} is no step log: {error}; remove it or restore it from a copy") from error


def rounds_with_steps(directory: Path) -> list[int]:
    """The rounds of which there is a step log, in order."""
    found = ((_round_of(path), path) for path in (directory / _STEPS).glob("round_*.jsonl"))
    return sorted(round for round, path in found if round > 0 and path == _steps_file(directory, round))


def _round_of(path: Path) -> int:
    number = path.name.partition(".")[0].removeprefix("round_")
    return int(number) if number.isdecimal() else -1


def _round_file(directory: Path, round: int) -> Path:
    return directory / _ROUNDS / f"round_{round:04d}.json"


def _steps_file(directory: Path, round: int) -> Path:
    return directory / _STEPS / f"round_{round:04d}.jsonl"


def _prepared_file(directory: Path, round: int, digest: str) -> Path:
    return directory / _STEPS / f"round_{round:04d}.{digest[:16]}.prepared"


def _readable(record: Record) -> object:
    """The record with names for its fields; the wire form has none."""
    return {
        "run_id": record.run_id,
        "round": record.round,
        "ballot": record.ballot._asdict(),
        "previous": record.previous,
        "stages": [
            {
                "stage": outcome.stage,
                "epoch": outcome.epoch,
                "members": dict(zip(outcome.members, outcome.weights, strict=True)),
                "scales": dict(zip(outcome.members, outcome.scales, strict=False)),
                "differed": list(outcome.differed),
                "parameters": outcome.hashes.parameters,
                "momentum": outcome.hashes.momentum,
                "buffers": outcome.hashes.buffers,
                "steps_lost": outcome.steps_lost,
                "restored": None
                if outcome.restored is None
                else {
                    "from_round": outcome.restored.round,
                    "parameters": outcome.restored.hashes.parameters,
                    "momentum": outcome.restored.hashes.momentum,
                    "buffers": outcome.restored.hashes.buffers,
                },
            }
            for outcome in record.stages
        ],
        "samples": [[item.pass_number, item.start, item.stop] for item in record.samples],
        "skipped": [[item.pass_number, item.start, item.stop] for item in record.skipped],
        "generations": {str(trainer): lowest for trainer, lowest in record.generations.items()},
        "recorded": [[item.pass_number, item.start, item.stop] for item in record.recorded],
        "origin": None if record.origin is None else {"run_id": record.origin.run_id, "record": record.origin.record},
    }


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in place as a whole, or raise and leave what was there.

    Raises:
        StorageError: It could not be written to the disk in full.
    """
    with os_error_as(partial(_cannot_write, path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        put_whole(path, content, lasting=True)


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path} ({said_by_disk(error, path)}): without its records a run can be neither checked nor "
        f"continued; {remedy(error, path, ELSEWHERE)}"
    )
