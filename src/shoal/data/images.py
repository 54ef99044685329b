"""Images held in memory as small integers; each is resized and scaled when it is read.

Shapes: n = samples, C = channels, H and W = height and width in the model, h and w in the source.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec, Indices, KnownSamples


class GreyImages(KnownSamples):
    """Square grey images (n, h, w), enlarged by repeating pixels and centred on background.

    An image that is larger than the model's is reduced by taking the nearest pixels. Values become
    `(pixel / max_pixel - mean) / std`, the same in every channel. Inputs are (C, H, W) float32, labels classes, int64.
    """

    def __init__(
        self,
        pixels_nhw: NDArray[np.uint8],
        classes_n: NDArray[np.int64],
        *,
        img_size: int,
        num_channels: int,
        max_pixel: int,
        moments: tuple[float, float] | None = None,
    ) -> None:
        """Keep the images.

        Args:
            moments: Mean and standard deviation; None: those of all images at their own size.
        """
        fields = Fields(ArraySpec("float32", (num_channels, img_size, img_size)), ArraySpec("int64", ()))
        super().__init__(fields, len(pixels_nhw), in_memory=True)
        self._pixels_nhw = pixels_nhw
        self._classes_n = classes_n
        self._size = img_size
        self._max_pixel = max_pixel
        scaled = pixels_nhw.astype(np.float64) / max_pixel
        self._mean, self._std = moments or (float(scaled.mean()), float(scaled.std()))

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        resized_nHW = resize_nearest(self._pixels_nhw[indices], self._size)
        values_nHW = ((resized_nHW / self._max_pixel - self._mean) / self._std).astype(np.float32)
        batch.inputs[...] = values_nHW[:, None]
        batch.labels[...] = self._classes_n[indices]


def resize_nearest(pixels_nhw: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Return square images (n, size, size): whole repeats of the pixels, zeros around; or fewer pixels."""
    h = pixels_nhw.shape[1]
    if size < h:
        kept = (np.arange(size) * h) // size
        return pixels_nhw[:, kept][:, :, kept]
    repeats = size // h
    enlarged = pixels_nhw.repeat(repeats, axis=1).repeat(repeats, axis=2)
    before = (size - h * repeats) // 2
    after = size - h * repeats - before
    return np.pad(enlarged, ((0, 0), (before, after), (before, after)))
