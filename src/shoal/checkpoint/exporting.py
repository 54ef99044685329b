"""`shoal export` and `shoal import`: a model into a folder that other programs load, and one of theirs into ours.

source -> stage 0: fold, write, forget -> stage 1 ... -> read back by `open_model` and compare -> put into place
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast

import torch
import yaml
from torch import Tensor

from shoal.checkpoint.byte_tokenizer import byte_tokenizer_files
from shoal.checkpoint.gpt2_folder import gpt2_config, gpt2_name
from shoal.checkpoint.hf_folder import HfForm
from shoal.checkpoint.integer_file import integer_entries, integer_tensors
from shoal.checkpoint.loading import YAML, open_model
from shoal.checkpoint.model_folder import CONFIG, TENSORS, TOKENIZER, ModelFolder, configuration_with_cut
from shoal.checkpoint.model_layout import StageLayout, stage_layouts
from shoal.checkpoint.model_source import ModelSource
from shoal.checkpoint.peft_folder import ADAPTER, ADAPTER_CONFIG, PeftForm
from shoal.checkpoint.tensor_file import OutFile, TensorFileWriter
from shoal.checkpoint.whole_folder import WholeFolder, writing_to
from shoal.config.schema import Config
from shoal.errors import ConfigError, StateMismatch
from shoal.model.hf.lora import lora_of
from shoal.model.hf.tokenizer import FILES, GENERATION, end_of_document, require_own
from shoal.model.registry import load_family
from shoal.model.stage import StageModule
from shoal.optim.flat import FlatEntry, state_buffers, tensor_sha256, trained_parameters
from shoal.quant.fold import WeightScale, fold_weights, folded_quant, weight_scales

Format = Literal["hf", "safetensors", "integers", "peft"]
_OF_TRANSFORMERS: Final = ("gpt", "hf")
_NO_ENDS: Final[Mapping[str, int | None]] = {"bos_token_id": None, "eos_token_id": None}
_FILES: Final[Mapping[Format, tuple[str, str]]] = {
    "hf": (TENSORS, CONFIG),
    "safetensors": (TENSORS, CONFIG),
    "integers": (TENSORS, CONFIG),
    "peft": (ADAPTER, ADAPTER_CONFIG),
}
"""The names of the tensors' file and of what describes them."""
_TOKENIZER_FILES: Final = (*FILES, "vocab.json", "merges.txt", GENERATION)
"""Of a model of transformers, copied as they are."""


def export_model(source: ModelSource, to: Path, format: Format | None = None, *, merge: bool = False) -> Format:
    """Write a model as one of transformers with its tokenizer, its adapters for peft, or a state dict with its
    configuration, in which weights that were trained with quantisation may be integers.

    Args:
        to: The folder; an existing one is replaced as a whole.
        format: None: "peft" of adapters, "hf" for the families gpt and hf, else "safetensors".
        merge: Write the model as it is with its adapters, as one without any.

    Returns:
        The format.

    Raises:
        ConfigError: The model cannot be written in this format.
        StateMismatch: The tensors are not those of the model, or what was written is read back as something else.
        StorageError: The folder cannot be written.
        OSError: The source cannot be read.
    """
    config = source.config.model_copy(update={"quant": folded_quant(source.config.quant)})
    merger = _Merger(source.config) if merge else None
    if merger is not None:
        config = config.model_copy(update={"lora": None})
    if format is None:
        format = _usual_format(config)
    form = _IntegerForm(source, config) if format == "integers" else _form(config, format, _ends(source))
    with writing_to(to):
        folder = WholeFolder(to)
    try:
        with writing_to(to):
            digests = _write_tensors(source, folder.create(_FILES[format][0]), form, merger)
            folder.write(YAML, yaml.safe_dump(_published(config), sort_keys=False, allow_unicode=True).encode())
            if form.described is not None:
                folder.write_json(_FILES[format][1], form.described)
                for name, content in _tokenizer_files(source).items():
                    folder.write(name, content)
            elif source.tokenizer is not None:
                for name, content in _tokenizer_files(source).items():
                    folder.write(f"{TOKENIZER}/{name}", content)
            _require_equal(folder.aside, config, digests)
            folder.put_into_place()
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
        origin = source.folder.resolve().name
        folder.commit_import(source.config, origin, is_bytes=source.is_bytes, context=source.context)
    finally:
        folder.discard()


def _published(config: Config) -> dict[str, Any]:
    """The configuration of a model that is handed on: without what a class of the user's own was called with, in which
    there may be an address with a token (`config.dump.published_values`)."""
    values = configuration_with_cut(config)
    cast("dict[str, Any]", values["data"]).pop("arguments")
    return values


class _Form(Protocol):
    """How a model is written.

    Attributes:
        entries: Of all tensors in the file.
        described: The content of config.json, or of adapter_config.json; None: there is none.
    """

    entries: list[FlatEntry]
    described: dict[str, Any] | None

    def tensors(self, stage: StageModule) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a stage as the file has them."""
        ...


class _NativeForm:
    """A state dict."""

    def __init__(self, config: Config) -> None:
        self.entries = [entry for layout in stage_layouts(config) for entry in layout.entries]
        self.described: dict[str, Any] | None = None

    def tensors(self, stage: StageModule) -> Iterator[tuple[str, Tensor]]:
        yield from _state(stage).items()


class _IntegerForm:
    """A state dict with the integers and scales of what was trained with quantisation."""

    def __init__(self, source: ModelSource, config: Config) -> None:
        self._scales: dict[str, WeightScale] = {}
        for stage in source.stages():
            self._scales |= weight_scales(stage)
            del stage
        if not self._scales:
            raise ConfigError(
                f"--format integers: no weight of {source.folder} was trained with quantisation, so none has integers; "
                "use --format safetensors"
            )
        self.entries: list[FlatEntry] = []
        for entry in (entry for layout in stage_layouts(config) for entry in layout.entries):
            scale = self._scales.get(entry.name)
            self.entries += [entry] if scale is None else integer_entries(entry, scale)
        self.described: dict[str, Any] | None = None

    def tensors(self, stage: StageModule) -> Iterator[tuple[str, Tensor]]:
        for name, values in _state(stage).items():
            scale = self._scales.get(name)
            if scale is None:
                yield name, values
            else:
                yield from integer_tensors(name, values, scale)


class _Gpt2Form:
    """The family gpt as a GPT-2 of transformers."""

    def __init__(self, config: Config, ends: Mapping[str, int | None]) -> None:
        native = [entry for layout in stage_layouts(config) for entry in layout.entries]
        self.entries = [_gpt2_entry(entry) for entry in native]
        self.described: dict[str, Any] | None = gpt2_config(config, {**_NO_ENDS, **ends})

    def tensors(self, stage: StageModule) -> Iterator[tuple[str, Tensor]]:
        for name, values in _state(stage).items():
            stored, is_transposed = gpt2_name(name)
            yield stored, values.t() if is_transposed else values


def _gpt2_entry(entry: FlatEntry) -> FlatEntry:
    name, is_transposed = gpt2_name(entry.name)
    return FlatEntry(name, entry.shape[::-1] if is_transposed else entry.shape, entry.dtype, entry.offset)


def _usual_format(config: Config) -> Format:
    if config.lora is not None:
        return "peft"
    return "hf" if config.model.family in _OF_TRANSFORMERS and config.quant is None else "safetensors"


class _Merger:
    """Makes of stages with adapters such as have none."""

    def __init__(self, config: Config) -> None:
        family = load_family(config.model, config.data)
        lora = lora_of(config, family)
        if lora is None:
            raise ConfigError("--merge: this model has no adapters, since its run had no section lora; leave it out")
        self._lora = lora
        self._numbers = family.unit_numbers

    def merge(self, stage: StageModule) -> None:
        """Change a stage in place."""
        for name, unit in stage.units.items():
            self._lora.merge(self._numbers[name], unit)


def _form(config: Config, format: Literal["hf", "safetensors", "peft"], ends: Mapping[str, int | None]) -> _Form:
    if format == "safetensors":
        return _NativeForm(config)
    if format == "peft":
        return PeftForm(config)
    if config.lora is not None:
        raise ConfigError("--format hf: this model has adapters beside it; say --merge, or use --format peft")
    if config.model.family not in _OF_TRANSFORMERS:
        raise ConfigError(
            f"--format hf is written of the families gpt and hf, not of {config.model.family}; use --format safetensors"
        )
    if config.quant is not None:
        raise ConfigError(
            "--format hf: this model quantises what its layers take, for which a model of transformers has no place; "
            "use --format safetensors"
        )
    return _Gpt2Form(config, ends) if config.model.family == "gpt" else HfForm(config, ends)


def _write_tensors(source: ModelSource, out: OutFile, form: _Form, merger: _Merger | None) -> dict[str, str]:
    """Write all tensors; return what each hashes to, by its native name."""
    digests: dict[str, str] = {}
    with TensorFileWriter(out, form.entries) as file:
        for stage in source.stages():
            fold_weights(stage)
            if merger is not None:
                merger.merge(stage)
            digests |= {name: tensor_sha256(values) for name, values in _state(stage).items()}
            for name, values in form.tensors(stage):
                file.write(name, values)
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
    tensors = {**dict(trained_parameters(stage)), **dict(state_buffers(stage))}
    return {name: tensor.detach().to(torch.device("cpu")) for name, tensor in tensors.items()}


def _ends(source: ModelSource) -> dict[str, int | None]:
    """Return which tokens begin and end a text, as far as the run knows better than the config of its model."""
    if source.tokenizer is None:
        # Bytes are text and nothing else.
        return dict(_NO_ENDS) if source.is_bytes else {}
    if not source.has_tokenizer_of_run:
        return {}
    return {**_NO_ENDS, "eos_token_id": end_of_document(_tokenizer_files(source))}


def _tokenizer_files(source: ModelSource) -> dict[str, bytes]:
    if source.tokenizer is None:
        return byte_tokenizer_files(source.config.data.seq_len) if source.is_bytes else {}
    found = [path for name in _TOKENIZER_FILES if (path := source.tokenizer / name).is_file()]
    require_own(found, source.tokenizer)
    return {path.name: path.read_bytes() for path in found}
