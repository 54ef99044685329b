"""Which tensors a model consists of, by stage and by name, without having them.

stage 0: FlatLayout of parameters, of floating buffers, of integer buffers      as a record's hashes are taken
stage 1: ...                                                                    names are those of the uncut model
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from shoal.config.schema import Config
from shoal.errors import StateMismatch
from shoal.model.meta import build_units_without_values
from shoal.model.registry import load_family
from shoal.model.stage import StageModule, build_stage, stage_units
from shoal.optim.flat import FlatEntry, FlatLayout, buffers_sha256, tensor_sha256
from shoal.quant.apply import apply_quant
from shoal.wire.messages.round import StageHashes


class StageLayout(NamedTuple):
    """The tensors of one stage, in the order of its flat vectors."""

    parameters: FlatLayout
    floats: FlatLayout
    integers: FlatLayout

    @classmethod
    def of(cls, module: nn.Module) -> StageLayout:
        """The layout of a stage that is built."""
        return cls(
            FlatLayout.of_parameters(module),
            FlatLayout.of_float_buffers(module),
            FlatLayout.of_integer_buffers(module),
        )

    @property
    def entries(self) -> tuple[FlatEntry, ...]:
        """All tensors."""
        return tuple(entry for layout in self for entry in layout.entries)


def stage_layouts(config: Config) -> list[StageLayout]:
    """The tensors of every stage of a run's model; at most one stage is in memory at a time.

    Raises:
        ConfigError: the model does not fit the configuration.
    """
    family, pipeline = load_family(config.model, config.data), config.model_pipeline
    found: list[StageLayout] = []
    for stage, indices in enumerate(stage_units(family, pipeline.stages, pipeline.cut)):
        if config.quant is not None:
            # Without values torch would import its compiler for a step size: a second, when somebody waits for the end.
            module = build_stage(family, stage, pipeline.stages, seed=config.run.seed, cut=pipeline.cut)
            apply_quant(module, config.quant)
            found.append(StageLayout.of(module))
            continue
        units = build_units_without_values(family, indices, config)
        found.append(StageLayout.of(StageModule(family, units, indices, stage, pipeline.stages)))
    return found


def hashes_of(vectors: Sequence[Tensor], momentum: Tensor | None = None) -> StageHashes:
    """What a stage's parameters, floating and integer buffers, as flat vectors, hash to, and its momentum if given."""
    parameters, floats, integers = vectors
    of_momentum = "" if momentum is None else tensor_sha256(momentum)
    return StageHashes(tensor_sha256(parameters), of_momentum, buffers_sha256(floats, integers))


def require_hashes(
    stage: int, vectors: Sequence[Tensor], hashes: StageHashes, *, momentum: Tensor | None = None
) -> None:
    """Compare a stage's parameters, floating and integer buffers, as flat vectors, with what is said of them.

    Args:
        momentum: None: nobody needs it.

    Raises:
        StateMismatch: they are others.
    """
    found = hashes_of(vectors, momentum)
    asked = ("parameters", "buffers") if momentum is None else ("parameters", "momentum", "buffers")
    said = [(getattr(found, name), getattr(hashes, name), name) for name in asked]
    if wrong := [f"{found[:16]} instead of {named[:16]} ({name})" for found, named, name in said if found != named]:
        raise StateMismatch(f"the tensors of stage {stage} hash to {', '.join(wrong)}: they have changed since")
