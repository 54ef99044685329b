"""How a step's batch is cut: first into batches of the configured size, each of these into microbatches.

The sizes are those of `torch.chunk`: n samples in at most M parts of ceil(n / M), the last one perhaps smaller. All
parts are views; nothing is copied.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.data.fields import Fields
from shoal.data.source import Array
from shoal.data.targets import targets_of
from shoal.wire.tensors import WireTensor


class Microbatch(NamedTuple):
    """Part of a batch, ready to be posted.

    The memory behind it must stay as it is until the step has ended.

    Attributes:
        fields: (n, ...).
        num_samples: n, at least 1.
    """

    fields: Fields[WireTensor]
    num_samples: int

    @property
    def for_first_stage(self) -> tuple[WireTensor, ...]:
        """What the first stage gets: the inputs, and the context, which each stage hands on."""
        return (self.fields.inputs, *self.fields.context.values())

    @property
    def for_loss(self) -> tuple[WireTensor, ...]:
        """What goes to where the loss is."""
        return (self.fields.labels,)

    @property
    def targets(self) -> tuple[int, ...]:
        """How many targets each sample has, see `data.targets`."""
        return targets_of(self.fields.labels)

    def rows(self, start: int, stop: int) -> Microbatch:
        """Return samples [start, stop) as views."""
        if stop - start == self.num_samples:
            return self
        return Microbatch(self.fields.each(lambda tensor: tensor.rows(start, stop)), stop - start)


def cut(batch: Fields[Array], max_parts: int) -> list[Microbatch]:
    """Return a batch (n, ...) in at most `max_parts` parts, as even as whole samples allow."""
    return _slices(batch, -(-len(batch.inputs) // max_parts))


def microbatches(
    batch: Fields[Array],
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
        batch: (n, ...).
        batch_samples: `diloco.batch_size_per_step`.
        samples_per_step: of a usual step batch: `gradient_accumulation_steps` times `batch_samples`.
        num_microbatches: the most into which `batch_samples` are cut.
        keeps_size: stages are compiled for `usual_sizes`.
    """
    num_samples, usual_size = len(batch.inputs), -(-batch_samples // num_microbatches)
    if keeps_size and num_samples != samples_per_step:
        return _slices(batch, usual_size)
    if num_samples > samples_per_step:
        return _slices(batch, _even(num_samples, usual_size))
    parts: list[Microbatch] = []
    for start in range(0, num_samples, batch_samples):
        parts += cut(_rows(batch, start, start + batch_samples), num_microbatches)
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


def _slices(batch: Fields[Array], size: int) -> list[Microbatch]:
    parts = [_rows(batch, start, start + size) for start in range(0, len(batch.inputs), size)]
    return [Microbatch(part.each(wire_view), len(part.inputs)) for part in parts]


def _rows(batch: Fields[Array], start: int, stop: int) -> Fields[Array]:
    """Samples [start, stop) of a batch, as far as there are so many, as views."""
    return batch.each(lambda array: array[start:stop])
