"""Where the arrays of a batch lie within its places of the pool: inputs first, then labels, both aligned."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.data.pool import Bytes
from shoal.data.source import Array, ArraySpec, DataSet
from shoal.wire.messages.feed import TensorPlace

_ALIGNMENT_BYTES = 64  # a cache line; enough for every element type


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The form of every place.

    Attributes:
        inputs, labels: one sample of each.
        max_samples: the largest batch that fits into one place; larger ones take several in a row.
    """

    inputs: ArraySpec
    labels: ArraySpec
    max_samples: int

    @classmethod
    def of(cls, dataset: DataSet, max_samples: int) -> BatchLayout:
        """Return the layout for batches of a data set."""
        return cls(dataset.inputs, dataset.labels, max_samples)

    @property
    def place_bytes(self) -> int:
        """Size of a place."""
        return _aligned(self.inputs.num_bytes * self.max_samples) + _aligned(self.labels.num_bytes * self.max_samples)

    def num_places(self, num_samples: int) -> int:
        """Return how many places a batch takes."""
        return max(1, -(-num_samples // self.max_samples))

    def batch_bytes(self, num_samples: int) -> int:
        """Return the bytes of a batch, without what aligns them."""
        return (self.inputs.num_bytes + self.labels.num_bytes) * num_samples

    def arrays(self, memory: Bytes, num_samples: int) -> tuple[Array, Array]:
        """Return inputs (n, ...) and labels (n, ...) as views of the places of a batch."""
        labels_offset_bytes = self._labels_offset_bytes(num_samples)
        return _view(memory, self.inputs, num_samples), _view(memory[labels_offset_bytes:], self.labels, num_samples)

    def tensor_places(self, offset_bytes: int, num_samples: int) -> tuple[TensorPlace, TensorPlace]:
        """Return where inputs and labels of a batch lie, in places that begin at `offset_bytes` of the pool."""
        labels_bytes = offset_bytes + self._labels_offset_bytes(num_samples)
        return (
            TensorPlace(self.inputs.dtype, (num_samples, *self.inputs.shape), offset_bytes),
            TensorPlace(self.labels.dtype, (num_samples, *self.labels.shape), labels_bytes),
        )

    def _labels_offset_bytes(self, num_samples: int) -> int:
        return _aligned(self.inputs.num_bytes * num_samples)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _view(memory: Bytes, spec: ArraySpec, num_samples: int) -> Array:
    flat = memory[: spec.num_bytes * num_samples].view(spec.dtype)
    return flat.reshape(num_samples, *spec.shape)
