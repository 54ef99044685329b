"""What a data source is: samples by index, written straight into the memory that the trainer will read.

Shapes: n = samples of a batch; specs are for one sample, without n.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.data.augmentation import Augmentation
from shoal.data.fields import Fields
from shoal.data.skipped_samples import SkippedSamples
from shoal.errors import ConfigError

Indices = NDArray[np.int64]
Array = NDArray[np.generic]

_SPLIT_SEED = 0x5EED


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One sample's array.

    Attributes:
        dtype: numpy's name, the same as torch's and the wire's: "float32", or for tokens and labels the smallest of
            "uint8", "uint16", "int32" and "int64" that holds them all. Labels that a loss ignores need a sign.
        shape: without the batch dimension; `()` for a scalar.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of one sample."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape)

    def empty(self, num_samples: int) -> Array:
        """Return a new array (num_samples, *shape) whose values are anything."""
        return np.empty((num_samples, *self.shape), dtype=self.dtype)


class Source(ABC):
    """Samples that can be read by index, from any thread, in any order."""

    @property
    @abstractmethod
    def inputs(self) -> ArraySpec:
        """What the first stage gets for one sample."""

    @property
    @abstractmethod
    def labels(self) -> ArraySpec:
        """What the loss gets for one sample."""

    @property
    def context(self) -> Mapping[str, ArraySpec]:
        """What every stage gets for one sample beside what the stage before puts out, by name; none unless said."""
        return {}

    @property
    def fields(self) -> Fields[ArraySpec]:
        """All that there is of one sample."""
        return Fields(self.inputs, self.labels, self.context)

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """Number of samples; indices are 0..num_samples-1."""

    @property
    def in_memory(self) -> bool:
        """Whether reading only copies and computes: nothing is waited for, and nothing is decoded."""
        return False

    def name_of(self, index: int) -> str:
        """Return what a person finds a sample by."""
        return str(index)

    def advise(self, start: int, stop: int, *, is_needed: bool) -> None:  # noqa: B027 - most have nothing to do
        """Take note that samples `start` to `stop` will be read soon, or (`is_needed` false) not for long."""

    @abstractmethod
    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        """Write samples `indices` (n) into the arrays (n, ...) of a batch, of the types and shapes of `fields`."""

    def read_at_once(self, indices: Indices, batch: Fields[Array]) -> bool:
        """As `read_into`, if nothing has to be waited for; return whether that was so. Otherwise the arrays hold
        anything."""
        if self.in_memory:
            self.read_into(indices, batch)
        return self.in_memory

    def read(self, indices: Indices) -> Fields[Array]:
        """Return samples `indices` (n) as new arrays (n, ...)."""
        batch = self.fields.each(lambda spec: spec.empty(len(indices)))
        self.read_into(indices, batch)
        return batch

    def sample(self, index: int) -> Fields[Array]:
        """Return one sample as new arrays, without the batch dimension."""
        return self.read(np.array([index], dtype=np.int64)).each(lambda array: array[0])


class KnownSamples(Source):
    """Samples of which it is known from the start how many there are, and what each is like.

    Args:
        in_memory: See `Source.in_memory`.
    """

    def __init__(self, fields: Fields[ArraySpec], num_samples: int, *, in_memory: bool = False) -> None:
        self._fields = fields
        self._num_samples = num_samples
        self._in_memory = in_memory

    @property
    def inputs(self) -> ArraySpec:
        return self._fields.inputs

    @property
    def labels(self) -> ArraySpec:
        return self._fields.labels

    @property
    def context(self) -> Mapping[str, ArraySpec]:
        return self._fields.context

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def in_memory(self) -> bool:
        return self._in_memory


class Selection(KnownSamples):
    """Some of the samples of another source, under indices of their own."""

    def __init__(self, source: Source, chosen: Indices) -> None:
        """Select the samples `chosen` of `source`, in ascending order; the first of them gets index 0."""
        super().__init__(source.fields, len(chosen), in_memory=source.in_memory)
        self._source = source
        self._chosen = chosen

    def name_of(self, index: int) -> str:
        return self._source.name_of(int(self._chosen[index]))

    def advise(self, start: int, stop: int, *, is_needed: bool) -> None:
        first, last = self._chosen[start], self._chosen[stop - 1]
        self._source.advise(int(first), int(last) + 1, is_needed=is_needed)

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        self._source.read_into(self._chosen[indices], batch)


class Windows(Protocol):
    """What is there of a stream on this host; see `data.stream_windows`."""

    folder: Path

    @property
    def marks(self) -> bytes:
        """Of the stream and of all windows that were read so far (`swarm.window_marks`); empty: nothing was."""
        ...

    def expect(self, marks: bytes) -> None:
        """Have windows compared with those that a run has trained on; `need` and `wait` raise where they differ."""
        ...

    def watch(self, changed: Callable[[], None]) -> None:
        """Have a function called, by a thread, whenever a window has come, or none will come any more."""
        ...

    def has(self, numbers: Iterable[int]) -> bool:
        """Return whether windows are there."""
        ...

    def need(self, numbers: Iterable[int]) -> None:
        """Have windows made, the first ones first, instead of those that were needed before."""
        ...

    def wait(self, numbers: Iterable[int]) -> None:
        """Have windows made, and wait for them."""
        ...

    def forget_below(self, number: int) -> None:
        """Give up the windows before one of them."""
        ...

    def close(self) -> None:
        """Make no more of them."""
        ...


@dataclass(frozen=True, slots=True)
class DataSet:
    """Samples to train on and samples to evaluate on, of the same kind.

    Attributes:
        name: as in `data.dataset_name`.
        holdout: never trained on; at least one sample.
        num_classes: labels are 0..num_classes-1; for text this is the vocabulary.
        skipped: what could not be read so far; None: there is no sample that cannot be read.
        augmentation: what is done to inputs that are trained on, when a batch is prepared; None: nothing.
        shuffle_window: samples of a pass that are shuffled at one time; None: all.
        windows: of a stream, whose pass p is window p: the samples from p * num_samples on; None: it is none, or
            another process has it read.
    """

    name: str
    train: Source
    holdout: Source
    num_classes: int
    skipped: SkippedSamples | None = None
    augmentation: Augmentation | None = None
    shuffle_window: int | None = None
    windows: Windows | None = None

    @property
    def fields(self) -> Fields[ArraySpec]:
        """All that there is of one sample."""
        return self.train.fields


def split(source: Source, holdout_fraction: float, holdout_fold: int = 0) -> tuple[Source, Source]:
    """Return `source` without a share of its samples, and these; which ones depends on nothing but their number.

    They are drawn at random, since many data sets are sorted by class. The shares of different folds have no sample in
    common.

    Raises:
        ConfigError: there are fewer than two samples, or there is no such fold.
    """
    train, holdout = split_indices(source.num_samples, holdout_fraction, holdout_fold)
    return Selection(source, train), Selection(source, holdout)


def split_indices(num_samples: int, holdout_fraction: float, holdout_fold: int = 0) -> tuple[Indices, Indices]:
    """Return which samples are trained on and which are held out, both in ascending order. As `split`."""
    num_holdout = holdout_size(num_samples, holdout_fraction)
    start = round(holdout_fold * num_samples * holdout_fraction)
    stop = start + num_holdout if holdout_fold == 0 else round((holdout_fold + 1) * num_samples * holdout_fraction)
    if not start < stop <= num_samples:
        raise ConfigError(
            f"data.holdout_fold = {holdout_fold}: {num_samples} samples have no such share of data.holdout_fraction = "
            f"{holdout_fraction}; use a lower fold"
        )
    generator = np.random.Philox(_SPLIT_SEED)
    order = np.argsort(generator.random_raw(num_samples), kind="stable").astype(np.int64)
    rest = np.concatenate((order[:start], order[stop:]))
    return np.sort(rest), np.sort(order[start:stop])


def holdout_size(num_samples: int, holdout_fraction: float) -> int:
    """Return how many of `num_samples` are held out: at least one, and at least one remains to train on.

    Raises:
        ConfigError: there are fewer than two samples.
    """
    if num_samples < 2:
        raise ConfigError(
            f"the data set has {num_samples} sample(s): one to train on and one to evaluate on are needed; choose "
            "another data.dataset_name or a shorter data.seq_len"
        )
    return min(num_samples - 1, max(1, round(num_samples * holdout_fraction)))
