"""ResNet-18, -50 and -101 with the stem for small images (CIFAR) or for large ones (ImageNet).

Source: He et al. (arXiv 1512.03385), with the stride of a bottleneck in its 3x3 convolution as everybody has it
since. Kernels are initialised normal with fan-out (arXiv 1502.01852).

Shapes: B samples, C channels, H height, W width, K classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from torch import Tensor, nn
from torch.nn import functional as F

from shoal.model.layered import LayeredFamily
from shoal.model.resnet_shape import BlockPlan, ResNetShape, Stem, halved
from shoal.model.stage import TensorSpec

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig


class BatchNorm(nn.BatchNorm2d):
    """Batch normalisation that also takes a microbatch with one value a channel.

    The last batch of a pass may hold one sample, and a late feature map one pixel: such a batch has no variance, so
    it is normalised with the running statistics, which stay as they are.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.numel() == input.shape[1]:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        return super().forward(input)


class StemUnit(nn.Module):
    """(B, C, H, W) -> (B, 64, H', W')."""

    def __init__(self, num_channels: int, stem: Stem) -> None:
        super().__init__()
        imagenet = stem == "imagenet"
        self.conv = _conv(num_channels, 64, 7 if imagenet else 3, 2 if imagenet else 1)
        self.norm = BatchNorm(64)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if imagenet else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(F.relu(self.norm(self.conv(x)), inplace=True))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, plan: BlockPlan) -> None:
        super().__init__()
        self.conv1 = _conv(plan.inputs, plan.width, 3, plan.stride)
        self.norm1 = BatchNorm(plan.width)
        self.conv2 = _conv(plan.width, plan.outputs, 3, 1)
        self.norm2 = BatchNorm(plan.outputs)
        self.shortcut = _shortcut(plan)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = self.norm2(self.conv2(out))
        return F.relu(out + self.shortcut(x), inplace=True)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut."""

    def __init__(self, plan: BlockPlan) -> None:
        super().__init__()
        self.conv1 = _conv(plan.inputs, plan.width, 1, 1)
        self.norm1 = BatchNorm(plan.width)
        self.conv2 = _conv(plan.width, plan.width, 3, plan.stride)
        self.norm2 = BatchNorm(plan.width)
        self.conv3 = _conv(plan.width, plan.outputs, 1, 1)
        self.norm3 = BatchNorm(plan.outputs)
        self.shortcut = _shortcut(plan)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = F.relu(self.norm2(self.conv2(out)), inplace=True)
        out = self.norm3(self.conv3(out))
        return F.relu(out + self.shortcut(x), inplace=True)


class HeadUnit(nn.Module):
    """Mean over the pixels, then logits: (B, C, H, W) -> (B, K)."""

    def __init__(self, inputs: int, num_classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x.mean(dim=(2, 3)))


class ResNetFamily(LayeredFamily):
    """`model.family: resnet18`, `resnet50`, `resnet101`. Units: the stem, each residual block, the head."""

    first_units = ("stem",)

    def __init__(self, shape: ResNetShape) -> None:
        self.shape = shape
        self._stem_size = shape.stem_size
        self._blocks = shape.blocks()

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        return cls(ResNetShape.from_config(model, data))

    @property
    def num_units(self) -> int:
        return len(self._blocks) + 2

    def build_unit(self, index: int) -> nn.Module:
        if index == 0:
            return StemUnit(self.shape.num_channels, self.shape.stem)
        if index == self.num_units - 1:
            return HeadUnit(self._blocks[-1].outputs, self.shape.num_classes)
        plan = self._blocks[index - 1]
        return Bottleneck(plan) if self.shape.bottleneck else BasicBlock(plan)

    def input_spec(self) -> TensorSpec:
        return TensorSpec("float32", (self.shape.num_channels, self.shape.img_size, self.shape.img_size))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("int64", ())

    def boundary_spec(self, index: int) -> TensorSpec:
        if index == 0:
            return TensorSpec("float32", (64, self._stem_size, self._stem_size))
        if index == self.num_units - 1:
            return TensorSpec("float32", (self.shape.num_classes,))
        plan = self._blocks[index - 1]
        return TensorSpec("float32", (plan.outputs, plan.size_out, plan.size_out))

    def activation_bytes(self, index: int) -> int:
        # Of each convolution what it puts out and what follows its norm, but the last one's, which the block's output
        # follows; the shortcut's convolution; the larger image before the pooling of the imagenet stem.
        if index == 0:
            pixels = self._stem_size**2
            larger = 2 * halved(self.shape.img_size) ** 2
            return 4 * 64 * (2 * pixels if self.shape.stem == "cifar" else larger + 3 * pixels)
        if index == self.num_units - 1:
            return 4 * (self._blocks[-1].outputs + 2 * self.shape.num_classes)
        plan = self._blocks[index - 1]
        pixels_in, pixels_out = plan.size_in**2, plan.size_out**2
        inner = 2 * plan.width * (pixels_in + pixels_out if self.shape.bottleneck else pixels_out)
        return 4 * (inner + (2 + plan.has_shortcut) * plan.outputs * pixels_out)

    def unit_costs(self) -> list[float]:
        return self.shape.unit_costs()


def _conv(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Conv2d:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _shortcut(plan: BlockPlan) -> nn.Module:
    if not plan.has_shortcut:
        return nn.Identity()
    return nn.Sequential(_conv(plan.inputs, plan.outputs, 1, plan.stride), BatchNorm(plan.outputs))
