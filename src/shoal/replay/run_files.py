"""What a run has left on disk, read and put in order: configuration, records, step logs, the logs of its replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from shoal.averaging.journal import Genesis, left_folders, read_genesis, read_records, read_steps, rounds_with_steps
from shoal.averaging.signing import unsealer
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.config.shared import shared_configuration
from shoal.errors import ConfigError, RecordRejected, ShoalError
from shoal.ids import PeerId
from shoal.pipeline.replica_log import Line, Resumed, Started, generation_number, read_replica_log, replica_logs
from shoal.replay.generations import Generation, Inherited, generations_of, origins_of
from shoal.swarm.cut_rule import CutRule
from shoal.swarm.records import Logs, Tip, record_hash
from shoal.wire.messages.round import Record, SignedRecord
from shoal.wire.messages.step import StepEntry


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run.

    Attributes:
        genesis: D_0.
        records: D_1, D_2, ... as far as there are files; of a fork from its rebase record on.
        logs: by round.
        uncommitted: rounds of which only a record that may be committed was written.
        left: hashes of the records that are there but belong to another chain.
        beginning: the checkpoint that a fork began with; None: the run is no fork, and began with D_0.
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
    beginning: StoredCheckpoint | None = None

    @property
    def base(self) -> Tip:
        """The record that is not computed: D_0, or of a fork its first one."""
        if self.beginning is None:
            return Tip(0, self.genesis.hash(self.run_id), None)
        signed = self.beginning.signed
        return Tip(self.beginning.manifest.round, record_hash(signed), signed)


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
        # Neither the environment nor a flag of today has a say in what was trained then.
        config = config or load_config(directory / "config.yaml", env={})
        chain, left = _chain(directory)
        logs = {round: _logs(directory, round) for round in rounds_with_steps(directory)}
        for round, found in chain.items():
            if found.folder != directory and round in rounds_with_steps(found.folder):
                logs[round] = _logs(found.folder, round)
        records_found = [found.record for found in chain.values()]
        generations = _generations(directory, records_found, CutRule.of(config.diloco))
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
        and first.origin is None
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
    beginning = None if first.origin is None else _beginning(directory, config, first, records[0][1], genesis.authority)
    return RunFiles(directory, first.run_id, config, genesis, records, logs, uncommitted, generations, left, beginning)


def _beginning(
    directory: Path, config: Config, first: Record, signed: SignedRecord, authority: PeerId
) -> StoredCheckpoint:
    """Return the checkpoint that a fork began with, where the fork has written it, or beside its folder."""
    locations = dict.fromkeys((config.checkpoint_location, str(directory.parent / "checkpoints")))
    problems: list[str] = []
    for location in locations:
        try:
            found = CheckpointStore(location, first.run_id, unsealer(first.run_id, authority)).open(first.round)
            if found.manifest.record == record_hash(signed):
                return found
            problems.append(f"the one in {location} is of another record")
        except ShoalError as error:
            problems.append(str(error))
    origin = "another run" if first.origin is None else f"run {first.origin.run_id}"
    raise ConfigError(
        f"{directory} is a fork of {origin}: what its first checkpoint holds, of round {first.round}, was not computed "
        f"by it, and without that it cannot be replayed ({'; '.join(problems)}): restore it from a copy"
    )


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


def _logs(directory: Path, round: int) -> Logs:
    entries: defaultdict[tuple[PeerId, int], list[StepEntry]] = defaultdict(list)
    for line in read_steps(directory, round):
        entries[line.peer, line.stage].append(line.entry)
    return {peer: (stage, tuple(log)) for (peer, stage), log in entries.items()}


def _generations(directory: Path, records: Sequence[Record], cuts: CutRule) -> tuple[Generation, ...]:
    """The replicas whose logs are there, of the run with these records."""
    run_ids = {record.run_id for record in records}
    beginners = {record.ballot.peer for record in records if record.origin is not None}
    folders = [directory, *sorted(directory.parent.glob(f"{directory.name}.servers*"))]
    files: dict[Path, tuple[Started, list[Line | Inherited]]] = {}
    for path in (path for folder in folders for path in replica_logs(folder)):
        lines: list[Line] = read_replica_log(path)
        if lines and isinstance(started := lines[0], Started) and started.run_id in run_ids:
            files[path] = started, [_of_fork(line, beginners) for line in lines[1:]]
    generations: list[Generation] = []
    known: defaultdict[tuple[PeerId, int], list[Generation]] = defaultdict(list)
    while files:
        # Those that go on from each other do not fit together, which is said of the first one.
        for path in _ready(files) or list(files)[:1]:
            started, entries = files.pop(path)
            what = started.peer, started.stage, started.place, entries, known, cuts
            of_file = generations_of(len(generations), *what)
            known[started.peer, generation_number(path)] += of_file
            generations += of_file
    return tuple(generations)


def _of_fork(line: Line, beginners: Collection[PeerId]) -> Line | Inherited:
    """A line of a log, where inner states of a fork's first checkpoint are those of who has signed its record: the
    number of his replica is their slot."""
    return Inherited(line.generation) if isinstance(line, Resumed) and line.peer in beginners else line


def _ready(files: Mapping[Path, tuple[Started, Sequence[Line | Inherited]]]) -> list[Path]:
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
