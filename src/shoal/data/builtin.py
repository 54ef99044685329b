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

from shoal.config.training import DataConfig
from shoal.data.images import GreyImages
from shoal.data.source import DataSet, split
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
