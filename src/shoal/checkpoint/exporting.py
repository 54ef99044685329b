"""`shoal export` and `shoal import`: a model into a folder that other programs load, and one of theirs into ours.

source -> stage 0: fold, write, forget -> stage 1 ... -> read back by `open_model` and compare -> put into place
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import torch
import yaml
from torch import Tensor

from shoal.checkpoint.byte_tokenizer import TOKENIZER_FILE, byte_tokenizer_files
from shoal.checkpoint.gpt2_folder import gpt2_config, gpt2_name
from shoal.checkpoint.loading import YAML, open_model
from shoal.checkpoint.model_folder import CONFIG, TENSORS, ModelFolder, configuration_with_cut
from shoal.checkpoint.model_layout import StageLayout, stage_layouts
from shoal.checkpoint.model_source import ModelSource
from shoal.checkpoint.tensor_file import TensorFileWriter
from shoal.checkpoint.whole_folder import WholeFolder, cannot_write
from shoal.config.schema import Config
from shoal.errors import ConfigError, StateMismatch
from shoal.model.stage import StageModule
from shoal.optim.flat import FlatEntry, state_buffers, tensor_sha256
from shoal.quant.fold import fold_weights, folded_quant

Format = Literal["hf", "safetensors"]
_TOKENIZER_FILES: Final = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
"""Of a model of transformers, copied as they are."""


def export_model(source: ModelSource, to: Path, format: Format | None = None) -> Format:
    """Write a model as transformers' GPT-2 with its tokenizer, or as a state dict with its configuration.

    Args:
        to: The folder; an existing one is replaced as a whole.
        format: None: "hf" for the family gpt, else "safetensors".

    Returns:
        The format.

    Raises:
        ConfigError: The model cannot be written in this format.
        StateMismatch: The tensors are not those of the model, or what was written is read back as something else.
        StorageError: The folder cannot be written.
        OSError: The source cannot be read.
    """
    config = source.config.model_copy(update={"quant": folded_quant(source.config.quant)})
    is_gpt = config.model.family == "gpt"
    if format is None:
        format = "hf" if is_gpt and config.quant is None else "safetensors"
    if format == "hf":
        _require_gpt2(config)
    layouts = stage_layouts(config)
    try:
        folder = WholeFolder(to)
    except OSError as error:
        raise cannot_write(to, error) from error
    try:
        entries = [_stored(entry, format) for layout in layouts for entry in layout.entries]
        digests = _write_tensors(source, folder, entries, format)
        folder.write(YAML, yaml.safe_dump(configuration_with_cut(config), sort_keys=False, allow_unicode=True).encode())
        if format == "hf":
            folder.write_json(CONFIG, gpt2_config(config))
            for name, content in _tokenizer_files(source).items():
                folder.write(name, content)
        _require_equal(folder.aside, config, digests)
        folder.put_into_place()
    except OSError as error:
        raise cannot_write(to, error) from error
    finally:
        folder.discard()
    return format


def import_model(source: ModelSource, to: Path) -> None:
    """Write a model of transformers as the folder of a native one, stage by stage.

    Args:
        to: The folder; an existing one is replaced as a whole.

    Raises:
        StateMismatch: The tensors are not those of such a model.
        StorageError: The folder cannot be written.
        OSError: The source cannot be read.
    """
    folder = ModelFolder(to, source.layouts)
    try:
        for stage in source.stages():
            vectors = [each.flatten(each.select(stage)) for each in StageLayout.of(stage)]
            folder.write_stage(stage.stage, vectors, None)
            del stage, vectors
        if source.tokenizer is not None:
            for name, content in _tokenizer_files(source).items():
                folder.write_tokenizer(name, content)
        folder.commit_import(source.config, source.folder.resolve().name)
    finally:
        folder.discard()


def _require_gpt2(config: Config) -> None:
    if config.model.family != "gpt":
        raise ConfigError(
            f"--format hf: the family {config.model.family} is no model of transformers; use --format safetensors"
        )
    if config.quant is not None:
        raise ConfigError(
            "--format hf: this model quantises what its layers take, for which a GPT-2 of transformers has no place; "
            "use --format safetensors"
        )


def _stored(entry: FlatEntry, format: Format) -> FlatEntry:
    """How a tensor stands in the file."""
    if format == "safetensors":
        return entry
    name, is_transposed = gpt2_name(entry.name)
    return FlatEntry(name, entry.shape[::-1] if is_transposed else entry.shape, entry.dtype, entry.offset)


def _write_tensors(
    source: ModelSource, folder: WholeFolder, entries: list[FlatEntry], format: Format
) -> dict[str, str]:
    """Write all tensors; return what each hashes to, by its native name."""
    digests: dict[str, str] = {}
    with TensorFileWriter(folder.create(TENSORS), entries) as file:
        for stage in source.stages():
            fold_weights(stage)
            for name, values in _state(stage).items():
                digests[name] = tensor_sha256(values)
                stored, is_transposed = gpt2_name(name) if format == "hf" else (name, False)
                file.write(stored, values.t() if is_transposed else values)
            del stage
        file.finish()
    return digests


def _require_equal(folder: Path, config: Config, digests: Mapping[str, str]) -> None:
    """Read a folder back as anybody would, and compare.

    Raises:
        StateMismatch: It is something else.
    """
    written = open_model(folder, family=config.model.family)
    for stage in written.stages():
        for name, values in _state(stage).items():
            if tensor_sha256(values) != digests[name]:
                raise StateMismatch(f"{name} is read back as something else than what was written; is the disk sound?")
        del stage


def _state(stage: StageModule) -> dict[str, Tensor]:
    tensors = {**dict(stage.named_parameters()), **dict(state_buffers(stage))}
    return {name: tensor.detach().to(torch.device("cpu")) for name, tensor in tensors.items()}


def _tokenizer_files(source: ModelSource) -> dict[str, bytes]:
    if source.tokenizer is None:
        return byte_tokenizer_files(source.config.data.seq_len)
    found = [source.tokenizer / name for name in _TOKENIZER_FILES]
    return {path.name: path.read_bytes() for path in found if path.is_file()}
