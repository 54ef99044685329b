"""Where the arrays of a batch lie within its places of the pool: one field behind the other, each aligned."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from shoal.data.fields import Fields
from shoal.data.pool import Bytes
from shoal.data.source import Array, ArraySpec, DataSet
from shoal.wire.messages.feed import TensorPlace

_ALIGNMENT_BYTES = 64  # a cache line; enough for every element type


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """The form of every place.

    Attributes:
        fields: one sample of each.
        max_samples: the largest batch that fits into one place; larger ones take several in a row.
    """

    fields: Fields[ArraySpec]
    max_samples: int
    _offsets: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]], init=False, compare=False)

    @classmethod
    def of(cls, dataset: DataSet, max_samples: int) -> BatchLayout:
        """Return the layout for batches of a data set."""
        return cls(dataset.fields, max_samples)

    @property
    def place_bytes(self) -> int:
        """Size of a place."""
        return sum(_aligned(spec.num_bytes * self.max_samples) for spec in self.fields.everything)

    def num_places(self, num_samples: int) -> int:
        """Return how many places a batch takes."""
        return max(1, -(-num_samples // self.max_samples))

    def batch_bytes(self, num_samples: int) -> int:
        """Return the bytes of a batch, without what aligns them."""
        return sum(spec.num_bytes for spec in self.fields.everything) * num_samples

    def arrays(self, memory: Bytes, num_samples: int) -> Fields[Array]:
        """Return the arrays (n, ...) as views of the places of a batch."""
        views: list[Array] = []
        for spec, offset in zip(self.fields.everything, self._offsets_bytes(num_samples), strict=True):
            flat = memory[offset : offset + spec.num_bytes * num_samples].view(spec.dtype)
            views.append(flat.reshape(num_samples, *spec.shape))
        return self.fields.with_everything(views)

    def tensor_places(self, offset_bytes: int, num_samples: int) -> Fields[TensorPlace]:
        """Return where the arrays of a batch lie, in places that begin at `offset_bytes` of the pool."""
        offsets = self._offsets_bytes(num_samples)
        return self.fields.with_everything(
            TensorPlace(spec.dtype, (num_samples, *spec.shape), offset_bytes + offset)
            for spec, offset in zip(self.fields.everything, offsets, strict=True)
        )

    def _offsets_bytes(self, num_samples: int) -> tuple[int, ...]:
        """Where each field begins, from the start of a batch's first place; asked for batches of few sizes."""
        offsets = self._offsets.get(num_samples)
        if offsets is None:
            sizes = [_aligned(spec.num_bytes * num_samples) for spec in self.fields.everything]
            offsets = self._offsets[num_samples] = tuple(accumulate(sizes[:-1], initial=0))
        return offsets


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
