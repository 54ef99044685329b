"""What a run with adapters leaves, as a folder of peft and back: `PeftModel.from_pretrained(base, folder)` loads it.

native                                              peft
units.block_3.mlp.up_proj.lora_A.default.weight     base_model.model.model.layers.3.mlp.up_proj.lora_A.weight
lora.*                                              adapter_config.json
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from shoal.checkpoint.model_layout import stage_layouts
from shoal.checkpoint.model_source import ModelSource
from shoal.checkpoint.tensor_file import TensorFile, TensorFileWriter
from shoal.checkpoint.whole_folder import WholeFolder
from shoal.config.schema import Config
from shoal.errors import ConfigError, StateMismatch
from shoal.model.hf.lora import lora_of
from shoal.model.registry import load_family
from shoal.model.stage import StageModule
from shoal.optim.flat import FlatEntry, trained_parameters

ADAPTER: Final = "adapter_model.safetensors"
ADAPTER_CONFIG: Final = "adapter_config.json"


class PeftForm:
    """How the adapters of a run are written for peft.

    Attributes:
        names: What a file calls each tensor, by its native name.
        entries: Of all tensors in the file.
        described: The content of adapter_config.json.

    Raises:
        ConfigError: The run trains no adapters.
    """

    def __init__(self, config: Config) -> None:
        family = load_family(config.model, config.data)
        lora = lora_of(config, family)
        if lora is None:
            raise ConfigError("--format peft: this model has no adapters, since its run had no section lora")
        native = [entry for layout in stage_layouts(config) for entry in layout.entries]
        self.names = {entry.name: lora.file_name(*family.unit_of(entry.name)) for entry in native}
        self.entries: list[FlatEntry] = [replace(entry, name=self.names[entry.name]) for entry in native]
        base = config.model.name_or_path if config.model.pretrained else None
        self.described: dict[str, Any] | None = lora.file_config(base)

    def tensors(self, stage: StageModule) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters of a stage as the file has them."""
        for name, values in trained_parameters(stage):
            yield self.names[name], values.detach()


def write_adapter(folder: WholeFolder, tensors: Path, config: Config) -> None:
    """Write the adapters of a model beside its other files, as peft loads them.

    Args:
        tensors: The file that has them by their native names.

    Raises:
        StateMismatch: They cannot be read back.
        OSError: They cannot be written.
    """
    form, native = PeftForm(config), TensorFile(tensors)
    with TensorFileWriter(folder.create(ADAPTER), form.entries) as file:
        for name, stored in form.names.items():
            file.write(stored, native.read(name))
        file.finish()
    folder.write_json(ADAPTER_CONFIG, form.described or {})


def open_adapter(folder: Path, config: Config) -> ModelSource:
    """Open a folder of peft that was exported, with the base that the configuration names.

    Raises:
        ConfigError: The configuration describes no model with adapters.
        StateMismatch: The tensors are not those of the model.
    """
    tensors, names = TensorFile(folder / ADAPTER), PeftForm(config).names
    native = {stored: name for name, stored in names.items()}
    if strange := tensors.shapes.keys() - native.keys():
        shown = ", ".join(sorted(strange)[:5])
        raise StateMismatch(f"{folder / ADAPTER} has tensors of no adapter of the run: {shown}")
    shapes = {native[stored]: shape for stored, shape in tensors.shapes.items()}
    return ModelSource(folder, config, shapes, lambda name: tensors.read(names[name]))
