"""A whole model by name, stage by stage, wherever its tensors lie: what every command that takes a model reads from.

configuration + names of tensors + read(name) + hashes(stage)  ->  stage 0 -> stage 1 -> ...  or all in one piece
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.model_layout import StageLayout, require_hashes, stage_layouts
from shoal.checkpoint.start_weights import prepared
from shoal.config.schema import Config
from shoal.errors import StateMismatch
from shoal.model.precision import autocast_of
from shoal.model.registry import load_family
from shoal.model.stage import StageModule, build_stage, whole_stage
from shoal.quant.apply import apply_quant
from shoal.wire.messages.round import StageHashes

_CPU = torch.device("cpu")


def _no_hashes(stage: int) -> StageHashes | None:
    return None


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the tensors of a model come from. Of what it reads, at most one stage is in memory at a time.

    Attributes:
        folder: For messages.
        config: Of the model, with its cut.
        shapes: Of all tensors that there are, by name.
        read: Gives one of them.
        hashes: What a stage has to hash to; None: nobody has said.
        tokenizer: The folder with the tokenizer's files; None: tokens are bytes, if they are known.
        is_bytes: False: without a tokenizer, nothing says what a token of the model is.
        context: Tokens of the longest text; None: as many as a sample has.

    Raises:
        ConfigError: The configuration describes no model.
        StateMismatch: The tensors are not those of the model.
    """

    folder: Path
    config: Config
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]
    hashes: Callable[[int], StageHashes | None] = _no_hashes
    tokenizer: Path | None = None
    is_bytes: bool = True
    context: int | None = None
    layouts: list[StageLayout] = field(init=False)

    def __post_init__(self) -> None:
        # The class is frozen for its callers.
        object.__setattr__(self, "layouts", stage_layouts(self.config))
        # Before anything is built: a wrong size may be a large one.
        expected = {(entry.name, entry.shape) for layout in self.layouts for entry in layout.entries}
        if odd := expected ^ set(self.shapes.items()):
            named = ", ".join(sorted({name for name, _ in odd})[:5])
            raise StateMismatch(f"{self.folder} is not of the model that its configuration describes: look at {named}")

    @property
    def has_tokenizer_of_run(self) -> bool:
        """Whether its run had another tokenizer than the model that it began from, whose config does not know it."""
        data, model = self.config.data, self.config.model
        return self.tokenizer is not None and data.tokenizer not in (None, model.name_or_path)

    def stage(self, stage: int) -> StageModule:
        """Build a stage as it was trained, with its parameters.

        Raises:
            StateMismatch: The tensors are not those of the model, or not those that the hashes name.
            OSError: A file cannot be read.
        """
        config, pipeline = self.config, self.config.model_pipeline
        family = load_family(config.model, config.data)
        cut, seed = pipeline.cut, config.run.seed
        prepare = prepared(config, family)
        module = build_stage(family, stage, pipeline.stages, seed=seed, cut=cut, in_chunks=False, prepare=prepare)
        # What is quantised may depend on the stage.
        apply_quant(module, config.quant)
        layouts = StageLayout.of(module)
        for layout in layouts:
            for name, tensor in zip(layout.names, layout.select(module), strict=True):
                self._fill(name, tensor)
        hashes = self.hashes(stage)
        if hashes is not None:
            require_hashes(stage, [each.flatten(each.select(module)) for each in layouts], hashes)
        return module.eval()

    def stages(self) -> Iterator[StageModule]:
        """The stages in order, one after the other.

        Raises:
            StateMismatch, OSError: As `stage`.
        """
        for stage in range(len(self.layouts)):
            yield self.stage(stage)

    def whole(self, *, for_loss: bool = False) -> StageModule:
        """The model in one piece, on the CPU and in eval mode.

        Args:
            for_loss: What it puts out is for its loss alone: no logits where that is computed in chunks.

        Raises:
            StateMismatch, OSError: As `stage`.
        """
        family = load_family(self.config.model, self.config.data)
        units = {name: unit for stage in self.stages() for name, unit in stage.units.items()}
        autocast = autocast_of(self.config.data.precision, _CPU)
        return whole_stage(family, units, autocast, in_chunks=for_loss).eval()

    def _fill(self, name: str, tensor: Tensor) -> None:
        given = self.read(name)
        if given.dtype != tensor.dtype:
            raise StateMismatch(f"{name} in {self.folder} is {given.dtype}, the model has {tensor.dtype}")
        with torch.no_grad():
            tensor.copy_(given)
