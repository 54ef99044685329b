"""`shoal.load_model`: the folder of a model as the uncut model, a module of torch.

    model = shoal.load_model("logs/sandbox/model")
    logits = model(tokens)

Nothing that is read is executed: a family of somebody's own is imported only if the caller names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from torch import Tensor

from shoal.checkpoint.gpt2_folder import MODEL_TYPE, open_gpt2
from shoal.checkpoint.hf_folder import NAMING, open_hf
from shoal.checkpoint.integer_file import floating
from shoal.checkpoint.manifest import GENESIS, MANIFEST, stored_layouts
from shoal.checkpoint.model_folder import CONFIG, FORMAT, RECORD, TENSORS, TOKENIZER
from shoal.checkpoint.model_source import ModelSource
from shoal.checkpoint.peft_folder import ADAPTER, open_adapter
from shoal.checkpoint.places import LocalPlace
from shoal.checkpoint.stored import StoredCheckpoint
from shoal.checkpoint.tensor_file import TensorFile
from shoal.config.load import describing_model
from shoal.config.named_code import family_problem
from shoal.config.schema import Config
from shoal.config.sources import read_file
from shoal.errors import MALFORMED, ConfigError, RecordRejected, ShoalError, StateMismatch
from shoal.identity import verify
from shoal.model.hf.described import FAMILY
from shoal.model.hf.tokenizer import kept_tokenizer
from shoal.model.stage import StageModule
from shoal.swarm.records import outcome_of, record_hash, signed_from_json, unseal
from shoal.wire.messages.round import Record, StageHashes

YAML = "config.yaml"
"""Beside an exported model: the configuration of its run, as a file for `--config-path`."""


def load_model(path: str | Path, *, family: str | None = None) -> StageModule:
    """Load a model that a run has left, or that was exported or imported, in one piece, on the CPU and in eval mode.

    What a run has left hashes to what the record in the folder says, and that record is signed: nothing has changed
    since. That the signer had the swarm key shows `shoal replay --swarm-key-file` on the run's folder, not this.

    Args:
        path: The folder, `logs/<run>/model`.
        family: Of a model whose family is somebody's own code, `package.module:Class`: what the folder names is
            imported only if it is said here as well.

    Returns:
        The module: `model(inputs)` computes the last unit's output, `model.loss(outputs, labels)` the mean loss.

    Raises:
        ConfigError: This is no such folder, of another version, or its family is not the one that was named.
        RecordRejected: The record in it is none of this run, or its signature does not verify.
        StateMismatch: The tensors are not those of the model, or not those that the record names.
        OSError: A file cannot be read.
    """
    return open_model(Path(path), family=family).whole()


def open_model(path: Path, *, family: str | None = None) -> ModelSource:
    """Open a model to read it stage by stage.

    Args:
        path: A run's folder or the `model` in it, an export of either format, an import, a checkpoint of a run
            (`round_000012`), or a folder of a GPT-2 of transformers.
        family: As in `load_model`.

    Raises:
        ConfigError, RecordRejected, StateMismatch, OSError: As `load_model`.
    """
    if (path / MANIFEST).exists():
        return _open_checkpoint(path, family)
    folder = path / "model" if (path / "model" / CONFIG).is_file() else path
    if not (folder / CONFIG).exists() and (folder / YAML).is_file():
        return _open_export(folder, family)
    described = _json(folder / CONFIG)
    if "format" not in described and "model_type" in described:
        return _open_transformers(folder, described, family)
    return _open_native(folder, described, family)


def _open_transformers(folder: Path, described: Mapping[str, Any], family: str | None) -> ModelSource:
    """Open an export of ours, or a model from elsewhere: a GPT-2 as the family gpt, any other as the family hf."""
    configuration = read_file(folder / YAML) if (folder / YAML).is_file() else None
    model: object = (configuration or {}).get("model")
    is_hf = isinstance(model, dict) and cast("dict[str, Any]", model).get("family") == FAMILY
    if described["model_type"] == MODEL_TYPE and not is_hf:
        return open_gpt2(folder, described, configuration)
    return open_hf(folder, described, configuration, family)


def _open_native(folder: Path, described: Mapping[str, Any], family: str | None) -> ModelSource:
    """Open what a run has left, or an import."""
    if described.get("format") != FORMAT:
        raise ConfigError(
            f"{folder / CONFIG} is of format {described.get('format')}, this version of shoal reads {FORMAT}: use the "
            "version that has written it"
        )
    config = _configuration(described.get("configuration"), family, folder / CONFIG)
    hashes = _hashes(folder, described, config)
    tensors = _tensors(folder / TENSORS)
    tokenizer = _tokenizer(folder, config)
    is_bytes = config.data.has_bytes and described.get("is_bytes") is not False
    context = described.get("context")
    if type(context) is not int or context < 1:
        context = None
    return ModelSource(folder, config, tensors.shapes, tensors.read, hashes, tokenizer, is_bytes, context)


def _tokenizer(folder: Path, config: Config) -> Path | None:
    """Return where the files of its tokenizer are: in the folder, or where this host keeps those of runs."""
    if (folder / TOKENIZER).is_dir():
        return folder / TOKENIZER
    kept = kept_tokenizer(config.data.tokenizer_hash)
    return None if kept is None else kept.folder


def _hashes(folder: Path, described: Mapping[str, Any], config: Config) -> Callable[[int], StageHashes]:
    """What each stage has to hash to: as the record says, or for an import, which has none, the folder itself."""
    if "imported_from" not in described:
        record = _record(folder, described)
        outcomes = [outcome_of(record, stage) for stage in range(config.num_stages)]
        hashes = [outcome.hashes for outcome in outcomes if outcome is not None]
        if len(hashes) != config.num_stages:
            raise RecordRejected(f"record {record.round} does not speak of all {config.num_stages} stages of {folder}")
        return hashes.__getitem__
    try:
        hashes = msgspec.convert(described.get("hashes"), list[StageHashes])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{folder / CONFIG} names no hashes ({error}): import the model again") from None
    if len(hashes) != config.num_stages:
        raise ConfigError(
            f"{folder / CONFIG} has hashes of {len(hashes)} stages of {config.num_stages}: import it again"
        )
    return hashes.__getitem__


def _open_export(folder: Path, family: str | None) -> ModelSource:
    """Open a state dict, one with integers in place of weights, or adapters, with the configuration of the run."""
    config = _configuration(read_file(folder / YAML), family, folder / YAML)
    if (folder / ADAPTER).is_file():
        return open_adapter(folder, config)
    tensors = _tensors(folder / TENSORS)
    tokenizer, is_bytes = _tokenizer(folder, config), config.data.has_bytes
    shapes, read = floating(tensors.shapes, tensors.read)
    return ModelSource(folder, config, shapes, read, tokenizer=tokenizer, is_bytes=is_bytes)


def _open_checkpoint(folder: Path, family: str | None) -> ModelSource:
    """Open a checkpoint of a run for the parameters in it."""
    place = folder.absolute()
    checkpoint = StoredCheckpoint(LocalPlace(place.parent), place.name)
    manifest, path = checkpoint.manifest, folder / GENESIS
    described = cast("Any", _parsed(checkpoint.genesis, path).get("configuration"))
    try:
        described["model_pipeline"]["cut"] = list(manifest.cut)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{path} describes no model: take the checkpoint as it was written") from error
    config = _configuration(described, family, path)
    if config.num_stages != len(manifest.stages):
        raise ConfigError(f"{path} describes a model of {config.num_stages} stages, {MANIFEST} others")
    outcomes = [outcome_of(checkpoint.record, stage) for stage in range(config.num_stages)]
    places: dict[str, tuple[int, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for stage, layout in enumerate(manifest.layouts):
        parameters, _, floats, integers = stored_layouts(layout)
        stored = (*parameters.entries, *floats.entries, *integers.entries)
        for entry, at in zip(layout.entries, stored, strict=True):
            places[entry.name] = (stage, at.name)
            shapes[entry.name] = entry.shape
    # A stage's file is asked for its tensors one after the other.
    tensors = lru_cache(maxsize=1)(checkpoint.tensors)
    dtypes: dict[str, torch.dtype] = {}

    def read(name: str) -> Tensor:
        stage, at = places[name]
        # In the file it has the element type of its vector.
        return tensors(stage).read(at).to(dtypes[name])

    def hashes(stage: int) -> StageHashes:
        outcome = outcomes[stage]
        if outcome is None:
            raise RecordRejected(f"record {manifest.round} does not speak of stage {stage} of {folder}")
        return outcome.hashes

    tokenizer, is_bytes = _tokenizer(folder, config), config.data.has_bytes
    source = ModelSource(folder, config, shapes, read, hashes, tokenizer, is_bytes)
    dtypes.update((entry.name, entry.dtype) for layout in source.layouts for entry in layout.entries)
    return source


def _configuration(values: object, family: str | None, path: Path) -> Config:
    with describing_model(path):
        config = Config.model_validate({**cast("dict[str, Any]", values), "device": "cpu"})
    if problem := family_problem(config, family, str(path), NAMING):
        raise ConfigError(problem)
    return config


def _record(folder: Path, described: Mapping[str, Any]) -> Record:
    try:
        signed = signed_from_json(_json(folder / RECORD))
        record = unseal(signed, str(described.get("run_id")), verify)
    except (KeyError, ValueError, ShoalError) as error:
        raise RecordRejected(f"{folder / RECORD} is no record of run {described.get('run_id')}: {error}") from error
    if record_hash(signed) != described.get("record"):
        raise RecordRejected(f"{folder / RECORD} is not the record that {CONFIG} names: take the folder as it was")
    return record


def _tensors(path: Path) -> TensorFile:
    try:
        return TensorFile(path)
    except FileNotFoundError as error:
        if (path.parent / YAML).is_file() and not (path.parent / CONFIG).exists():
            # A run's folder has its configuration from the beginning, an export has both.
            raise ConfigError(
                f"there is no model in {path.parent}: a run leaves one in {path.parent / 'model'} when it ends, with "
                "Ctrl-C or `shoal stop` as well; an export has one beside its config.yaml"
            ) from error
        raise StateMismatch(f"{path} does not exist: take the folder as it was written") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{path} does not exist: give the folder `model` of a run, such as logs/sandbox/model, or an export"
        ) from error
    return _parsed(content, path)


def _parsed(content: bytes, path: Path) -> dict[str, Any]:
    try:
        return _object(json.loads(content), path)
    except MALFORMED as error:
        raise ConfigError(f"{path} is no JSON ({error}): take it as it was written") from error


def _object(content: object, path: Path) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no object: take it as it was written")
    return cast("dict[str, Any]", content)
