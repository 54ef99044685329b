"""The folder `model/` that a run leaves, written stage by stage, so that one stage is in memory at a time.

    model.safetensors   every parameter and buffer by its name in the uncut model
    config.json         the run's shared configuration, with the cut, and which record these are the parameters of
    record.json         that record, signed; what it says of each stage is what the tensors hash to

With adapters, the tensors are those alone; adapter_config.json and adapter_model.safetensors are the same for peft.

A model that comes from elsewhere (`shoal import`) has no record: its config.json says where it is from and what the
tensors of each stage hash to. `tokenizer/` holds the files of the tokenizer, unless tokens are bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
from torch import Tensor

from shoal.checkpoint.model_layout import StageLayout, hashes_of, require_hashes
from shoal.checkpoint.peft_folder import write_adapter
from shoal.checkpoint.tensor_file import TensorFileWriter
from shoal.checkpoint.whole_folder import WholeFolder, writing_to
from shoal.config.schema import Config
from shoal.config.shared import shared_configuration
from shoal.errors import MALFORMED
from shoal.model.hf.tokenizer import kept_tokenizer
from shoal.model.registry import load_family
from shoal.model.stage import stage_units
from shoal.swarm.records import outcome_of, record_hash, signed_to_json
from shoal.wire.messages.round import Record, SignedRecord, StageHashes

TENSORS, CONFIG, RECORD, TOKENIZER = "model.safetensors", "config.json", "record.json", "tokenizer"
FORMAT = 1
"""Of the folder; goes up when a reader of the form before would misread it."""


class ModelFolder:
    """One folder that is being written; `commit` or `commit_import` puts it into place, `discard` leaves nothing of it.

    Args:
        path: The folder's place; an existing folder there is replaced as a whole.

    Raises:
        StorageError: The folder cannot be begun.
    """

    def __init__(self, path: Path, layouts: Sequence[StageLayout]) -> None:
        self._path = path
        self._layouts = layouts
        self._hashes: dict[int, StageHashes] = {}
        entries = [entry for each in layouts for entry in each.entries]
        with writing_to(path):
            self._folder = WholeFolder(path)
            try:
                self._tensors = TensorFileWriter(self._folder.create(TENSORS), entries)
            except OSError:
                self._folder.discard()
                raise

    def write_stage(self, stage: int, vectors: Sequence[Tensor], record: Record | None) -> None:
        """Write the tensors of a stage, in its flat form: parameters, floating buffers, integer buffers.

        Args:
            record: None: of an import, which has none.

        Raises:
            StateMismatch: They are not what the record names.
            StorageError: They cannot be written.
        """
        outcome = None if record is None else outcome_of(record, stage)
        if outcome is not None:
            require_hashes(stage, vectors, outcome.hashes)
        elif record is None:
            self._hashes[stage] = hashes_of(vectors)
        with writing_to(self._path):
            for layout, vector in zip(self._layouts[stage], vectors, strict=True):
                for entry, values in zip(layout.entries, layout.views(vector), strict=True):
                    self._tensors.write(entry.name, values)

    def write_tokenizer(self, name: str, content: bytes) -> None:
        """Write a file of the tokenizer.

        Raises:
            StorageError: It cannot be written.
        """
        with writing_to(self._path):
            self._folder.write(f"{TOKENIZER}/{name}", content)

    def commit(self, config: Config, run_id: str, record: Record, signed: SignedRecord) -> None:
        """Force everything to the disk and put the folder into place.

        Raises:
            StorageError: It cannot be written, or something is missing.
        """
        described = {"run_id": run_id, "round": record.round, "record": record_hash(signed)}
        kept = kept_tokenizer(config.data.tokenizer_hash)
        if kept is not None:
            for name, content in kept.files.items():
                self.write_tokenizer(name, content)
        self._commit(config, described, signed)

    def commit_import(self, config: Config, origin: str, *, is_bytes: bool = True, context: int | None = None) -> None:
        """As `commit`, of a model that no run has left.

        Args:
            is_bytes: As in `ModelSource`, and `context` too.

        Raises:
            StorageError: As `commit`.
        """
        hashes = [msgspec.to_builtins(hashes) for _, hashes in sorted(self._hashes.items())]
        more = {"is_bytes": is_bytes, "context": context}
        self._commit(config, {"imported_from": origin, "hashes": hashes, **more}, None)

    def _commit(self, config: Config, described: dict[str, Any], signed: SignedRecord | None) -> None:
        with writing_to(self._path):
            self._tensors.finish()
            if config.lora is not None:
                write_adapter(self._folder, self._folder.aside / TENSORS, config)
            described = {"format": FORMAT, **described, "configuration": configuration_with_cut(config)}
            self._folder.write_json(CONFIG, described)
            if signed is not None:
                self._folder.write_json(RECORD, signed_to_json(signed))
            self._folder.put_into_place()

    def discard(self) -> None:
        """Leave nothing behind; nothing happens after `commit`."""
        self._tensors.close()
        self._folder.discard()


def has_model_of(path: Path, record_hash: str) -> bool:
    """Whether the folder at a path is there, and of this record: it is in place as a whole or not at all."""
    try:
        return json.loads((path / CONFIG).read_bytes()).get("record") == record_hash
    except (OSError, *MALFORMED):
        return False


def configuration_with_cut(config: Config) -> dict[str, Any]:
    """The run's shared configuration; with the cut in it, also where it follows from the family's figures."""
    shared = shared_configuration(config)
    family = load_family(config.model, config.data)
    stages = stage_units(family, config.num_stages, config.model_pipeline.cut)
    cast("dict[str, Any]", shared["model_pipeline"])["cut"] = [len(units.indices) for units in stages]
    return shared
