"""The checkpoints of a run: one is written beside those that are there, and only then are older ones removed.

    room? -> stage 0: hashes of the record? -> its files, each on the disk and read back -> stage 1 ...
          -> record, D_0, client -> manifest -> put into place -> what the policy does not keep is removed

A crash anywhere leaves the checkpoints that were good before: what is unfinished has no name, or no manifest.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from shoal.checkpoint.manifest import (
    CLIENT,
    GENESIS,
    MANIFEST,
    RECORD,
    Manifest,
    NamedTensors,
    StageContent,
    inner_file,
    stage_file,
    stored_layouts,
)
from shoal.checkpoint.model_layout import StageLayout, require_hashes
from shoal.checkpoint.places import CheckpointPlace, Draft, folder_of, inside, place_of, round_of
from shoal.checkpoint.stored import StageVectors, StoredCheckpoint, Unseal, kept_record
from shoal.checkpoint.tensor_file import TensorFile, TensorFileWriter
from shoal.checkpoint.whole_folder import writing_to
from shoal.codec.raw import to_wire
from shoal.errors import ConfigError, RecordRejected, StateMismatch, StorageError, os_error_as
from shoal.identity import verify
from shoal.ids import PeerId
from shoal.optim.flat import FlatEntry
from shoal.runtime.durable_files import FileDigest
from shoal.swarm.records import outcome_of, record_hash, unseal
from shoal.wire.messages.round import Record, SignedRecord

_SPARE_BYTES = 1 << 20
"""Beyond the tensors: record, D_0, client, manifest, and what a disk needs to name them."""


@dataclass(frozen=True)
class KeepPolicy:
    """Which checkpoints stay. While one is written there is one more.

    Attributes:
        keep_last: The newest ones; at least 1.
        keep_every_rounds: Those of rounds that are multiples of this stay besides; 0: none do.
        max_bytes: Of all together: then the oldest goes, of whatever round; 0: as many as they are. The newest stays.
    """

    keep_last: int = 2
    keep_every_rounds: int = 0
    max_bytes: int = 0

    def surplus(
        self, sizes: Mapping[int, int], newest: int, beginning: int | None = None, damaged: Container[int] = ()
    ) -> list[int]:
        """The rounds whose checkpoints go, the oldest first.

        Args:
            sizes: Bytes of each, by round.
            newest: The one that was written last. The run has not gone on from those of later rounds: they go.
            beginning: The one that a fork began with, without which nobody can compute it again: it stays as long as
                `max_bytes` lets it.
            damaged: Those that nobody can go on from: none of them takes the place of a good one. They stay, for who
                wants to know what has happened to them, until there are as many newer good ones as are kept.
        """
        older = sorted((round for round in sizes if round < newest and round not in damaged), reverse=True)
        last = older[: max(0, self.keep_last - 1)]
        kept = [round for round in older if round in last or round == beginning or self._is_kept_for_long(round)]
        has_enough = len(last) >= self.keep_last - 1
        since = min((newest, *last)) if has_enough else 0
        kept += sorted((round for round in sizes if since < round < newest and round in damaged), reverse=True)
        total = sizes[newest] + sum(sizes[round] for round in kept)
        while self.max_bytes and kept and total > self.max_bytes:
            total -= sizes[kept.pop()]
        return sorted(sizes.keys() - {newest, *kept})

    def _is_kept_for_long(self, round: int) -> bool:
        return bool(self.keep_every_rounds) and round % self.keep_every_rounds == 0


@dataclass(frozen=True)
class Checkpoint:
    """What is to be kept of a run beside its tensors.

    Attributes:
        signed: The record whose state this is.
        genesis: D_0, as the run's `rounds/round_0000.json` has it.
        cut: The number of units of each stage.
        members: By stage, the replicas of which the record was made.
        client: What the client knows beyond the records, as JSON.
    """

    signed: SignedRecord
    genesis: bytes
    layouts: Sequence[StageLayout]
    cut: Sequence[int]
    members: Sequence[Sequence[PeerId]]
    unix_s: float
    client: bytes


class StagePart(NamedTuple):
    """The tensors of one stage.

    Attributes:
        vectors: Parameters, momentum, floating buffers, integer buffers; `averaging.replica_state.OuterState` is such.
        inner: What the inner optimizer of the replica at home in a slot knew, as the bytes of a safetensors file; taken
            one by one.
    """

    stage: int
    vectors: Sequence[Tensor]
    inner: Iterable[tuple[int, Tensor]] = ()


class Written(NamedTuple):
    """What a write has come to.

    Attributes:
        size_bytes: Of its files, but the manifest.
        removed: The rounds whose checkpoints are gone.
        problem: Why others that should be gone are not; empty: none.
    """

    location: str
    size_bytes: int
    removed: tuple[int, ...]
    problem: str


class Damaged(NamedTuple):
    """A checkpoint that is no good, and everything that is wrong with it."""

    round: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"round {self.round}: {'; '.join(self.problems)}"


class NewestGood(NamedTuple):
    """What there is to go on from.

    Attributes:
        checkpoint: None: no good one.
        passed_over: The newer ones, from the newest on.
    """

    checkpoint: StoredCheckpoint | None
    passed_over: tuple[Damaged, ...]


class Listed(NamedTuple):
    """One checkpoint, for a person.

    Attributes:
        unix_s: When it was written; None: nobody can say.
        problems: Empty: it is good.
    """

    run_id: str
    round: int
    unix_s: float | None
    size_bytes: int
    problems: tuple[str, ...]


@dataclass
class CheckpointStore:
    """The checkpoints of one run at one place, which one process at a time writes to.

    Args:
        location: `checkpoint_dir`: a folder, or `s3://bucket/prefix`. The run has a folder in it.
        unsealer: Checks records, with the authority that D_0 names; None: whoever signed them is believed.
        reached: Told each point of a write, with its round, at which `shoal_lab.emulation` lets a mirror die.

    Raises:
        ConfigError: The location, or the run, cannot be used as a name.
    """

    location: str
    run_id: str
    unsealer: Unseal | None = None
    policy: KeepPolicy = field(default_factory=KeepPolicy)
    reached: Callable[[str, int], None] = lambda _point, _round: None
    _known_good: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self._place: CheckpointPlace = place_of(inside(self.location, self.run_id))

    def write(self, checkpoint: Checkpoint, parts: Iterable[StagePart]) -> Written:
        """Write a checkpoint, and remove what the policy does not keep.

        Blocks until the place has everything. A checkpoint of the same round is replaced.

        Args:
            parts: Every stage once, in any order; taken one by one, so that one stage at a time need be in memory.

        Raises:
            RecordRejected: The record is none of the run.
            StateMismatch: Tensors are not those that the record names, stages are missing, or an inner state is none;
                nothing has changed.
            StorageError: There is no room, somebody else writes here (`PlaceTaken`), or it cannot be written; the older
                ones are as they were.
        """
        kept = msgspec.msgpack.encode(checkpoint.signed)
        _, record = kept_record(kept, self.unsealer or partial(unseal, run_id=self.run_id, verify=verify))
        folder = folder_of(record.round)
        stages = dict(enumerate(checkpoint.layouts))
        if not len(stages) == len(checkpoint.cut) == len(checkpoint.members) == len(record.stages):
            raise StateMismatch(f"record {record.round} is of {len(record.stages)} stages, the checkpoint of others")
        with writing_to(self._place.location), self._place.alone():
            self._place.remove_leftovers()
            self._require_room(sum(map(_num_bytes, stages.values())))
            draft = self._place.draft(folder)
            try:
                files: dict[str, FileDigest] = {}
                for part in parts:
                    if (layout := stages.pop(part.stage, None)) is None:
                        raise StateMismatch(f"stage {part.stage} was given twice, or is none of the model's")
                    files |= self._write_stage(draft, part, layout, record)
                if stages:
                    raise StateMismatch(f"of stages {', '.join(map(str, stages))} nothing was given to be kept")
                files[RECORD] = draft.write(RECORD, kept)
                files[GENESIS] = draft.write(GENESIS, checkpoint.genesis)
                files[CLIENT] = draft.write(CLIENT, checkpoint.client)
                manifest = self._manifest(checkpoint, record, files)
                self.reached("manifest", record.round)
                draft.write(MANIFEST, manifest.encoded())
                self.reached("rename", record.round)
                draft.put_into_place()
                self.reached("renamed", record.round)
            finally:
                draft.discard()
            self._known_good.add(record.round)
            removed, problem = self._prune(record.round)
        return Written(f"{self._place.location}/{folder}", manifest.size_bytes, removed, problem)

    def newest_good(self) -> NewestGood:
        """Find what there is to go on from; reads all of each checkpoint until one is good.

        Raises:
            StorageError: The store cannot be reached, so nobody knows.
        """
        passed_over: list[Damaged] = []
        for round in reversed(self.rounds()):
            checkpoint, problems = self._examined(round)
            if checkpoint is not None and not problems:
                return NewestGood(checkpoint, tuple(passed_over))
            passed_over.append(Damaged(round, tuple(problems)))
        return NewestGood(None, tuple(passed_over))

    def open(self, round: int) -> StoredCheckpoint:
        """Open the checkpoint of a round.

        Raises:
            StateMismatch: It is damaged, or there is none; all that is wrong is named.
            StorageError: The store cannot be reached.
        """
        checkpoint, problems = self._examined(round)
        if checkpoint is None or problems:
            raise StateMismatch(f"the checkpoint in {self._place.location} of {Damaged(round, tuple(problems))}")
        return checkpoint

    def unread(self, round: int) -> StoredCheckpoint:
        """Open the checkpoint of a round without reading more than its manifest: each part is compared when it is read.

        Raises:
            StateMismatch: It does not say what it is, or is of another run.
            StorageError: It cannot be read.
        """
        with _reading(self._place.location):
            checkpoint = StoredCheckpoint(self._place, folder_of(round), self.unsealer)
        if checkpoint.manifest.run_id != self.run_id:
            raise StateMismatch(f"{MANIFEST} is of run {checkpoint.manifest.run_id}")
        return checkpoint

    def newest_unix_s(self) -> float:
        """When a checkpoint of the run was last written, as the manifest says, or where that is damaged the place; 0:
        there is none.

        Raises:
            StorageError: The store cannot be reached.
        """
        newest = 0.0
        for round in self.rounds():
            try:
                written_unix_s = self.unread(round).manifest.unix_s
            except (StateMismatch, StorageError):
                # The newest run is that also if its checkpoints are damaged: an older one must not pass for it.
                written_unix_s = self._modified_unix_s(round)
            newest = max(newest, written_unix_s)
        return newest

    def listed(self) -> list[Listed]:
        """Read every checkpoint and say how it is, in the order of rounds.

        Raises:
            StorageError: The store cannot be reached.
        """
        found: list[Listed] = []
        for round in self.rounds():
            checkpoint, problems = self._examined(round)
            unix_s = None if checkpoint is None else checkpoint.manifest.unix_s
            size_bytes = sum((self._files(round) or {}).values())
            found.append(Listed(self.run_id, round, unix_s, size_bytes, tuple(problems)))
        return found

    def rounds(self) -> list[int]:
        """The rounds of which there is something, in order.

        Raises:
            StorageError: It cannot be read.
        """
        with _reading(self._place.location):
            rounds = map(round_of, self._place.folders())
        return sorted(round for round in rounds if round is not None)

    # -- parts

    def _write_stage(self, draft: Draft, part: StagePart, layout: StageLayout, record: Record) -> dict[str, FileDigest]:
        outcome = outcome_of(record, part.stage)
        if outcome is None:
            raise StateMismatch(f"record {record.round} does not speak of stage {part.stage}")
        vectors = StageVectors(*part.vectors)
        values = (vectors.parameters_N, vectors.floats_F, vectors.integers_I)
        require_hashes(part.stage, values, outcome.hashes, momentum=vectors.momentum_N)
        layouts = stored_layouts(layout)
        entries = [entry for each in layouts for entry in each.entries]
        views = [view for each, vector in zip(layouts, vectors, strict=True) for view in each.views(vector)]
        name = stage_file(part.stage)
        tensors = {entry.name: view for entry, view in zip(entries, views, strict=True)}

        def reached(point: str) -> None:
            self.reached(point, record.round)

        files = {name: self._write_tensors(draft, name, entries, tensors, reached)}
        for slot, content in part.inner:
            name, written = inner_file(part.stage, slot), to_wire(content).data
            TensorFile(Path(name), bytes(written))  # whoever gave it may have given anything
            self._require_room(written.nbytes)
            files[name] = draft.write(name, written)
        return files

    def _write_tensors(
        self,
        draft: Draft,
        name: str,
        entries: Iterable[FlatEntry],
        tensors: Mapping[str, Tensor],
        reached: Callable[[str], None],
    ) -> FileDigest:
        self._require_room(sum(tensor.nbytes for tensor in tensors.values()))
        with TensorFileWriter(draft.create(name), entries) as file:
            return file.write_all(tensors, reached)

    def _manifest(self, checkpoint: Checkpoint, record: Record, files: Mapping[str, FileDigest]) -> Manifest:
        stages = [
            StageContent(*_named(layout), num_units, tuple(members))
            for layout, num_units, members in zip(checkpoint.layouts, checkpoint.cut, checkpoint.members, strict=True)
        ]
        digest = record_hash(checkpoint.signed)
        return Manifest.of(self.run_id, record.round, digest, checkpoint.unix_s, stages, files)

    def _require_room(self, size_bytes: int) -> None:
        """Raise StorageError if so much more cannot be written."""
        most = self.policy.max_bytes
        if most and size_bytes > most:
            raise StorageError(
                f"a checkpoint has {size_bytes:,} bytes, at most {most:,} are allowed in {self._place.location}: "
                "allow more"
            )
        free = self._place.free_bytes()
        if free is not None and free < size_bytes + _SPARE_BYTES:
            raise StorageError(
                f"a checkpoint needs {size_bytes:,} bytes more in {self._place.location}, where {free:,} are free: "
                "free space there, or keep fewer"
            ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _prune(self, newest: int) -> tuple[tuple[int, ...], str]:
        """Return the rounds that are gone, and why others are not."""
        removed: list[int] = []
        try:
            found = {round: self._files(round) for round in self.rounds()}
            sizes = {round: sum((files or {}).values()) for round, files in found.items()}
            # Without a manifest it is what a crash has left of an upload.
            unfinished = {round for round, files in found.items() if files is not None and MANIFEST not in files}
            damaged = self._damaged_before(newest, sizes) | unfinished
            beginning = min(sizes) if self._begins_a_fork(min(sizes)) else None
            for round in self.policy.surplus(sizes, newest, beginning, damaged):
                self._place.remove(folder_of(round), partial(self.reached, "removal", newest))
                removed.append(round)
        except (OSError, StorageError) as error:
            return tuple(removed), f"older checkpoints in {self._place.location} cannot be removed: {error}"
        return tuple(removed), ""

    def _damaged_before(self, newest: int, rounds: Iterable[int]) -> set[int]:
        """Look as far back as there are good ones to be kept; each is read once, those written here when they were."""
        damaged: set[int] = set()
        num_good = 1
        for round in sorted((round for round in rounds if round < newest), reverse=True):
            if num_good >= self.policy.keep_last:
                break
            if round not in self._known_good:
                self.reached("look", newest)
                _, problems = self._examined(round)
                (damaged if problems else self._known_good).add(round)
            num_good += round in self._known_good
        return damaged

    def _modified_unix_s(self, round: int) -> float:
        with suppress(OSError, StorageError):
            return self._place.modified_unix_s(folder_of(round))
        return 0.0

    def _files(self, round: int) -> Mapping[str, int] | None:
        """The files of a checkpoint, with their sizes in bytes; None: they cannot be seen."""
        try:
            return self._place.sizes(folder_of(round))
        except OSError:
            return None

    def _begins_a_fork(self, round: int) -> bool:
        try:
            return self.unread(round).record.origin is not None
        except (RecordRejected, StateMismatch, StorageError, OSError):
            return False

    def _examined(self, round: int) -> tuple[StoredCheckpoint | None, list[str]]:
        try:
            checkpoint = StoredCheckpoint(self._place, folder_of(round), self.unsealer)
        except StateMismatch as error:
            return None, [str(error)]
        except OSError as error:
            return None, [f"it cannot be read ({error.strerror or error})"]
        if checkpoint.manifest.run_id != self.run_id:
            return None, [f"{MANIFEST} is of run {checkpoint.manifest.run_id}"]
        return checkpoint, checkpoint.problems()


def stores_at(location: str) -> list[CheckpointStore]:
    """The runs that have checkpoints at a place: a run's own folder, or one with the folders of runs.

    Raises:
        ConfigError: It is no such location.
        StorageError: It cannot be read.
    """
    if "://" not in location:
        location = os.path.abspath(location)
        if not os.path.isdir(location):
            raise ConfigError(f"{location} is no folder: give one with checkpoints, or s3://bucket/prefix")
    with _reading(location):
        folders = place_of(location).folders()
    if any(round_of(folder) is not None for folder in folders):
        parent, _, run_id = location.rstrip("/").rpartition("/")
        return [CheckpointStore(parent, run_id)]
    stores = [CheckpointStore(location, folder) for folder in folders]
    return [store for store in stores if store.rounds()]


def _named(layout: StageLayout) -> tuple[NamedTensors, NamedTensors, NamedTensors]:
    return NamedTensors.of(layout.parameters), NamedTensors.of(layout.floats), NamedTensors.of(layout.integers)


def _reading(location: str) -> AbstractContextManager[None]:
    return os_error_as(lambda error: StorageError(f"cannot read {location}: {error.strerror or error}"))


def _num_bytes(layout: StageLayout) -> int:
    return sum(each.numel * each.dtype.itemsize for each in stored_layouts(layout))
