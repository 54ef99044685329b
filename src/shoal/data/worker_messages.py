"""What the data server and a data worker, its child (`runtime.child`), say to each other.

    data server -- OpenDataSet --> worker
                <- DataSetOpened -
                ------ Fill ----->
                <---- Filled ----- , and so on

A worker has at most one job at a time. Bytes of batches never travel: both have the pool.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import msgspec

from shoal.data.preparation import Content
from shoal.data.skipped_samples import UnreadableSample
from shoal.data.source import DataSet


class Opening(msgspec.Struct, frozen=True):
    """How another process opens the same data set.

    Attributes:
        entry: "package.module:function", which takes the payload and returns a `DataSet`.
        payload: opaque here; may hold secrets.
    """

    entry: str
    payload: bytes

    def open(self) -> DataSet:
        """Open the data set, in this process.

        Raises:
            ConfigError: it cannot be opened.
        """
        module_name, _, function_name = self.entry.partition(":")
        function = getattr(importlib.import_module(module_name), function_name)
        return cast("Callable[[bytes], DataSet]", function)(self.payload)


class OpenDataSet(msgspec.Struct, frozen=True, tag=True):
    """First message to a worker: the data set, and how places look.

    Attributes:
        max_samples: the most that a place holds.
    """

    opening: Opening
    place_bytes: int
    max_samples: int


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Write these samples into a place.

    Attributes:
        indices: which samples the content has, as int64 in this machine's byte order.
    """

    place: int
    content: Content
    indices: bytes


class DataSetOpened(msgspec.Struct, frozen=True, tag=True):
    """The worker has the data set, and it has this many samples."""

    num_train: int
    num_holdout: int


class Filled(msgspec.Struct, frozen=True, tag=True):
    """The place holds what was ordered.

    Attributes:
        skipped: samples that this worker has met since its last report and cannot read.
    """

    skipped: tuple[UnreadableSample, ...] = ()


Order = OpenDataSet | Fill
Report = DataSetOpened | Filled
