"""Images that a trained generator makes, as one picture: a column for each class, a row for each sample."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import ConfigError
from shoal.model.biggan import BigganUnit
from shoal.model.stage import StageModule

_GAP = 2
"""Pixels between images."""


@torch.no_grad()
def image_grid(model: StageModule, classes: range, num_rows: int, seed: int, scale: int) -> NDArray[np.uint8]:
    """Make images of some classes.

    Args:
        model: In one piece, in eval mode.
        classes: One for each column.
        seed: Equal seeds and numbers of images give equal images; each row has a noise of its own, which all its
            classes share.
        scale: Each pixel is drawn as a square of so many.

    Returns:
        A picture, (height, width) of grey ones, (height, width, 3) of coloured ones.

    Raises:
        ConfigError: The model makes no images, or has no such classes.
    """
    unit = next(iter(model.units.values()))
    if not isinstance(unit, BigganUnit):
        raise ConfigError("this model makes no images; those of model.family = biggan do")
    num_classes = model.output_spec.shape[0] - 2
    if not classes or classes.start < 0 or classes.stop > num_classes or classes.step != 1:
        raise ConfigError(f"classes {classes.start} to {classes.stop - 1}: the model knows 0 to {num_classes - 1}")
    like = next(unit.parameters())
    latent, _ = unit.drawn(num_rows, seed, like)
    rows = [
        [unit.generator(latent[i : i + 1], torch.tensor([c], device=like.device)) for c in classes]
        for i in range(num_rows)
    ]
    values_RKCHW = torch.stack([torch.cat(row) for row in rows]).float().cpu().numpy()
    pixels = np.clip(np.rint((values_RKCHW + 1) * 127.5), 0, 255).astype(np.uint8)
    pixels = pixels.repeat(scale, axis=3).repeat(scale, axis=4)
    padded = np.pad(pixels, ((0, 0), (0, 0), (0, 0), (_GAP, 0), (_GAP, 0)), constant_values=127)
    picture = padded.transpose(0, 3, 1, 4, 2).reshape(num_rows * padded.shape[3], len(classes) * padded.shape[4], -1)
    return picture[..., 0] if picture.shape[2] == 1 else picture
