"""Samples that are checked as they are read: in place of one that cannot be read stands the next one that can.

read -> the samples of a batch at once -> labels in range? -> done
    '-> something is raised -> each sample alone; in place of one that raises, the next of the same split that does not

A sample that cannot be read is found when it is its turn: opening a data set does not read all of it. So it stays in
the order of the passes, which follow from the number of samples alone, and batches keep their sizes. What stands in its
place follows from the data alone: whoever prepares the batch, now or in a replay, writes the same bytes. A held-out
sample never stands in for one that is trained on.

    reading raises --> an error of the file, or of its decoder --> another sample stands in its place
                  '--> an error of the system, as EIO --> it is read again, a few times --> StorageError

Nothing stands in for a sample that the system did not give: another time, as in a replay, it gives it.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, cast

import anyio
import numpy as np
from numpy.typing import NDArray

from shoal.clock import Backoff, Clock, SystemClock
from shoal.config.training import DataConfig
from shoal.data.fields import Fields
from shoal.data.skipped_samples import SkippedSamples, UnreadableSample
from shoal.data.source import Array, ArraySpec, DataSet, Indices, Source
from shoal.data.targets import IGNORED
from shoal.errors import SampleError, ShoalError, StorageError, UnreadableAudio
from shoal.events.base import Event

_OPEN_FILES: Final = "raise the limit of open files (`ulimit -n`)"
_MEMORY: Final = "free memory on this host"
_STORAGE: Final = (
    "see whether the disk or the network file system of the data answers (`dmesg`); if this sample alone cannot be "
    "read, leave it out of the data set"
)
_OF_THE_SYSTEM: Final[Mapping[int, str]] = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), _OPEN_FILES),
    **dict.fromkeys((errno.ENOMEM, errno.ENOBUFS), _MEMORY),
    **dict.fromkeys(
        (errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN), _STORAGE
    ),
}
"""What to do about errors that say nothing of the file that is read; others, as ENOENT and EACCES, are its own."""

_ATTEMPTS: Final = 6
_FIRST_PAUSE_S: Final = 0.25
_MAX_PAUSE_S: Final = 4.0


class CheckedSamples(Source):
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
        self._source = source
        self._kind = kind
        self._skipped = skipped
        self._dataset = dataset
        self._num_classes = num_classes
        self._clock = clock or SystemClock()
        self._has_classes = np.issubdtype(source.labels.dtype, np.integer)
        # By index, what stands in the place of a sample that cannot be read.
        self._instead: dict[int, int] = {}

    @property
    def inputs(self) -> ArraySpec:
        return self._source.inputs

    @property
    def labels(self) -> ArraySpec:
        return self._source.labels

    @property
    def context(self) -> Mapping[str, ArraySpec]:
        return self._source.context

    @property
    def num_samples(self) -> int:
        return self._source.num_samples

    @property
    def in_memory(self) -> bool:
        return self._source.in_memory

    def name_of(self, index: int) -> str:
        return self._source.name_of(index)

    def advise(self, start: int, stop: int, *, is_needed: bool) -> None:
        self._source.advise(start, stop, is_needed=is_needed)

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        """See `Source.read_into`.

        Raises:
            SampleError: Too many samples cannot be read, or one is not as it should be.
            StorageError: The system does not give one.
        """
        found = self._readable(indices)
        if self._raised(found, batch) is not None:
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
            self._skipped.add(UnreadableSample(which, f"{type(error).__name__}: {error}"))
            following = (found + 1) % self.num_samples
            found = self._instead.get(following, following)
            if found == index:
                raise SampleError(
                    f"no {self._kind} of data.dataset_name = {self._dataset} can be read; of {which} it is said: "
                    f"{type(error).__name__}: {error}"
                )
        if found != index:
            self._instead[index] = found
        return found

    def _raised_of(self, index: int, sample: Fields[Array]) -> Exception | None:
        """Read a sample, again if the system did not give it; return what was raised because of it itself.

        Raises:
            StorageError: The system does not give it.
        """
        backoff = Backoff(first_s=_FIRST_PAUSE_S, max_s=_MAX_PAUSE_S)
        number = np.array([index], dtype=np.int64)
        for left in reversed(range(_ATTEMPTS if _may_wait() else 1)):
            error = self._raised(number, sample)
            if error is None or (reason := _of_the_system(error)) is None:
                return error
            if not left:
                raise StorageError(
                    f"{self._kind} {self._source.name_of(index)} of data.dataset_name = {self._dataset} is not read, "
                    f"for a reason that is none of its own, and no other one is trained in its place: {reason}; "
                    f"{_OF_THE_SYSTEM[cast('int', reason.errno)]}"
                ) from error
            anyio.run(backoff.wait, self._clock)
        return None

    def _raised(self, indices: Indices, batch: Fields[Array]) -> Exception | None:
        """Read samples `indices` (n); return what was raised."""
        try:
            self._source.read_into(indices, batch)
        except UnreadableAudio as error:
            return error
        except (ShoalError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - what a decoder raises is its own business
            return error
        return None

    def _check_labels(self, indices: Indices, labels: NDArray[np.integer[Any]]) -> None:
        wrong: NDArray[np.bool_] = (labels < 0) | (labels >= self._num_classes)
        if labels.ndim > 1:
            wrong &= labels != IGNORED
        if wrong.any():
            place = int(np.argwhere(wrong)[0, 0])
            raise SampleError(
                f"{self._kind} {self._source.name_of(int(indices[place]))} of data.dataset_name = {self._dataset} has "
                f"the label {labels[place][wrong[place]].flat[0]}, and labels are 0 to {self._num_classes - 1}"
            )


def _of_the_system(error: BaseException) -> OSError | None:
    """Return the error of the system, and not of a file, that has led to another one, or is it; None: there is none."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno in _OF_THE_SYSTEM:
            return found
        found = found.__cause__ or found.__context__
    return None


def _may_wait() -> bool:
    """Whether no event loop runs in this thread, which would stand still meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return False


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
