"""The sizes of a ResNet and what they cost. No torch: the launcher cuts models as well.

B samples, C channels, H height, W width, K classes, as in `shoal.model.resnet`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Self

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig

Stem = Literal["cifar", "imagenet"]


DEPTHS: Final[dict[str, tuple[int, int, int, int]]] = {
    "resnet18": (2, 2, 2, 2),
    "resnet50": (3, 4, 6, 3),
    "resnet101": (3, 4, 23, 3),
}
"""Blocks of each of the four groups (arXiv 1512.03385, table 1)."""
BOTTLENECKS: Final = frozenset({"resnet50", "resnet101"})


# In multiply-adds: each value that a convolution puts out, with its norm, activation and sum; each weight, which is
# read, and whose gradient is written, once a microbatch, of a dozen samples or so.
_PER_VALUE: Final = {False: 80, True: 160}
_PER_WEIGHT: Final = {False: 1, True: 9}
"""By whether blocks are bottlenecks: 1x1 convolutions have less to do for each value and each weight."""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One residual block: channels in, inside and out; the stride of its 3x3 convolution; height and width out."""

    inputs: int
    width: int
    outputs: int
    stride: int
    size_out: int

    @property
    def size_in(self) -> int:
        """Height and width of what it takes, but for an odd size that is halved: then one more."""
        return self.size_out * self.stride

    @property
    def has_shortcut(self) -> bool:
        """Whether the shortcut is a convolution: where it has to change channels or size."""
        return self.inputs != self.outputs or self.stride != 1


@dataclass(frozen=True, slots=True)
class ResNetShape:
    """The sizes of a model.

    Attributes:
        depths: Blocks of each of the four groups; each group but the first halves the resolution and doubles the
            channels.
        bottleneck: 1x1-3x3-1x1 blocks with four times the channels, instead of 3x3-3x3.
        stem: "cifar": one 3x3 convolution; "imagenet": 7x7 with stride 2 and max-pooling.
        img_size: Height and width of the images.
        num_classes: K.
    """

    depths: tuple[int, int, int, int]
    bottleneck: bool
    stem: Stem
    num_channels: int
    img_size: int
    num_classes: int

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        """The sizes of the network that `model.family` names, for the images that the configuration describes."""
        return cls(
            depths=DEPTHS[model.family],
            bottleneck=model.family in BOTTLENECKS,
            stem=model.stem,
            num_channels=data.num_channels,
            img_size=data.img_size,
            num_classes=model.num_classes,
        )

    @property
    def stem_size(self) -> int:
        """Height and width after the stem."""
        return self.img_size if self.stem == "cifar" else halved(halved(self.img_size))

    def blocks(self) -> list[BlockPlan]:
        """Every block, in order."""
        plans: list[BlockPlan] = []
        inputs, size = 64, self.stem_size
        for group, depth in enumerate(self.depths):
            width = 64 << group
            outputs = 4 * width if self.bottleneck else width
            for block in range(depth):
                stride = 2 if group > 0 and block == 0 else 1
                if stride == 2:
                    size = halved(size)
                plans.append(BlockPlan(inputs, width, outputs, stride, size))
                inputs = outputs
        return plans

    def unit_costs(self) -> list[float]:
        """Relative cost of forward and backward of the stem, each block, the head with the loss."""
        # Multiply-adds of a sample and what goes with them, so weighted that the cuts into 2 to 4 stages are the best
        # ones by the times that one CPU thread takes, for ResNet-18 and -50 and images of 8, 32 and 224 pixels, or
        # near them. Late blocks have many weights for few pixels and take longer than their multiply-adds say.
        plans = self.blocks()
        return [self._stem_cost(), *map(self._block_cost, plans), self._head_cost(plans[-1])]

    def _stem_cost(self) -> float:
        size = self.img_size if self.stem == "cifar" else halved(self.img_size)
        kernel = 9 if self.stem == "cifar" else 49
        # Nothing is before it, so its input needs no gradient, and nothing is added to what it puts out.
        return (2 / 3 * self.num_channels * kernel + _PER_VALUE[self.bottleneck] / 2) * 64 * size**2

    def _block_cost(self, plan: BlockPlan) -> float:
        pixels_in, pixels_out = plan.size_in**2, plan.size_out**2
        if self.bottleneck:
            convs = [
                (plan.inputs * plan.width, plan.width, pixels_in),
                (9 * plan.width * plan.width, plan.width, pixels_out),
                (plan.width * plan.outputs, plan.outputs, pixels_out),
            ]
        else:
            convs = [
                (9 * plan.inputs * plan.width, plan.width, pixels_out),
                (9 * plan.width * plan.outputs, plan.outputs, pixels_out),
            ]
        if plan.has_shortcut:
            convs.append((plan.inputs * plan.outputs, plan.outputs, pixels_out))
        return float(
            sum(
                weights * (pixels + _PER_WEIGHT[self.bottleneck]) + _PER_VALUE[self.bottleneck] * channels * pixels
                for weights, channels, pixels in convs
            )
        )

    def _head_cost(self, last: BlockPlan) -> float:
        return float(last.outputs * (self.num_classes + _PER_VALUE[self.bottleneck] * last.size_out**2))


def halved(size: int) -> int:
    """The size after a convolution or pooling with stride 2 and the padding used here."""
    return (size + 1) // 2
