"""Random changes of images that are trained on: crops and mirrored images, drawn from (seed, pass, sample) alone.

So the same position of a run has the same bytes, whoever prepares it and whenever: a data worker, one that takes the
place of a dead one, a data server that was started again, a replay. Draws are numbers of SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014), whose n-th number needs none of those before.

Shapes: n = samples, C = channels, H and W = height and width.
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.config.training import AugmentConfig
from shoal.errors import ConfigError

_GAMMA: Final = np.uint64(0x9E3779B97F4A7C15)
_DRAWS: Final = 3
"""Numbers for each sample: rows, columns, whether it is mirrored."""


class Augmentation:
    """What is done to the images of a run.

    Raises:
        ConfigError: Samples are no images (C, H, W), or the padding is not smaller than they are.
    """

    def __init__(self, augment: AugmentConfig, seed: int, shape: tuple[int, ...], dataset: str) -> None:
        if len(shape) != 3:
            raise ConfigError(
                f"data.augment changes images (channels, height, width), and data.dataset_name = {dataset} has "
                f"samples of {list(shape)}; remove it"
            )
        if augment.crop_padding >= min(shape[1:]):
            raise ConfigError(
                f"data.augment.crop_padding = {augment.crop_padding}: images of data.dataset_name = {dataset} have "
                f"{shape[1]} x {shape[2]} pixels, and their border is a mirror image; use less"
            )
        self._padding = augment.crop_padding
        self._flips = augment.horizontal_flip
        self._seed = seed

    def apply(self, images_nCHW: NDArray[np.generic], indices: NDArray[np.int64], passes: NDArray[np.int64]) -> None:
        """Change images in place.

        Args:
            indices: (n,), which samples they are.
            passes: (n,), the pass of each.
        """
        draws_nD = self._draws(indices, passes)
        rows_nH = _moved(self._shifts(draws_nD[:, 0]), images_nCHW.shape[2])
        columns_nW = _moved(self._shifts(draws_nD[:, 1]), images_nCHW.shape[3])
        if self._flips:
            flipped_n = draws_nD[:, 2] >> np.uint64(63) == 1
            columns_nW[flipped_n] = columns_nW[flipped_n, ::-1]
        # One gather of all is four times slower: it computes the place of each value.
        for image_CHW, rows_H, columns_W in zip(images_nCHW, rows_nH, columns_nW, strict=True):
            image_CHW[...] = image_CHW.take(rows_H, axis=1).take(columns_W, axis=2)

    def _shifts(self, draws_n: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return by how many pixels each image is moved, -padding to padding."""
        return (draws_n % np.uint64(2 * self._padding + 1)).astype(np.int64) - self._padding

    def _draws(self, indices: NDArray[np.int64], passes: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return (n, 3) random numbers."""
        numbers, places = np.unique(passes, return_inverse=True)
        keys_n = np.array([self._key(number) for number in numbers.tolist()], dtype=np.uint64)[places]
        counts_nD = indices.astype(np.uint64)[:, None] * np.uint64(_DRAWS) + np.arange(1, _DRAWS + 1, dtype=np.uint64)
        return _mixed(keys_n[:, None] + counts_nD * _GAMMA)

    def _key(self, pass_number: int) -> int:
        digest = hashlib.blake2b(f"shoal.augment {self._seed} {pass_number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def _mixed(states: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's function from a state to a number."""
    states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return states ^ (states >> np.uint64(31))


def _moved(shifts_n: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return which pixels (n, size) a moved line of so many has, beyond whose ends its mirror image is."""
    places = shifts_n[:, None] + np.arange(size, dtype=np.int64)
    return size - 1 - np.abs(size - 1 - np.abs(places))
