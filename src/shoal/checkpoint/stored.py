"""One checkpoint that is read: nothing of it is used before it has been compared with what was written.

manifest -> sizes -> bytes of a file == its SHA-256 -> parsed (never mapped, never read again)
                      '-> a stage: its vectors == the hashes in the record <- signature, ballot, eras
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch import Tensor

from shoal.checkpoint.manifest import (
    CLIENT,
    GENESIS,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    RECORD,
    Manifest,
    inner_file,
    stage_file,
    stored_layouts,
)
from shoal.checkpoint.model_layout import StageLayout, require_hashes
from shoal.checkpoint.places import CheckpointPlace, round_of
from shoal.checkpoint.tensor_file import TensorFile
from shoal.errors import MALFORMED, IdentityError, ProtocolError, RecordRejected, StateMismatch, StorageError
from shoal.identity import verify
from shoal.runtime.memory import shortage
from shoal.swarm.records import outcome_of, record_hash, unseal
from shoal.wire.messages.round import Record, SignedRecord

Unseal = Callable[[SignedRecord], Record]
"""Checks a record of the run and decodes it, as `averaging.signing.unsealer` does; raises ProtocolError or
IdentityError."""


class StageVectors(NamedTuple):
    """The state of a stage that a record names: N elements of the parameters, F and I of the buffers."""

    parameters_N: Tensor
    momentum_N: Tensor
    floats_F: Tensor
    integers_I: Tensor


class StoredCheckpoint:
    """A checkpoint that is there, as a whole or not.

    Args:
        unsealer: Checks its record; None: it has to be of the run that the manifest names, whoever has signed it.

    Raises:
        StateMismatch: It has no manifest that says what it is.
        OSError: The manifest cannot be read.
        StorageError: The store cannot be reached.
    """

    def __init__(self, place: CheckpointPlace, folder: str, unsealer: Unseal | None = None) -> None:
        self._place, self._folder = place, folder
        self._sizes = place.sizes(folder)
        if MANIFEST not in self._sizes:
            raise StateMismatch(f"{MANIFEST} is not there: it was never finished, or was removed")
        self.manifest = Manifest.decoded(place.read(folder, MANIFEST, min(self._sizes[MANIFEST], MAX_MANIFEST_BYTES)))
        if self.manifest.round != round_of(folder):
            raise StateMismatch(f"{MANIFEST} is of round {self.manifest.round}")
        self._unseal = unsealer or self._signed_by_its_coordinator

    def content(self, name: str) -> bytes:
        """The bytes of a file, as they were written.

        Raises:
            StateMismatch: They are others, or fewer.
            OSError: They cannot be read.
            StorageError: The store cannot be reached, or they do not fit into the memory.
        """
        said, found = self.manifest.files[name], self._sizes.get(name)
        if found is None:
            raise StateMismatch(f"{name} is not there")
        if found != said.size_bytes:
            raise StateMismatch(f"{name} has {found} of {said.size_bytes} bytes")
        if lacks := shortage(said.size_bytes):
            raise StorageError(
                f"this host {lacks} for {name} in {self._place.location}/{self._folder}, whose size {MANIFEST} says: "
                "free memory, or leave the checkpoint out if it is not what it says"
            )
        content = self._place.read(self._folder, name, said.size_bytes)
        if hashlib.sha256(content).hexdigest() != said.sha256:
            raise StateMismatch(f"{name} has changed since it was written")
        return content

    @cached_property
    def signed(self) -> SignedRecord:
        """The record that names the state, as it was signed.

        Raises:
            RecordRejected: It is none of this run, or not the one that the manifest names.
            StateMismatch, OSError, StorageError: As `content`.
        """
        signed, record = kept_record(self.content(RECORD), self._unseal)
        if (record_hash(signed), record.round) != (self.manifest.record, self.manifest.round):
            raise RecordRejected(f"{RECORD} is not the record that {MANIFEST} names")
        if len(record.stages) != len(self.manifest.stages):
            raise RecordRejected(f"{RECORD} is of {len(record.stages)} stages, {MANIFEST} of others")
        return signed

    @property
    def record(self) -> Record:
        """The record. Raises as `signed` does."""
        return self._unseal(self.signed)

    @property
    def genesis(self) -> bytes:
        """D_0, as the run's `rounds/round_0000.json` has it. Raises as `content` does."""
        return self.content(GENESIS)

    @property
    def client(self) -> bytes:
        """What the client knew beyond the records. Raises as `content` does."""
        return self.content(CLIENT)

    def tensors(self, stage: int) -> TensorFile:
        """The file of a stage, whose bytes are those that were written; whether the record names them, `vectors` asks.

        Raises:
            StateMismatch, OSError, StorageError: As `content`.
        """
        return self._tensor_file(stage_file(stage))

    def vectors(self, stage: int, layout: StageLayout | None = None) -> StageVectors:
        """The state of a stage, which hashes to what the signed record names.

        Args:
            layout: Of the stage as the model that is to have it is built; its order of names is that of the hash. None:
                as the manifest says, which shows that no bit is wrong, but whose names nobody has signed.

        Raises:
            StateMismatch: It is something else.
            RecordRejected, OSError, StorageError: As `signed`.
        """
        layouts = stored_layouts(self.manifest.stages[stage].layout if layout is None else layout)
        file = self.tensors(stage)
        if file.shapes != {entry.name: entry.shape for each in layouts for entry in each.entries}:
            raise StateMismatch(f"{stage_file(stage)} has other tensors than the stage")
        found = StageVectors(*(each.flatten([file.read(name) for name in each.names]) for each in layouts))
        outcome = outcome_of(self.record, stage)
        if outcome is None:
            raise StateMismatch(f"{RECORD} does not speak of stage {stage}")
        values = (found.parameters_N, found.floats_F, found.integers_I)
        require_hashes(stage, values, outcome.hashes, momentum=found.momentum_N)
        return found

    def inner(self, stage: int, slot: int) -> dict[str, Tensor] | None:
        """The inner optimizer's state with which the replica at home in a slot goes on, by name: that of the slot, or
        of the first one that was kept of the stage; None: none was.

        No record names it: it is what was written, and that is all.

        Raises:
            StateMismatch, OSError, StorageError: As `content`.
        """
        content = self.inner_content(stage, slot)
        if content is None:
            return None
        file = TensorFile(Path(inner_file(stage, slot)), content)
        return {name: file.read(name) for name in file.shapes}

    def inner_content(self, stage: int, slot: int) -> bytes | None:
        """The same as a safetensors file, whose metadata say which replica's it was. Raises as `inner` does."""
        kept = self.manifest.inner_slots(stage)
        return self.content(inner_file(stage, slot if slot in kept else kept[0])) if kept else None

    def problems(self) -> list[str]:
        """Read everything, one file at a time in memory, and name all that is wrong.

        Raises:
            StorageError: The store cannot be reached, so nobody knows.
        """
        found: list[str] = []
        for name in self.manifest.files:
            try:
                self._check(name)
            except OSError as error:
                found.append(f"{name} cannot be read ({error.strerror or error})")
            except (StateMismatch, RecordRejected) as error:
                found.append(str(error))
        # A record that is damaged is said once, and not again of each stage.
        return list(dict.fromkeys(found))

    def _signed_by_its_coordinator(self, signed: SignedRecord) -> Record:
        return unseal(signed, self.manifest.run_id, verify)

    def _check(self, name: str) -> None:
        stages = {stage_file(stage): stage for stage in range(len(self.manifest.stages))}
        if name in stages:
            self.vectors(stages[name])
        elif name == RECORD:
            _ = self.signed
        elif name in (GENESIS, CLIENT):
            self.content(name)
        else:
            self._tensor_file(name)

    def _tensor_file(self, name: str) -> TensorFile:
        return TensorFile(Path(name), self.content(name))


def kept_record(content: bytes, unsealer: Unseal) -> tuple[SignedRecord, Record]:
    """Read `record.msgpack`.

    Raises:
        RecordRejected: It is no signed record of the run, or does not say itself of which ballot it is.
    """
    try:
        signed = msgspec.msgpack.decode(content, type=SignedRecord)
        record = unsealer(signed)
    except (ProtocolError, IdentityError, *MALFORMED) as error:
        raise RecordRejected(f"{RECORD} is no record of the run: {error}") from error
    rounds = [era.round for era in record.eras]
    is_chain = bool(rounds) and rounds == sorted({*rounds}) and rounds[-1] <= record.round
    if not is_chain or record.eras[-1].ballot != record.ballot:
        raise RecordRejected(f"{RECORD} has eras that do not end with its own ballot")
    return signed, record
