"""The sizes of an mlp and what they cost. No torch: the launcher cuts models as well."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig


@dataclass(frozen=True, slots=True)
class MlpShape:
    """The sizes of a model.

    Attributes:
        img_size: Their height and width.
        width: W, what every layer but the last puts out.
        num_layers: Number of blocks, the layers between the first and the last.
        num_classes: K.
    """

    num_channels: int
    img_size: int
    width: int
    num_layers: int
    num_classes: int

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        """The sizes that the configuration describes."""
        return cls(
            num_channels=data.num_channels,
            img_size=data.img_size,
            width=model.hidden_size,
            num_layers=model.num_layers,
            num_classes=model.num_classes,
        )

    @property
    def num_values(self) -> int:
        """D: values of an image."""
        return self.num_channels * self.img_size**2

    def unit_costs(self) -> list[float]:
        """Relative cost of forward and backward of the stem, each block, the head with the loss."""
        # Multiply-adds of a sample; the stem's input needs no gradient, which is a third of the work. What is done for
        # each value that a layer puts out takes as long as some 10 of them.
        stem = 2 / 3 * self.num_values * self.width + 10 * self.width
        block = self.width * self.width + 10 * self.width
        head = self.num_classes * self.width + 40 * self.num_classes
        return [stem, *[float(block)] * self.num_layers, float(head)]
