"""What it means to prepare a batch, wherever that is done: its samples, written into a place of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.data.fields import Fields
from shoal.data.shuffle import PassOrder
from shoal.data.source import Array, DataSet, Indices, Source
from shoal.errors import SampleError, StorageError
from shoal.swarm.sample_ranges import Ranges, count

SLOW_S = 60.0
"""A job that takes longer is said."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a place holds: positions in shuffled passes of the training samples, or held-out samples in their order."""

    samples: Ranges
    is_holdout: bool = False

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return count(self.samples)


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """Write `content` into `place`, which belongs to the job until it is done."""

    content: Content
    place: int


class Preparation(Protocol):
    """Where batches are prepared: threads (`PreparingThreads`) or processes (`DataWorkers`).

    Each job is reported exactly once, on the event loop, when its bytes are complete; perhaps before `begin` returns.
    """

    @property
    def num_jobs(self) -> int:
        """How many jobs keep it busy; what is begun beyond that only waits, and cannot be taken back."""
        ...

    def begin(self, job: Job) -> None:
        """Take a job, without waiting; it is done while `run` runs.

        Raises:
            SampleError: a sample cannot be prepared, which was tried at once.
        """
        ...

    async def run(self) -> None:
        """Work until cancelled.

        Raises:
            SampleError: a sample cannot be prepared.
        """
        ...


def indices_of(content: Content, order: PassOrder) -> Indices:
    """Return which samples (n,) a batch has: of the training samples, or of those held out."""
    if not content.is_holdout:
        return order.indices(content.samples)
    return np.concatenate([np.arange(item.start, item.stop, dtype=np.int64) for item in content.samples])


def prepare(
    dataset: DataSet, content: Content, indices: Indices, batch: Fields[Array], *, at_once: bool = False
) -> bool:
    """Write a batch into its arrays (n, ...); return whether it is there.

    Args:
        indices: which samples (n,) it has, see `indices_of`.
        at_once: nothing is waited for, and nothing altered.

    Raises:
        SampleError: one of them cannot be read, decoded or written.
    """
    source = dataset.holdout if content.is_holdout else dataset.train
    try:
        if at_once:
            return source.read_at_once(indices, batch)
        source.read_into(indices, batch)
        if dataset.augmentation is not None and not content.is_holdout:
            dataset.augmentation.apply(batch.inputs, indices, _passes_of(content))
        return True
    except (SampleError, StorageError):
        raise
    except Exception as error:  # what a decoder raises is its own business; whoever runs the data set needs the sample
        kind = "held-out sample" if content.is_holdout else "training sample"
        which = ", ".join(map(str, _culprits(source, indices.tolist())))
        raise SampleError(
            f"{kind} {which} of data.dataset_name = {dataset.name} cannot be prepared: "
            f"{type(error).__name__}: {error}; leave it out of the data set, or choose another one"
        ) from error


def _passes_of(content: Content) -> Indices:
    """Return the pass (n,) of each sample."""
    numbers = [item.pass_number for item in content.samples]
    return np.repeat(np.array(numbers, dtype=np.int64), [len(item) for item in content.samples])


def _culprits(source: Source, indices: Sequence[int]) -> Sequence[int]:
    """Return the first of the samples that fails alone, or all of them if none does."""
    for index in indices:
        try:
            source.sample(index)
        except Exception:  # noqa: BLE001 - the same failure, looked for sample by sample
            return [index]
    return indices
