"""A plain multi-layer perceptron for images: linear layers with ReLU between them.

Shapes: B samples, C channels, S image side, D = C * S * S values of an image, W width, K classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.model.layered import LayeredFamily
from shoal.model.mlp_shape import MlpShape
from shoal.model.stage import TensorSpec

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig


class MlpLayer(nn.Module):
    """relu(linear(x)): (B, inputs...) -> (B, W). The first layer takes images, which it flattens."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.linear(x.flatten(1)))


class MlpHead(nn.Module):
    """(B, W) -> logits (B, K)."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(width, num_classes)

    def forward(self, hidden_BW: Tensor) -> Tensor:
        return self.logits(hidden_BW)


class MlpFamily(LayeredFamily):
    """`model.family: mlp`. Units: the stem, which takes the image, each block, the head."""

    first_units = ("stem",)

    def __init__(self, shape: MlpShape) -> None:
        self.shape = shape

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        return cls(MlpShape.from_config(model, data))

    @property
    def num_units(self) -> int:
        return self.shape.num_layers + 2

    def build_unit(self, index: int) -> nn.Module:
        if index == self.num_units - 1:
            return MlpHead(self.shape.width, self.shape.num_classes)
        return MlpLayer(self.shape.width if index else self.shape.num_values, self.shape.width)

    def input_spec(self) -> TensorSpec:
        return TensorSpec("float32", (self.shape.num_channels, self.shape.img_size, self.shape.img_size))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("int64", ())

    def boundary_spec(self, index: int) -> TensorSpec:
        return TensorSpec("float32", (self.shape.num_classes if index == self.num_units - 1 else self.shape.width,))

    def activation_bytes(self, index: int) -> int:
        # A layer what follows its ReLU; the head its logits, and their logarithms for the loss.
        is_head = index == self.num_units - 1
        return 4 * (2 * self.shape.num_classes if is_head else self.shape.width)

    def unit_costs(self) -> list[float]:
        return self.shape.unit_costs()
