"""The weights that a run begins from: read by unit from a model of transformers, and told apart by their hashes.

repository --unit by unit--> digests --> model.weights, which all hosts share: another bit is another run
           '--those of a stage--> compared with model.weights --> the stage of D_0
a peer ------'

Under adapters they stay as they are, no part of D_0: each host has its own copy, or draws them from the run's seed, and
compares it with `model.weights` before anything is trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor, nn

from shoal.checkpoint.hf_stored import StoredModel, hf_family
from shoal.checkpoint.model_layout import StageLayout
from shoal.config.schema import Config
from shoal.errors import ConfigError, LocalProtocolError, StateMismatch, WeightsMissing
from shoal.model.hf.family import HfFamily
from shoal.model.hf.lora import lora_of
from shoal.model.hf.repository import Repository
from shoal.model.registry import load_family
from shoal.model.stage import Family, PrepareUnit, StageModule, build_stage, initial_unit
from shoal.optim.flat import tensor_sha256

_DIGITS = 32


class StartWeights:
    """The weights of a run with `model.pretrained`, or under the adapters of a run."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._family = hf_family(config)

    def digests(self) -> tuple[str, ...]:
        """Read all of them, unit by unit, and return what each hashes to.

        Raises:
            ConfigError: They cannot be read, or are not those of the model.
        """
        try:
            units = map(self._unit, range(self._family.num_units))
            return tuple(_digest(self._family, index, unit.state_dict()) for index, unit in enumerate(units))
        except (StateMismatch, OSError) as error:
            raise ConfigError(f"model.pretrained: {error}") from error

    def _unit(self, index: int) -> nn.Module:
        if self._config.model.pretrained:
            return self._stored.unit(index)
        return initial_unit(self._family, index, self._config.run.seed)

    def fill(self, module: StageModule) -> None:
        """Give a stage, before it is quantised, its weights from this host's files or the hub.

        Raises:
            WeightsMissing: There are none, or they are not those that the run begins from.
        """
        try:
            for name, unit in module.units.items():
                self._stored.fill(self._family.unit_numbers[name], unit)
            self.check({name: unit.state_dict() for name, unit in module.units.items()})
        except (ConfigError, StateMismatch, OSError) as error:
            raise WeightsMissing(str(error)) from error

    def fill_base(self, index: int, unit: nn.Module) -> None:
        """Give a unit, before it gets adapters, its weights; without `model.pretrained` it has those of the seed.

        Raises:
            WeightsMissing: There are none on this host, or they are not those under the run's adapters.
        """
        try:
            if self._config.model.pretrained:
                self._stored.fill(index, unit)
            self.check({self._family.unit_name(index): unit.state_dict()})
        except (ConfigError, StateMismatch, OSError) as error:
            raise WeightsMissing(str(error)) from error

    def fill_from(self, module: StageModule, vectors: Sequence[Tensor]) -> None:
        """Give a stage, before it is quantised, what a peer has given.

        Args:
            vectors: Parameters, floating and integer buffers, flat; `are_right` has said so.
        """
        for layout, vector in zip(StageLayout.of(module), vectors, strict=True):
            layout.unflatten(vector, layout.select(module))

    def are_right(self, layout: StageLayout, vectors: Sequence[Tensor]) -> bool:
        """Whether these are the weights of a stage that the run begins from. Arguments as of `fill_from`."""
        units: dict[str, dict[str, Tensor]] = {}
        for part, vector in zip(layout, vectors, strict=True):
            for entry, view in zip(part.entries, part.views(vector), strict=True):
                index, inner = self._family.unit_of(entry.name)
                units.setdefault(self._family.unit_name(index), {})[inner] = view.to(entry.dtype)
        try:
            self.check(units)
        except StateMismatch:
            return False
        return True

    def check(self, units: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Compare units, by name, with what the run begins from.

        Raises:
            StateMismatch: Naming those that differ.
        """
        named = self._config.model.weights
        if named is None or len(named) != self._family.num_units:
            raise LocalProtocolError("nobody has said what the weights of the run hash to")
        found = {name: _digest(self._family, self._family.unit_numbers[name], state) for name, state in units.items()}
        if odd := [name for name, digest in found.items() if digest != named[self._family.unit_numbers[name]]]:
            raise StateMismatch(f"{', '.join(odd)} of {self._differing()}")

    def _differing(self) -> str:
        """How it comes that weights here are others, and what to do."""
        model = self._config.model
        if not model.pretrained:
            return (
                f"run.seed = {self._config.run.seed} on this host: the run has other random weights under its "
                "adapters; install the versions of torch and transformers that the run's first host has"
            )
        said = (
            f"{model.name_or_path} on this host: the run began from other weights; take the folder as it is where the "
            "run began"
        )
        return said if self._config.lora is not None else f"{said}, or remove it here: then peers give them"

    @cached_property
    def _stored(self) -> StoredModel:
        return StoredModel(Repository.of(self._config.model), self._family)


def read_start(config: Config, stage: int) -> list[Tensor] | None:
    """Read what a stage begins from, as flat vectors of parameters, floating and integer buffers.

    None: it is not on this host, or what is here is something else.

    Raises:
        ConfigError: The model does not fit the configuration.
    """
    family, pipeline = load_family(config.model, config.data), config.model_pipeline
    module = build_stage(family, stage, pipeline.stages, seed=config.run.seed, cut=pipeline.cut)
    try:
        fill_start(config, module)
    except WeightsMissing:
        return None
    return [layout.flatten(layout.select(module)) for layout in StageLayout.of(module)]


def fill_start(config: Config, module: StageModule) -> None:
    """Give a stage what the run begins from, where that is not what its seed says.

    Raises:
        WeightsMissing: This host has not the weights.
    """
    if config.begins_from_weights:
        StartWeights(config).fill(module)


def prepared(config: Config, family: Family) -> PrepareUnit | None:
    """Return what makes of a unit one of the run's base, frozen and with adapters; None: the run trains the units.

    Raises:
        ConfigError: The model has no such adapters.
    """
    lora = lora_of(config, family)
    if lora is None:
        return None
    is_known = config.model.pretrained or config.model.weights is not None
    weights = StartWeights(config) if is_known else None

    def prepare(index: int, unit: nn.Module) -> None:
        if weights is not None:
            weights.fill_base(index, unit)
        lora.adapt(index, unit)

    return prepare


def _digest(family: HfFamily, index: int, state: Mapping[str, Tensor]) -> str:
    """The hash of a unit's own tensors, by name, type and shape."""
    own = family.own_state(index, state)
    parts = (f"{name} {own[name].dtype} {tuple(own[name].shape)} {tensor_sha256(own[name])}" for name in sorted(own))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_DIGITS]
