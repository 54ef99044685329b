"""Samples that are checked as they are read: in place of one that cannot be read stands the next one that can.

read -> the samples of a batch at once -> labels in range? -> done
    '-> something is raised -> each sample alone; in place of one that raises, the next of the same split that does not

A sample that cannot be read is found when it is its turn: opening a data set does not read all of it. So it stays in
the order of the passes, which follow from the number of samples alone, and batches keep their sizes. What stands in its
place follows from the data alone: whoever prepares the batch, now or in a replay, writes the same bytes. A held-out
sample never stands in for one that is trained on.

Nothing stands in for a sample that the system does not give (`passing_errors`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from shoal.clock import Clock
from shoal.config.own_class import raised
from shoal.config.training import DataConfig
from shoal.data.fields import Fields
from shoal.data.passing_errors import read_patiently
from shoal.data.skipped_samples import SkippedSamples, UnreadableSample
from shoal.data.source import Array, DataSet, Indices, KnownSamples, Source
from shoal.data.targets import require_labels
from shoal.errors import BadSamples, ShoalError, UnreadableAudio
from shoal.events.base import Event


class CheckedSamples(KnownSamples):
    """The samples of one split of a data set.

    Args:
        kind: What one of them is called, for people.
        skipped: Told of those that cannot be read.
        num_classes: Labels are 0..num_classes-1; where a sample has several, also what a loss ignores.
        clock: Says how long to wait before a sample is read again that the system did not give.
    """

    def __init__(
        self,
        source: Source,
        kind: str,
        skipped: SkippedSamples,
        dataset: str,
        num_classes: int,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(source.fields, source.num_samples, in_memory=source.in_memory)
        self._source = source
        self._kind = kind
        self._skipped = skipped
        self._dataset = dataset
        self._num_classes = num_classes
        self._clock = clock
        self._has_classes = np.issubdtype(source.labels.dtype, np.integer)
        # By index, what stands in the place of a sample that cannot be read.
        self._instead: dict[int, int] = {}

    def name_of(self, index: int) -> str:
        return self._source.name_of(index)

    def advise(self, start: int, stop: int, *, is_needed: bool) -> None:
        self._source.advise(start, stop, is_needed=is_needed)

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        """See `Source.read_into`.

        Raises:
            BadSamples: Too many samples cannot be read, or one is not as it should be.
            StorageError: The system does not give one.
        """
        found = self._readable(indices)
        if _raised_by(lambda: self._source.read_into(found, batch)) is not None:
            found = np.array([self._read_one(batch, *each) for each in enumerate(indices.tolist())], dtype=np.int64)
        if self._has_classes:
            self._check_labels(found, cast("NDArray[np.integer[Any]]", batch.labels))

    def _readable(self, indices: Indices) -> Indices:
        """Return what is read for samples `indices` (n), as far as is known."""
        if not self._instead:
            return indices
        return np.array([self._instead.get(index, index) for index in indices.tolist()], dtype=np.int64)

    def _read_one(self, batch: Fields[Array], place: int, index: int) -> int:
        """Write one sample, or what stands in its place, into a place of the batch; return which that is."""
        sample = batch.each(lambda array: array[place : place + 1])
        found = self._instead.get(index, index)
        while (error := self._raised_of(found, sample)) is not None:
            which = f"{self._kind} {self._source.name_of(found)}"
            self._skipped.add(UnreadableSample(which, raised(error, self._dataset)))
            following = (found + 1) % self.num_samples
            found = self._instead.get(following, following)
            if found == index:
                raise BadSamples(
                    f"no {self._kind} of data.dataset_name = {self._dataset} can be read; of {which} it is said: "
                    f"{raised(error, self._dataset)}"
                )
        if found != index:
            self._instead[index] = found
        return found

    def _raised_of(self, index: int, sample: Fields[Array]) -> Exception | None:
        """Read a sample, again if the system did not give it; return what was raised because of it itself.

        Raises:
            StorageError: The system does not give it.
        """
        number = np.array([index], dtype=np.int64)

        def read() -> None:
            self._source.read_into(number, sample)

        def which() -> str:
            return f"{self._kind} {self._source.name_of(index)} of data.dataset_name = {self._dataset}"

        return _raised_by(lambda: read_patiently(read, which, self._clock))

    def _check_labels(self, indices: Indices, labels: NDArray[np.integer[Any]]) -> None:
        def which(place: int) -> str:
            return f"{self._kind} {self._source.name_of(int(indices[place]))} of data.dataset_name = {self._dataset}"

        require_labels(labels, self._num_classes, which)


def _raised_by(read: Callable[[], None]) -> Exception | None:
    """Read; return what was raised because of what is read."""
    try:
        read()
    except UnreadableAudio as error:
        return error
    except (ShoalError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - what a decoder raises is its own business
        return error
    return None


def checked(dataset: DataSet, data: DataConfig, say: Callable[[Event], None]) -> DataSet:
    """Return a data set whose samples are checked as they are read.

    Args:
        say: Told of samples that cannot be read.
    """
    total = dataset.train.num_samples + dataset.holdout.num_samples
    skipped = SkippedSamples(dataset.name, total, data.max_bad_fraction, say)

    def of_split(source: Source, kind: str) -> Source:
        return CheckedSamples(source, kind, skipped, dataset.name, dataset.num_classes)

    train, holdout = of_split(dataset.train, "training sample"), of_split(dataset.holdout, "held-out sample")
    return replace(dataset, train=train, holdout=holdout, skipped=skipped)
