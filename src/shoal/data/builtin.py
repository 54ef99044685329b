"""Real data that needs no download: English text that every CPython carries, and the digits shipped with shoal.

"pydoc-topics" is the help text of the installed Python; it differs a little between Python versions, so hosts of one
run need the same one to see the same samples. "digits" is described in `files/NOTICE.md`.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping
from importlib import resources
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.config.training import DataConfig
from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec, DataSet, Indices, KnownSamples, split
from shoal.data.text import text_dataset
from shoal.errors import ConfigError

_DIGITS_SIDE = 8
_DIGITS_MAX_PIXEL = 16
_DIGITS_CLASSES = 10


def open_pydoc_topics(data: DataConfig) -> DataSet:
    """Open the topics of Python's `help()`, joined in the order of their names, as byte-level text.

    Raises:
        ConfigError: the task is not text, or `data.seq_len` is too long.
    """
    _require_task(data, "llm")
    text = "".join(pydoc_topics()).encode()
    return text_dataset(data.dataset_name, text, data.seq_len, data.holdout_fraction)


def pydoc_topics() -> list[str]:
    """Return the topics in the order of their names."""
    from pydoc_data.topics import topics  # half a megabyte that only this data set needs

    return [topics[name] for name in sorted(topics)]


def open_digits(data: DataConfig) -> DataSet:
    """Open the 1,797 handwritten digits as images of `data.img_size` and `data.num_channels`.

    Raises:
        ConfigError: the task is not about images, or a split is to be evaluated on.
    """
    _require_task(data, "cv", "image_gen")
    if data.eval_split is not None:
        raise ConfigError(
            f"data.eval_split = {data.eval_split}: {data.dataset_name} has no splits; leave it out, "
            "data.holdout_fraction is evaluated on"
        )
    packed = resources.files("shoal.data").joinpath("files", "digits.csv.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    table = np.array([line.split(",") for line in lines], dtype=np.float64).astype(np.uint8)
    source = GreyImages(
        table[:, :-1].reshape(-1, _DIGITS_SIDE, _DIGITS_SIDE),
        table[:, -1].astype(np.int64),
        img_size=data.img_size,
        num_channels=data.num_channels,
        max_pixel=_DIGITS_MAX_PIXEL,
        # What makes images puts out values from -1 to 1.
        moments=(0.5, 0.5) if data.task_type == "image_gen" else None,
    )
    train, holdout = split(source, data.holdout_fraction, data.holdout_fold)
    return DataSet(data.dataset_name, train, holdout, num_classes=_DIGITS_CLASSES)


class GreyImages(KnownSamples):
    """Square grey images (n, h, w) in memory. When read, one is enlarged by repeating pixels and centred on background.

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


BUILTINS: Final[Mapping[str, Callable[[DataConfig], DataSet]]] = MappingProxyType(
    {"pydoc-topics": open_pydoc_topics, "digits": open_digits}
)
"""The names of data sets that need no network, and how to open them."""

TEXTS: Final[Mapping[str, Callable[[], list[str]]]] = MappingProxyType({"pydoc-topics": pydoc_topics})
"""The documents of those that are text."""


def _require_task(data: DataConfig, *tasks: str) -> None:
    if data.task_type not in tasks:
        raise ConfigError(
            f"data.dataset_name = {data.dataset_name} is for data.task_type = {' or '.join(tasks)}, not "
            f"{data.task_type}; "
            "change one of them"
        )
