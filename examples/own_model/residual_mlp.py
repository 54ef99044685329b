"""A model family of one's own: an MLP with residual blocks for small images.

Shapes: B samples, C channels, S image side, W width, K classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.errors import ConfigError
from shoal.model.stage import Family, TensorSpec

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))): (B, W) -> (B, W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden_BW: Tensor) -> Tensor:
        # Not `+=`: a unit leaves its input as it is.
        return hidden_BW + self.down(F.gelu(self.up(self.norm(hidden_BW))))


class ResidualMlp(Family):
    """Units: the stem, `depth` blocks, the head. The model can be cut between any two of them."""

    def __init__(self, *, num_channels: int, img_size: int, width: int, depth: int, num_classes: int) -> None:
        self.num_channels, self.img_size = num_channels, img_size
        self.width, self.depth, self.num_classes = width, depth, num_classes

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        unknown = model.extra.keys() - {"width", "depth"}
        if unknown:
            raise ConfigError(f"model.extra has no {', '.join(sorted(unknown))}; this family takes width and depth")
        return cls(
            num_channels=data.num_channels,
            img_size=data.img_size,
            width=int(model.extra.get("width", 64)),
            depth=int(model.extra.get("depth", 4)),
            num_classes=model.num_classes,
        )

    @property
    def num_units(self) -> int:
        return self.depth + 2

    def build_unit(self, index: int) -> nn.Module:
        if index == 0:
            pixels = self.num_channels * self.img_size**2
            return nn.Sequential(nn.Flatten(), nn.Linear(pixels, self.width))
        if index == self.num_units - 1:
            return nn.Sequential(nn.LayerNorm(self.width), nn.Linear(self.width, self.num_classes))
        return Block(self.width)

    def input_spec(self) -> TensorSpec:
        return TensorSpec("float32", (self.num_channels, self.img_size, self.img_size))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("int64", ())

    def boundary_spec(self, index: int) -> TensorSpec:
        return TensorSpec("float32", (self.num_classes if index == self.num_units - 1 else self.width,))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output, labels)

    def unit_costs(self) -> list[float]:
        # Multiply-adds of a sample.
        pixels = self.num_channels * self.img_size**2
        block = 4.0 * self.width**2
        return [float(pixels * self.width), *[block] * self.depth, float(self.width * self.num_classes)]
