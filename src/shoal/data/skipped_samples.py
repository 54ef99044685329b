"""The samples of a data set that cannot be read: each is counted once and named, and too many end the run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import msgspec

from shoal.errors import BadSamples
from shoal.events.base import Event, emit
from shoal.events.data import SampleSkipped, SamplesSkipped

logger = logging.getLogger(__name__)


class UnreadableSample(msgspec.Struct, frozen=True):
    """A sample that cannot be read.

    Attributes:
        which: Names it, for people; no other sample of the data set has this name.
    """

    which: str
    reason: str


class SkippedSamples:
    """Those that were met so far. Usable from several threads.

    Args:
        num_samples: Of the data set, held-out ones included.
        say: Told of the first one, and whenever there are twice as many.
    """

    def __init__(self, dataset: str, num_samples: int, max_bad_fraction: float, say: Callable[[Event], None]) -> None:
        self._dataset = dataset
        self._num_samples = num_samples
        self._max_bad_fraction = max_bad_fraction
        self._say = say
        self._found: set[str] = set()
        self._new: list[UnreadableSample] = []
        self._lock = threading.Lock()

    def add(self, sample: UnreadableSample) -> None:
        """Count a sample, unless it was counted before.

        Raises:
            BadSamples: There are more than `data.max_bad_fraction`.
        """
        with self._lock:
            if sample.which in self._found:
                return
            self._found.add(sample.which)
            self._new.append(sample)
            count = len(self._found)
        emit(logger, SampleSkipped(self._dataset, sample.which, sample.reason))
        if count > self._max_bad_fraction * self._num_samples:
            raise BadSamples(
                f"{count} of {self._num_samples} samples of data.dataset_name = {self._dataset} cannot be read, more "
                f"than data.max_bad_fraction = {self._max_bad_fraction}; the last one is {sample.which}: "
                f"{sample.reason}; mend them, leave them out, or allow more"
            )
        if count.bit_count() == 1:
            self._say(SamplesSkipped(self._dataset, count, self._num_samples, sample.which, sample.reason))

    def add_all(self, samples: Iterable[UnreadableSample]) -> None:
        """Count what another process has met. Raises as `add`."""
        for sample in samples:
            self.add(sample)

    def take_new(self) -> tuple[UnreadableSample, ...]:
        """Return those that were counted since this was asked last."""
        with self._lock:
            new, self._new = self._new, []
        return tuple(new)
