"""BigGAN: a generator that makes images of noise and a class, and a discriminator that tells them from real ones.

Both are one unit, since each trains by the other, and both train in the one backward of a step:

    noise, class -> generator --image--+--detached--> discriminator            -> "made"    discriminator's loss
                                       |        real images --^                -> "real"    discriminator's loss
                                       '------------> discriminator, constant  -> "made"    generator's loss

So the generator's gradient comes from its own loss alone, and the discriminator's from its own; each may have an
optimizer of its own by `diloco.inner_optim.groups`. Noise and classes are drawn as dropout is: in training from the
seed of the step's microbatch, in evaluation the same for the same real image.

Source: Brock et al. (arXiv 1809.11096): hinge loss (arXiv 1705.02894), spectral norms (1802.05957), norms by class, a
discriminator by projection (1802.05637), self-attention (1805.08318).

Shapes: B samples, C channels, S image side, H height, W width, K classes, L latent numbers, Y condition of a norm, F
features of an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from shoal.model.biggan_shape import BOTTOM, BigganSizes, GanBlock, Init
from shoal.model.device_calls import wide
from shoal.model.resnet import BatchNorm
from shoal.model.stage import Family, TensorSpec

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig

_EVALUATION_SEED = 0
_NUM_EVALUATED = 4093
"""Different noises with which real images are evaluated: a prime, since the last bits of many pixels are zeros."""


class SpectralNorm(nn.Module):
    """A weight over its largest singular value (arXiv 1802.05957), by one step of the power iteration a forward.

    The first dimension of the weight is one side of the matrix, all others together are the other one. The left
    singular vector is a buffer, which training moves.
    """

    u: Tensor

    def __init__(self, num_rows: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.register_buffer("u", torch.randn(num_rows))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            rows = weight.flatten(1)
            with torch.no_grad():
                v = F.normalize(self.u @ rows, dim=0, eps=self._eps)
                u = F.normalize(rows @ v, dim=0, eps=self._eps)
                if self.training:
                    self.u.copy_(u)
            return weight / torch.dot(u, rows @ v)


class SpectralConv(nn.Conv2d):
    """A convolution that keeps height and width."""

    def __init__(self, inputs: int, outputs: int, kernel: int, eps: float, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, kernel, padding=kernel // 2, bias=bias)  # pyright: ignore[reportUnknownMemberType]
        self.spectral = SpectralNorm(outputs, eps)

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(input, self.spectral(self.weight), self.bias, padding=self.padding)


class SpectralLinear(nn.Linear):
    """A linear layer."""

    def __init__(self, inputs: int, outputs: int, eps: float, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias)  # pyright: ignore[reportUnknownMemberType]
        self.spectral = SpectralNorm(outputs, eps)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.spectral(self.weight), self.bias)


class ConditionalNorm(nn.Module):
    """Batch norm whose gain and bias follow from a condition: (B, C, H, W), (B, Y) -> (B, C, H, W)."""

    def __init__(self, num_channels: int, sizes: BigganSizes) -> None:
        super().__init__()
        eps = sizes.shape.spectral_eps
        self.gain = SpectralLinear(sizes.condition_size, num_channels, eps, bias=False)
        self.bias = SpectralLinear(sizes.condition_size, num_channels, eps, bias=False)
        self.norm = BatchNorm(num_channels, eps=sizes.shape.norm_eps, affine=False)

    def forward(self, x: Tensor, condition_BY: Tensor) -> Tensor:
        gain, bias = self.gain(condition_BY)[..., None, None], self.bias(condition_BY)[..., None, None]
        return self.norm(x) * (1 + gain) + bias


class SelfAttention(nn.Module):
    """Each place of an image takes from all others, half as dense (arXiv 1805.08318)."""

    def __init__(self, num_channels: int, eps: float) -> None:
        super().__init__()
        narrow = max(1, num_channels // 8)
        self.query = SpectralConv(num_channels, narrow, 1, eps, bias=False)
        self.key = SpectralConv(num_channels, narrow, 1, eps, bias=False)
        self.value = SpectralConv(num_channels, max(1, num_channels // 2), 1, eps, bias=False)
        self.output = SpectralConv(max(1, num_channels // 2), num_channels, 1, eps, bias=False)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).flatten(2)
        key = F.max_pool2d(self.key(x), 2).flatten(2)
        value = F.max_pool2d(self.value(x), 2).flatten(2)
        weights = F.softmax(query.transpose(1, 2) @ key, dim=-1)
        taken = value @ weights.transpose(1, 2)
        return x + self.gain * self.output(taken.reshape(*taken.shape[:2], *x.shape[2:]))


class GeneratorBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut, at twice the size: (B, C, H, W), (B, Y) -> (B, C', 2H, 2W)."""

    def __init__(self, plan: GanBlock, sizes: BigganSizes) -> None:
        super().__init__()
        eps = sizes.shape.spectral_eps
        self.norm1 = ConditionalNorm(plan.inputs, sizes)
        self.conv1 = SpectralConv(plan.inputs, plan.outputs, 3, eps)
        self.norm2 = ConditionalNorm(plan.outputs, sizes)
        self.conv2 = SpectralConv(plan.outputs, plan.outputs, 3, eps)
        self.shortcut = SpectralConv(plan.inputs, plan.outputs, 1, eps)
        self.attention = SelfAttention(plan.outputs, eps) if plan.has_attention else nn.Identity()

    def forward(self, x: Tensor, condition_BY: Tensor) -> Tensor:
        out = self.conv1(_doubled(F.relu(self.norm1(x, condition_BY))))
        out = self.conv2(F.relu(self.norm2(out, condition_BY)))
        return self.attention(out + self.shortcut(_doubled(x)))


class Generator(nn.Module):
    """Makes images of noise: (B, L), (B) -> (B, C, S, S), values from -1 to 1."""

    def __init__(self, sizes: BigganSizes) -> None:
        super().__init__()
        eps, plans = sizes.shape.spectral_eps, sizes.generator_blocks()
        self._num_slots = sizes.num_slots
        self._is_hierarchical = sizes.shape.hierarchical
        self.classes = nn.Embedding(sizes.num_classes, sizes.shared_size)
        self.linear = SpectralLinear(sizes.slot_size, plans[0].inputs * BOTTOM**2, eps)
        self.blocks = nn.ModuleList(GeneratorBlock(plan, sizes) for plan in plans)
        self.norm = BatchNorm(plans[-1].outputs, eps=sizes.shape.norm_eps)
        self.conv = SpectralConv(plans[-1].outputs, sizes.num_channels, 3, eps)
        _initialise(self, sizes.shape.generator_init)

    def forward(self, latent_BL: Tensor, classes_B: Tensor) -> Tensor:
        shared = self.classes(classes_B)
        first, *others = latent_BL.chunk(self._num_slots, dim=1)
        x = self.linear(first).reshape(len(first), -1, BOTTOM, BOTTOM)
        for index, block in enumerate(self.blocks):
            x = block(x, torch.cat([shared, others[index]], dim=1) if self._is_hierarchical else shared)
        return torch.tanh(self.conv(F.relu(self.norm(x))))


class DiscriminatorBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut: (B, C, H, W) -> (B, C', H', W')."""

    def __init__(self, plan: GanBlock, sizes: BigganSizes, *, is_first: bool) -> None:
        super().__init__()
        eps = sizes.shape.spectral_eps
        width = plan.outputs if sizes.shape.wide else plan.inputs
        self._is_first = is_first
        self._is_halved = plan.is_resampled
        self.conv1 = SpectralConv(plan.inputs, width, 3, eps)
        self.conv2 = SpectralConv(width, plan.outputs, 3, eps)
        has_shortcut = plan.is_resampled or plan.inputs != plan.outputs
        self.shortcut = SpectralConv(plan.inputs, plan.outputs, 1, eps) if has_shortcut else nn.Identity()
        self.attention = SelfAttention(plan.outputs, eps) if plan.has_attention else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        # An image is no feature map: it is not cut off at zero.
        out = self.conv2(F.relu(self.conv1(x if self._is_first else F.relu(x))))
        # Of an image the shortcut is cheaper, and the same, behind the pooling.
        shortcut = self.shortcut(self._pooled(x)) if self._is_first else self._pooled(self.shortcut(x))
        return self.attention(self._pooled(out) + shortcut)

    def _pooled(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 2) if self._is_halved else x


class Discriminator(nn.Module):
    """Says how real images are, as images of each class: (B, C, S, S) -> (B, K)."""

    def __init__(self, sizes: BigganSizes) -> None:
        super().__init__()
        eps, plans = sizes.shape.spectral_eps, sizes.discriminator_blocks()
        self.blocks = nn.Sequential(
            *(DiscriminatorBlock(plan, sizes, is_first=not index) for index, plan in enumerate(plans))
        )
        self.linear = SpectralLinear(plans[-1].outputs, 1, eps)
        # What a projection discriminator has as an embedding of classes: here all of them are asked at once.
        self.classes = SpectralLinear(plans[-1].outputs, sizes.num_classes, eps, bias=False)
        _initialise(self, sizes.shape.discriminator_init)

    def forward(self, images: Tensor) -> Tensor:
        features_BF = F.relu(self.blocks(images)).sum(dim=(2, 3))
        return self.linear(features_BF) + self.classes(features_BF)


class BigganUnit(nn.Module):
    """Both players: real images (B, C, S, S) -> (B, K + 2), see `Scores`."""

    def __init__(self, sizes: BigganSizes) -> None:
        super().__init__()
        self._num_classes = sizes.num_classes
        self._latent_size = sizes.latent_size
        self.generator = Generator(sizes)
        self.discriminator = Discriminator(sizes)

    def forward(self, real: Tensor) -> Tensor:
        latent_BL, classes_B = self.drawn(len(real), None, real) if self.training else self._drawn_beside(real)
        made = self.generator(latent_BL, classes_B)
        judged = self.discriminator(torch.cat([made.detach(), real]))
        constants = {name: parameter.detach() for name, parameter in self.discriminator.named_parameters()}
        for_generator: Tensor = functional_call(self.discriminator, constants, (made,))
        of_class_B1 = classes_B[:, None]
        return torch.cat(
            [judged[len(real) :], judged[: len(real)].gather(1, of_class_B1), for_generator.gather(1, of_class_B1)], 1
        )

    def _drawn_beside(self, real: Tensor) -> tuple[Tensor, Tensor]:
        """Choose noise and classes by the real images, so that a mean over these does not depend on how they are cut
        into batches."""
        latent, classes = self.drawn(_NUM_EVALUATED, _EVALUATION_SEED, real)
        chosen_B = real.float().flatten(1).view(torch.int32).sum(1) % _NUM_EVALUATED
        return latent[chosen_B], classes[chosen_B]

    def drawn(self, num: int, seed: int | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Draw noise (B, L) and classes (B).

        Args:
            num: B.
            seed: Of what is drawn; None: torch's global generator, which has the seed of the step's microbatch.
            like: Has the type of the noise, and the device of both.
        """
        if seed is None:
            latent = torch.randn(num, self._latent_size, device=like.device, dtype=like.dtype)
            return latent, torch.randint(self._num_classes, (num,), device=like.device)
        generator = torch.Generator().manual_seed(seed)
        latent = torch.randn(num, self._latent_size, generator=generator)
        classes = torch.randint(self._num_classes, (num,), generator=generator)
        return latent.to(like), classes.to(like.device)


class Scores(NamedTuple):
    """What the discriminator says: high where it takes an image for a real one.

    Attributes:
        real: Of real images, as ones of their classes (B).
        made: Of images that the generator has made (B), for the discriminator's loss.
        for_generator: Of the same images (B), for the generator's loss.
    """

    real: Tensor
    made: Tensor
    for_generator: Tensor

    @classmethod
    def of(cls, output: Tensor, labels: Tensor) -> Self:
        """Take them from what the unit puts out (B, K + 2), and the classes of the real images (B)."""
        output = output if output.dtype == torch.float64 else output.float()
        return cls(output[:, :-2].gather(1, labels[:, None])[:, 0], output[:, -2], output[:, -1])

    @property
    def loss_of_discriminator(self) -> Tensor:
        return F.relu(1 - self.real).mean() + F.relu(1 + self.made).mean()

    @property
    def loss_of_generator(self) -> Tensor:
        return -self.for_generator.mean()

    @property
    def accuracy(self) -> Tensor:
        """The share of images, real and made, that the discriminator takes for what they are."""
        return wide(torch.cat([self.real > 0, self.made <= 0])).mean()


class BigganFamily(Family):
    """`model.family: biggan`: one unit, and so one stage. Its loss is the sum of both players' losses."""

    def __init__(self, sizes: BigganSizes) -> None:
        self.sizes = sizes

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> Self:
        return cls(BigganSizes.from_config(model, data))

    @property
    def num_units(self) -> int:
        return 1

    def unit_name(self, index: int) -> str:
        return "gan"

    def build_unit(self, index: int) -> nn.Module:
        return BigganUnit(self.sizes)

    def input_spec(self) -> TensorSpec:
        return TensorSpec("float32", (self.sizes.num_channels, self.sizes.img_size, self.sizes.img_size))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("int64", ())

    def boundary_spec(self, index: int) -> TensorSpec:
        return TensorSpec("float32", (self.sizes.num_classes + 2,))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """The discriminator's hinge loss and the generator's, each a mean over the microbatch."""
        scores = Scores.of(output, labels)
        return scores.loss_of_discriminator + scores.loss_of_generator

    def figures(self, output: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        scores = Scores.of(output, labels)
        return {
            "loss/discriminator": scores.loss_of_discriminator,
            "loss/generator": scores.loss_of_generator,
            "accuracy/discriminator": scores.accuracy,
        }

    def activation_bytes(self, index: int) -> int:
        return self.sizes.activation_bytes

    def unit_costs(self) -> list[float]:
        return [1.0]


def _doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2)


def _initialise(module: nn.Module, init: Init) -> None:
    fill = {"orthogonal": nn.init.orthogonal_, "xavier": nn.init.xavier_uniform_, "normal": _normal}[init]
    for each in module.modules():
        if isinstance(each, nn.Conv2d | nn.Linear | nn.Embedding):
            fill(each.weight)


def _normal(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, std=0.02)
