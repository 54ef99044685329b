"""The folder `model/` that a run leaves, written stage by stage, so that one stage is in memory at a time.

    model.safetensors   every parameter and buffer by its name in the uncut model
    config.json         the run's shared configuration, with the cut, and which record these are the parameters of
    record.json         that record, signed; what it says of each stage is what the tensors hash to

It is written aside and put into place as a whole. The file of the tensors is laid out before the first of them is
there: a safetensors file is a header that names each tensor's place, and their bytes.
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from shoal.checkpoint.model_layout import StageLayout, require_hashes
from shoal.codec.raw import to_wire
from shoal.config.schema import Config
from shoal.config.shared import shared_configuration
from shoal.errors import StorageError
from shoal.model.registry import load_family
from shoal.model.stage import stage_ranges
from shoal.optim.flat import FlatEntry
from shoal.runtime.durable_files import require_size, sync_directory
from shoal.swarm.records import outcome_of, record_hash, signed_to_json
from shoal.wire.messages.round import Record, SignedRecord

TENSORS, CONFIG, RECORD = "model.safetensors", "config.json", "record.json"
FORMAT = 1
"""Of the folder; goes up when a reader of the form before would misread it."""
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ALIGNMENT = 8


class ModelFolder:
    """One folder that is being written; `commit` puts it into place, `discard` leaves nothing of it.

    Args:
        path: The folder's place; an existing folder there is replaced as a whole.
        layouts: The tensors of each stage.

    Raises:
        StorageError: The folder cannot be begun.
    """

    def __init__(self, path: Path, layouts: Sequence[StageLayout]) -> None:
        self._path = path
        self._layouts = layouts
        self._places, header, self._size_bytes = _laid_out([entry for each in layouts for entry in each.entries])
        self._written: set[int] = set()
        self._aside = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
        self._file: BinaryIO | None = None
        try:
            _remove_leftovers(path)
            self._aside.mkdir(parents=True)
            self._file = (self._aside / TENSORS).open("wb")
            self._file.write(header)
        except OSError as error:
            self.discard()
            raise _cannot_write(path, error) from error

    def write_stage(self, stage: int, vectors: Sequence[Tensor], record: Record) -> None:
        """Write the tensors of a stage, in its flat form: parameters, floating buffers, integer buffers.

        Raises:
            StateMismatch: They are not what the record names.
            StorageError: They cannot be written.
        """
        outcome = outcome_of(record, stage)
        if outcome is not None:
            require_hashes(stage, vectors, outcome.hashes)
        try:
            for layout, vector in zip(self._layouts[stage], vectors, strict=True):
                for entry, values in zip(layout.entries, layout.views(vector), strict=True):
                    self._write(entry, values)
        except OSError as error:
            raise _cannot_write(self._path, error) from error
        self._written.add(stage)

    def _write(self, entry: FlatEntry, values: Tensor) -> None:
        content = to_wire(values.to(entry.dtype)).data
        file = self._opened
        file.seek(self._places[entry.name])
        if file.write(content) != content.nbytes:
            raise OSError(f"{entry.name} could not be written in full; is the disk full?")

    def commit(self, config: Config, run_id: str, record: Record, signed: SignedRecord) -> None:
        """Force everything to the disk and put the folder into place.

        Raises:
            StorageError: It cannot be written, or something is missing.
        """
        try:
            missing = set(range(len(self._layouts))) - self._written
            if missing:
                raise OSError(f"stages {sorted(missing)} were not written")
            file = self._opened
            file.flush()
            os.fsync(file.fileno())
            file.close()
            require_size(self._aside / TENSORS, self._size_bytes)
            described = {
                "format": FORMAT,
                "run_id": run_id,
                "round": record.round,
                "record": record_hash(signed),
                "configuration": _with_cut(config),
            }
            _write_json(self._aside / CONFIG, described)
            _write_json(self._aside / RECORD, signed_to_json(signed))
            sync_directory(self._aside)
            self._put_into_place()
        except OSError as error:
            raise _cannot_write(self._path, error) from error

    def discard(self) -> None:
        """Leave nothing behind; nothing happens after `commit`."""
        if self._file is not None:
            self._file.close()
        shutil.rmtree(self._aside, ignore_errors=True)

    @property
    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise OSError("the file of the tensors is not open")
        return self._file

    def _put_into_place(self) -> None:
        """Between the two renames there is none for a moment, but never one of two runs, or half of one."""
        old = self._aside.with_suffix(".old")
        if self._path.exists():
            self._path.rename(old)
        self._aside.rename(self._path)
        sync_directory(self._path.parent)
        shutil.rmtree(old, ignore_errors=True)


def has_model_of(path: Path, record_hash: str) -> bool:
    """Whether the folder at a path is there, and of this record: it is in place as a whole or not at all."""
    try:
        return json.loads((path / CONFIG).read_bytes()).get("record") == record_hash
    except (OSError, ValueError):
        return False


def _laid_out(entries: Sequence[FlatEntry]) -> tuple[dict[str, int], bytes, int]:
    """Where each tensor lies in the file, the file's beginning, and its size: wide types first, so all are aligned."""
    offset = 0
    offsets: dict[str, int] = {}
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for entry in sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)):
        end = offset + entry.numel * entry.dtype.itemsize
        offsets[entry.name] = offset
        described[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = struct.pack("<Q", len(text)) + text
    return {name: len(header) + start for name, start in offsets.items()}, header, len(header) + offset


def _with_cut(config: Config) -> dict[str, Any]:
    """The run's shared configuration; with the cut in it, also where it follows from the family's figures."""
    shared = shared_configuration(config)
    family = load_family(config.model, config.data)
    ranges = stage_ranges(family, config.num_stages, config.model_pipeline.cut)
    cast("dict[str, Any]", shared["model_pipeline"])["cut"] = [len(units) for units in ranges]
    return shared


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    encoded = json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"
    with path.open("wb") as file:
        file.write(encoded)
        file.flush()
        os.fsync(file.fileno())
    require_size(path, len(encoded))


def _remove_leftovers(path: Path) -> None:
    """Remove what writers that were killed have left."""
    for kind in ("unfinished", "old"):
        for left in path.parent.glob(f".{path.name}.*.{kind}"):
            shutil.rmtree(left, ignore_errors=True)


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot write {path} ({error.strerror or error}): free space there")
