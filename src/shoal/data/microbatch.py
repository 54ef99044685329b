"""How a step's batch is cut: first into batches of the configured size, each of these into microbatches.

The sizes are those of `torch.chunk`: n samples in at most M parts of ceil(n / M), the last one perhaps smaller. All
parts are views; nothing is copied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.data.source import Array
from shoal.data.targets import targets_of
from shoal.wire.tensors import WireTensor


class Microbatch(NamedTuple):
    """Part of a batch, ready to be posted: inputs for the first stage, labels for the last one.

    The memory behind both must stay as it is until the step has ended.

    Attributes:
        inputs: (n, ...).
        labels: (n, ...).
        num_samples: n, at least 1.
    """

    inputs: WireTensor
    labels: WireTensor
    num_samples: int

    @property
    def targets(self) -> tuple[int, ...]:
        """How many targets each sample has, see `data.targets`."""
        return targets_of(self.labels)

    def rows(self, start: int, stop: int) -> Microbatch:
        """Return samples [start, stop) as views."""
        if stop - start == self.num_samples:
            return self
        return Microbatch(self.inputs.rows(start, stop), self.labels.rows(start, stop), stop - start)


def cut(inputs: Array, labels: Array, max_parts: int) -> list[Microbatch]:
    """Return `inputs` and `labels` (n, ...) in at most `max_parts` parts, as even as whole samples allow."""
    size = -(-len(inputs) // max_parts)
    return _slices(inputs, labels, size)


def microbatches(
    inputs: Array,
    labels: Array,
    *,
    batch_samples: int,
    samples_per_step: int,
    num_microbatches: int,
    keeps_size: bool = False,
) -> list[Microbatch]:
    """Return the microbatches of a step batch (n, ...), in order.

    A smaller batch than usual has smaller microbatches, so that a pipeline stays filled; a larger one has more of them,
    so that it needs no more memory. With `keeps_size` only the number changes, and only the last one may be smaller.

    Args:
        inputs: (n, ...).
        labels: (n, ...).
        batch_samples: `diloco.batch_size_per_step`.
        samples_per_step: of a usual step batch: `gradient_accumulation_steps` times `batch_samples`.
        num_microbatches: the most into which `batch_samples` are cut.
        keeps_size: stages are compiled for `usual_sizes`.
    """
    if keeps_size and len(inputs) != samples_per_step:
        return _slices(inputs, labels, -(-batch_samples // num_microbatches))
    if len(inputs) > samples_per_step:
        return _slices(inputs, labels, _even(len(inputs), -(-batch_samples // num_microbatches)))
    parts: list[Microbatch] = []
    for start in range(0, len(inputs), batch_samples):
        stop = start + batch_samples
        parts += cut(inputs[start:stop], labels[start:stop], num_microbatches)
    return parts


def usual_sizes(batch_samples: int, num_microbatches: int) -> frozenset[int]:
    """Return the sizes of a usual batch's microbatches: one, or two where the last one is smaller."""
    size = -(-batch_samples // num_microbatches)
    return frozenset({size, batch_samples % size}) - {0}


def wire_view(array: Array) -> WireTensor:
    """Return a C-contiguous array as it travels, without copying it."""
    return WireTensor(array.dtype.name, array.shape, array.reshape(-1).view(np.uint8).data)


def _even(num_samples: int, most: int) -> int:
    """Return the size of as few parts as can be, of at most `most` samples each, and as even as can be."""
    return -(-num_samples // -(-num_samples // most))


def _slices(inputs: Array, labels: Array, size: int) -> list[Microbatch]:
    starts = range(0, len(inputs), size)
    pairs = [(inputs[start : start + size], labels[start : start + size]) for start in starts]
    return [Microbatch(wire_view(x), wire_view(y), len(x)) for x, y in pairs]
