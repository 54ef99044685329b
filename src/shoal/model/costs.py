"""What each unit of a model costs by the family's own figures, and the cut that follows. No torch.

A run that has to be repeatable is cut by these; measured ones (`shoal.model.profile`) differ from machine to machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.model.gpt_shape import GptShape
from shoal.model.mlp_shape import MlpShape
from shoal.model.resnet_shape import DEPTHS, ResNetShape

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig


def static_costs(model: ModelConfig, data: DataConfig) -> list[float] | None:
    """The relative cost of each unit of a native family, as its `unit_costs` says; None for any other family.

    Raises:
        ConfigError: The configuration does not fit the family.
    """
    if model.family == "gpt":
        return GptShape.from_config(model, data).unit_costs()
    if model.family == "mlp":
        return MlpShape.from_config(model, data).unit_costs()
    if model.family in DEPTHS:
        return ResNetShape.from_config(model, data).unit_costs()
    if model.family == "biggan":
        return [1.0]  # one unit is not cut
    return None
