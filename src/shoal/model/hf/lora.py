"""Adapters on the layers of a model of transformers, by peft: low rank, beside parameters that stay as they are.

    unit with its base's weights --adapt--> the same, frozen, with an adapter beside each target --merge--> the sum

    units.block_3.self_attn.q_proj.base_layer.weight        frozen, in `lora.base_dtype`: a constant of the run
    units.block_3.self_attn.q_proj.lora_A.default.weight    trained, float32
    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight      the same in a folder of peft

Initial values are a pure function of the run's seed and the unit, whatever the cut. Embeddings and head get none.

Shapes: T tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import nn

from shoal.config.lora import ALL_LINEAR, LoraConfig
from shoal.errors import ConfigError
from shoal.model.hf.family import HfFamily
from shoal.model.seeding import adapter_seed, seeded
from shoal.model.stage import Family, default_float32
from shoal.model.valueless import WithoutValues

if TYPE_CHECKING:
    from shoal.config.schema import Config

INSTALL: Final = "pip install 'shoal[lora]'"
_ADAPTER: Final = "default"
"""What peft calls an adapter that nobody has named; files leave it out."""
_FLOAT_BYTES: Final = 4
_OF_PEFT: Final = "base_model.model."
_TRANSPOSED: Final = "Conv1D"
_LINEAR: Final = ("Linear", _TRANSPOSED)


def lora_of(config: Config, family: Family) -> Lora | None:
    """Return the adapters that a run trains; None: it trains the model itself.

    Raises:
        ConfigError: peft is not installed, the model has no such targets, or it is none of transformers.
    """
    if config.lora is None:
        return None
    if not isinstance(family, HfFamily):
        raise ConfigError(f"lora: only models of transformers get adapters, not {config.model.family}; remove it")
    return Lora(config.lora, family, config.run.seed)


class Lora:
    """The adapters of one model.

    Attributes:
        targets: By the number of a unit, the names in it of what gets an adapter.

    Raises:
        ConfigError: peft is not installed, or the model has no such targets in its layers, or others elsewhere.
    """

    def __init__(self, config: LoraConfig, family: HfFamily, seed: int) -> None:
        self._config = config
        self._family = family
        self._seed = seed
        self._peft = _peft()
        self.targets: dict[int, list[str]] = {}
        for index, layer in enumerate(family.layers, start=1):
            self.targets[index] = [name for name, module in _modules_of(layer) if self._is_chosen(name, module)]
        self._require_targets()
        # Models have either linear modules of torch or of OpenAI's GPT-2, whose weights are the other way round.
        first = next(index for index, names in self.targets.items() if names)
        module = family.layers[first - 1].get_submodule(self.targets[first][0])
        self._is_transposed = type(module).__name__ == _TRANSPOSED

    def adapt(self, index: int, unit: nn.Module) -> None:
        """Freeze a unit that has its base's weights, and give it its adapters.

        Args:
            unit: Of the family, as it builds it; changed in place. On the meta device its adapters are too.
        """
        unit.requires_grad_(False)
        for _, module in _modules_of(unit):
            _constants_of(module).update(name for name, _ in module.named_buffers(recurse=False))
        targets = self.targets.get(index)
        is_meta = any(parameter.is_meta for parameter in unit.parameters())
        if targets:
            described = self._described(targets, fan_in_fan_out=self._is_transposed)
            with seeded(adapter_seed(self._seed, index)), default_float32():
                self._peft.inject_adapter_in_model(described, unit, low_cpu_mem_usage=is_meta)
        if self._config.base_dtype != "float32":
            dtype: torch.dtype = getattr(torch, self._config.base_dtype)
            for parameter in unit.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(dtype)

    def merge(self, index: int, unit: nn.Module) -> None:
        """Make of a unit with adapters one without, in float32, which computes the same up to rounding; in place."""
        unit.float()
        for name in self.targets.get(index, []):
            layer = cast("Any", unit.get_submodule(name))
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(unit.get_submodule(parent), child, layer.get_base_layer())
        unit.requires_grad_(True)
        with torch.device("meta"), WithoutValues():
            plain = self._family.build_unit(index)
        for name, module in _modules_of(plain):
            _constants_of(unit.get_submodule(name)).intersection_update(_constants_of(module))

    def activation_bytes(self, index: int, num_tokens: int) -> int:
        """About what the adapters of a unit keep of one sample (T) until its backward, beside what the unit keeps."""
        layer = self._family.layers[index - 1] if self.targets.get(index) else None
        num_values = 0
        for name in self.targets.get(index, []):
            weight = cast("nn.Module", layer).get_submodule(name).get_parameter("weight")
            width = weight.shape[0 if self._is_transposed else 1]
            # What the lower half puts out; what it takes, if that is a copy: of another type, or with zeros and a mask.
            num_values += self._config.r
            num_values += width * (self._config.base_dtype != "float32")
            num_values += (width + width // _FLOAT_BYTES) * (self._config.dropout > 0)
        return _FLOAT_BYTES * num_tokens * num_values

    def file_config(self, base: str | None) -> dict[str, Any]:
        """The content of peft's adapter_config.json.

        Args:
            base: The folder of the model under the adapters, or its name on the hub.
        """
        described = self._described(
            self._file_targets(),
            fan_in_fan_out=self._is_transposed,
            base_model_name_or_path=base,
            inference_mode=True,
        )
        values: dict[str, Any] = described.to_dict()
        values["peft_type"] = values["peft_type"].value
        values["target_modules"] = sorted(values["target_modules"])
        return values

    def file_name(self, index: int, inner: str) -> str:
        """What a folder of peft calls an adapter's tensor that has this name in a unit."""
        (whole,) = self._family.whole_names(index, [inner])
        return _OF_PEFT + whole.replace(f".{_ADAPTER}.", ".")

    def _described(self, targets: list[str], **more: Any) -> Any:
        own = self._config
        return self._peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=own.r,
            lora_alpha=own.alpha,
            lora_dropout=own.dropout,
            target_modules=targets,
            **more,
        )

    def _is_chosen(self, name: str, module: nn.Module) -> bool:
        """Whether a module of a layer gets an adapter."""
        if self._config.targets == (ALL_LINEAR,):
            return _is_linear(module)
        return any(_ends_with(name, target) for target in self._config.targets)

    def _file_targets(self) -> list[str]:
        """By the ends of names, as people write them, where these are no others' in the model; else by whole names."""
        adapted = {whole for index, names in self.targets.items() for whole in self._family.whole_names(index, names)}
        ends = {whole.rpartition(".")[2] for whole in adapted}
        everything = set(self._family.outer_modules)
        for index, layer in enumerate(self._family.layers, start=1):
            everything.update(self._family.whole_names(index, [name for name, _ in _modules_of(layer) if name]))
        found = {name for name in everything if any(_ends_with(name, end) for end in ends)}
        return sorted(ends if found == adapted else adapted)

    def _require_targets(self) -> None:
        inner = [each for layer in self._family.layers for each in _modules_of(layer)]
        problems = [problem for target in self._config.targets for problem in self._problems(target, inner)]
        if not problems and not any(self.targets.values()):
            problems.append("lora.targets: no layer has a linear module")
        if problems:
            linear = sorted({name for name, module in inner if _is_linear(module)})
            problems.append(f"linear modules of the layers are: {', '.join(linear) or 'none'}")
            raise ConfigError("\n".join(problems))

    def _problems(self, target: str, inner: list[tuple[str, nn.Module]]) -> Iterator[str]:
        """What is wrong with a target, beside the modules of all layers by their names there."""
        if target == ALL_LINEAR:
            return
        found = [module for name, module in inner if _ends_with(name, target)]
        outer = [name for name in self._family.outer_modules if _ends_with(name, target)]
        others = sorted({type(module).__name__ for module in found if not _is_linear(module)})
        if not found and not outer:
            yield f"lora.targets: no layer has a module {target}"
        if others:
            yield f"lora.targets: {target} is a {' and a '.join(others)}, and only linear modules get adapters"
        if outer:
            yield f"lora.targets: {target} is {outer[0]}, and only modules of the layers get adapters"


def _modules_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return cast("Iterator[tuple[str, nn.Module]]", module.named_modules())


def _constants_of(module: nn.Module) -> set[str]:
    """The names of a module's buffers that are no state of it (`optim.flat.state_buffers`)."""
    return module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]


def _is_linear(module: nn.Module) -> bool:
    return type(module).__name__ in _LINEAR


def _ends_with(name: str, target: str) -> bool:
    """Whether a module's name ends with a target, as peft has it."""
    return name == target or name.endswith(f".{target}")


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(f"lora needs the package peft, which is not here ({error}): {INSTALL}") from error
