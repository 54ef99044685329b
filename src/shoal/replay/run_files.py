"""What a run has left on disk, read and put in order: configuration, records, step logs, the logs of its replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shoal.averaging.journal import (
    Genesis,
    left_folders,
    read_genesis,
    read_records,
    read_steps,
    rounds_with_steps,
)
from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.config.shared import shared_configuration
from shoal.errors import ConfigError, RecordRejected
from shoal.ids import PeerId
from shoal.pipeline.replica_log import Line, Started, generation_number, read_replica_log, replica_logs
from shoal.replay.generations import Generation, generations_of, origins_of
from shoal.swarm.records import Logs, record_hash
from shoal.wire.messages.round import Record, SignedRecord
from shoal.wire.messages.step import StepEntry


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run.

    Attributes:
        genesis: D_0.
        records: D_1, D_2, ... as far as there are files.
        logs: by round.
        uncommitted: rounds of which only a record that may be committed was written.
        left: hashes of the records that are there but belong to another chain.
    """

    directory: Path
    run_id: str
    config: Config
    genesis: Genesis
    records: tuple[tuple[Record, SignedRecord], ...]
    logs: Mapping[int, Logs]
    uncommitted: frozenset[int]
    generations: tuple[Generation, ...]
    left: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Found:
    """A record, and the folder that it and its step log are in."""

    record: Record
    signed: SignedRecord
    folder: Path


def read_run(directory: Path, config: Config | None = None) -> RunFiles:
    """Read a run's folder, and those that servers of the same host have written beside it.

    Args:
        directory: `logs/<run_id>`.
        config: replaces the one in `config.yaml`.

    Raises:
        ConfigError: the folder is not one of a run, or the run has left nothing to replay.
    """
    directory = directory.resolve()
    try:
        genesis = read_genesis(directory)
        config = config or _config_of(directory)
        chain, left = _chain(directory)
        logs = {round: _logs(directory, round) for round in rounds_with_steps(directory)}
        for round, found in chain.items():
            if found.folder != directory and round in rounds_with_steps(found.folder):
                logs[round] = _logs(found.folder, round)
        generations = _generations(directory, {found.record.run_id for found in chain.values()})
    except FileNotFoundError as error:
        raise ConfigError(
            f"{directory} is no folder of a run: {error.filename} is missing; give logs/<run_id>, as it is printed "
            "when a run begins"
        ) from error
    except (RecordRejected, OSError) as error:
        raise ConfigError(f"{directory} cannot be read: {error}") from error
    if left and not chain:
        raise ConfigError(
            f"{directory} has only records of a chain that was left, in `left`: copy `rounds`, `steps` and `replicas` "
            "here from the folder that the client of the other host has of this run"
        )
    if not chain:
        raise ConfigError(f"{directory}: no round of this run was ever recorded, so there is nothing to replay")
    records = tuple((chain[round].record, chain[round].signed) for round in sorted(chain))
    first = records[0][0]
    if (
        first.recorded
        and not (directory / "rounds" / "round_0001.json").exists()
        and not (directory / "steps" / "round_0001.jsonl").exists()
    ):
        raise ConfigError(
            f"{directory} begins with round {first.round}: the client of another host has recorded the rounds before. "
            "Copy what is missing here of the rounds up to this one in `rounds` and `steps`, and in `replicas`, "
            f"from the folder of run {first.run_id} there"
        )
    if shared_configuration(config) != genesis.configuration:
        raise ConfigError(
            f"{directory / 'config.yaml'} is not the configuration that the run began with, which "
            f"rounds/round_0000.json has ({_first_difference(shared_configuration(config), genesis.configuration)}): "
            "restore it from a copy"
        )
    uncommitted = frozenset(
        int(path.name.partition(".")[0].removeprefix("round_"))
        for path in (directory / "steps").glob("round_*.prepared")
    )
    return RunFiles(directory, first.run_id, config, genesis, records, logs, uncommitted, generations, left)


def _chain(directory: Path) -> tuple[dict[int, _Found], frozenset[str]]:
    """The records that lead to the last one, by round, and the hashes of all others.

    A client that has gone on from another chain than its own has put its own records away, those before the two parted
    among them.

    Raises:
        RecordRejected: A file is no record.
        OSError: A file cannot be read.
    """
    found: dict[str, _Found] = {}
    for folder in (directory, *left_folders(directory)):
        for record, signed in read_records(folder):
            found.setdefault(record_hash(signed), _Found(record, signed, folder))
    # Where one is missing or does not fit, what is left of the earlier ones says more than nothing.
    chain = {each.record.round: each for each in found.values() if each.folder == directory}
    if chain:
        earlier = found.get(chain[max(chain)].record.previous)
        while earlier is not None:
            chain[earlier.record.round] = earlier
            earlier = found.get(earlier.record.previous)
    return chain, frozenset(found) - {record_hash(each.signed) for each in chain.values()}


def _config_of(directory: Path) -> Config:
    # Neither the environment nor a flag of today has a say in what was trained then.
    return load_config(directory / "config.yaml", env={})


def _logs(directory: Path, round: int) -> Logs:
    entries: defaultdict[tuple[PeerId, int], list[StepEntry]] = defaultdict(list)
    for line in read_steps(directory, round):
        entries[line.peer, line.stage].append(line.entry)
    return {peer: (stage, tuple(log)) for (peer, stage), log in entries.items()}


def _generations(directory: Path, run_ids: set[str]) -> tuple[Generation, ...]:
    """The replicas of this run whose logs are there."""
    folders = [directory, *sorted(directory.parent.glob(f"{directory.name}.servers*"))]
    files: dict[Path, tuple[Started, list[Line]]] = {}
    for path in (path for folder in folders for path in replica_logs(folder)):
        lines: list[Line] = read_replica_log(path)
        if lines and isinstance(started := lines[0], Started) and started.run_id in run_ids:
            files[path] = started, lines[1:]
    generations: list[Generation] = []
    known: defaultdict[tuple[PeerId, int], list[Generation]] = defaultdict(list)
    while files:
        # Those that go on from each other do not fit together, which is said of the first one.
        for path in _ready(files) or list(files)[:1]:
            started, lines = files.pop(path)
            of_file = generations_of(len(generations), started.peer, started.stage, started.place, lines, known)
            known[started.peer, generation_number(path)] += of_file
            generations += of_file
    return tuple(generations)


def _ready(files: Mapping[Path, tuple[Started, list[Line]]]) -> list[Path]:
    """The files before which no other one has to be read: an earlier one of the peer, or one that it goes on from."""
    places = {path: (started.peer, generation_number(path)) for path, (started, _) in files.items()}
    left = set(places.values())
    ready: list[Path] = []
    for path, (peer, number) in places.items():
        earlier = {(peer, before) for before in range(1, number)} | origins_of(files[path][1], peer)
        if not earlier & (left - {(peer, number)}):
            ready.append(path)
    return ready


def _first_difference(mine: object, theirs: object, name: str = "") -> str:
    """Where two configurations differ, and how."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        here, then = cast("dict[str, object]", mine), cast("dict[str, object]", theirs)
        for key in sorted({*here, *then}):
            if here.get(key) != then.get(key):
                return _first_difference(here.get(key), then.get(key), f"{name}.{key}".strip("."))
    return f"{name}: {mine!r} instead of {theirs!r}"
