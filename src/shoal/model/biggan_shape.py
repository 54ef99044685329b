"""The sizes of a BigGAN, as `model.extra` says them. No torch: the launcher reads them as well.

Source: Brock et al. (arXiv 1809.11096), appendix B; the models for 32 pixels as in its authors' PyTorch code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from pydantic import Field, ValidationError

from shoal.config.base import PositiveFloat, PositiveInt, Section
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config.model import ModelConfig
    from shoal.config.training import DataConfig

Init = Literal["normal", "orthogonal", "xavier"]

BOTTOM: Final = 4
"""Height and width of what the generator begins from."""

_GENERATORS: Final[dict[int, tuple[int, ...]]] = {
    8: (4, 4),
    16: (4, 4, 4),
    32: (4, 4, 4, 4),
    64: (16, 16, 8, 4, 2),
    128: (16, 16, 8, 4, 2, 1),
    256: (16, 16, 8, 8, 4, 2, 1),
}
"""By the size of images: channels over `generator_channels` before the first block and after each."""
_DISCRIMINATORS: Final[dict[int, tuple[int, ...]]] = {
    8: (4, 4),
    16: (4, 4, 4),
    32: (4, 4, 4, 4),
    64: (1, 2, 4, 8, 16),
    128: (1, 2, 4, 8, 16, 16),
    256: (1, 2, 4, 8, 8, 16, 16),
}
"""The same after each block, over `discriminator_channels`."""
_HALVED_SMALL: Final = 2
"""Of images of at most 32 pixels at most so many blocks of the discriminator halve the size; of larger ones all but the
last block."""


class GanBlock(NamedTuple):
    """One residual block. `size`: height and width of what it puts out."""

    inputs: int
    outputs: int
    size: int
    is_resampled: bool
    has_attention: bool


class BigganShape(Section):
    """`model.extra` of the family biggan."""

    generator_channels: PositiveInt = Field(default=64, description="Narrowest width of the generator.")
    discriminator_channels: PositiveInt = Field(default=64, description="Narrowest width of the discriminator.")
    latent_size: PositiveInt = Field(default=128, description="Random numbers that an image is made of.")
    shared_size: PositiveInt | None = Field(default=None, description="Of a class in the generator; null: latent_size.")
    hierarchical: bool = Field(default=True, description="Each block of the generator gets a part of the latent.")
    wide: bool = Field(default=True, description="Blocks of the discriminator widen in their first convolution.")
    generator_attention: tuple[PositiveInt, ...] = Field(default=(), description="Sizes at which it attends to itself.")
    discriminator_attention: tuple[PositiveInt, ...] = Field(default=(), description="The same of the discriminator.")
    generator_init: Init = Field(default="orthogonal", description='"normal" has a deviation of 0.02.')
    discriminator_init: Init = Field(default="orthogonal", description="The same of the discriminator.")
    norm_eps: PositiveFloat = Field(default=1e-5, description="Added to the variance in batch norms.")
    spectral_eps: PositiveFloat = Field(default=1e-12, description="Least norm in the power iteration.")


class BigganSizes(NamedTuple):
    """The sizes of a model: what `model.extra` says, and the images and classes."""

    shape: BigganShape
    num_channels: int
    img_size: int
    num_classes: int

    @classmethod
    def from_config(cls, model: ModelConfig, data: DataConfig) -> BigganSizes:
        """Read the sizes.

        Raises:
            ConfigError: `model.extra` has other keys or values, or there is no such model for images of this size.
        """
        try:
            shape = BigganShape.model_validate(model.extra)
        except ValidationError as error:
            known = ", ".join(BigganShape.model_fields)
            problems = [f"model.extra.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ConfigError("\n".join([*problems, f"model.extra of model.family = biggan has {known}"])) from None
        if data.img_size not in _GENERATORS:
            raise ConfigError(
                f"data.img_size = {data.img_size}: model.family = biggan makes images of "
                f"{', '.join(map(str, _GENERATORS))} pixels; choose one of these"
            )
        found = cls(shape, data.num_channels, data.img_size, model.num_classes)
        if not found.slot_size:
            raise ConfigError(
                f"model.extra.latent_size = {shape.latent_size} is less than {found.num_slots}, one number for the "
                "first layer and for each block of the generator; raise it, or set hierarchical to false"
            )
        return found

    @property
    def shared_size(self) -> int:
        """Width of a class in the generator."""
        return self.shape.shared_size or self.shape.latent_size

    @property
    def num_slots(self) -> int:
        """Parts of the latent: for the first layer, and for each block if it is hierarchical."""
        return len(_GENERATORS[self.img_size]) if self.shape.hierarchical else 1

    @property
    def slot_size(self) -> int:
        """Numbers in each part."""
        return self.shape.latent_size // self.num_slots

    @property
    def latent_size(self) -> int:
        """Numbers of all parts: at most those that are asked for."""
        return self.num_slots * self.slot_size

    @property
    def condition_size(self) -> int:
        """What decides a block's norms: its class and its part of the latent."""
        return self.shared_size + (self.slot_size if self.shape.hierarchical else 0)

    def generator_blocks(self) -> list[GanBlock]:
        """Each doubles the size."""
        widths = [self.shape.generator_channels * each for each in _GENERATORS[self.img_size]]
        sizes = [BOTTOM << (index + 1) for index in range(len(widths) - 1)]
        return [
            GanBlock(inputs, outputs, size, True, size in self.shape.generator_attention)
            for inputs, outputs, size in zip(widths[:-1], widths[1:], sizes, strict=True)
        ]

    def discriminator_blocks(self) -> list[GanBlock]:
        """Most halve the size."""
        widths = [self.shape.discriminator_channels * each for each in _DISCRIMINATORS[self.img_size]]
        num_halved = min(len(widths) - 1, _HALVED_SMALL) if self.img_size <= 32 else len(widths) - 1
        plans: list[GanBlock] = []
        size, inputs = self.img_size, self.num_channels
        for index, outputs in enumerate(widths):
            is_halved = index < num_halved
            size //= 1 + is_halved
            plans.append(GanBlock(inputs, outputs, size, is_halved, size in self.shape.discriminator_attention))
            inputs = outputs
        return plans

    @property
    def activation_bytes(self) -> int:
        """About what one sample keeps: an image that is made, and the discriminator over it twice and a real one."""
        # Of a block each convolution's input before and after its norm and activation, at the larger size.
        made = sum((4 * plan.inputs + 3 * plan.outputs) * plan.size**2 for plan in self.generator_blocks())
        judged = 0
        for plan in self.discriminator_blocks():
            pixels = (plan.size * (1 + plan.is_resampled)) ** 2
            judged += (2 * plan.inputs + 4 * plan.outputs) * pixels
        attended = [p for p in (*self.generator_blocks(), *self.discriminator_blocks()) if p.has_attention]
        # The map of what attends to what, before and after its softmax.
        maps = sum(2 * plan.size**4 // 4 for plan in attended)
        return 4 * (made + 3 * (judged + maps))
