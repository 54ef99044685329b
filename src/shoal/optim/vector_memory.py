"""Where the long vectors of a replica lie: in memory, or in files of which memory has what is being looked at.

A file takes the place of memory for what is needed seldom (the outer state, in rounds) and goes from its beginning to
its end: whoever goes over such a vector leaves the parts that it has done, so that a few megabytes of it are in memory
at a time. The bits are the same, wherever a vector lies.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from shoal.events.base import emit
from shoal.events.servers import ServerDiskIsFull
from shoal.runtime.file_memory import FileMemory, give_back_freed

logger = logging.getLogger(__name__)

LONG_BYTES: Final = 1 << 20
"""What is shorter is not worth a file."""
PART_BYTES: Final = 1 << 22
"""What is looked at before it is left."""


class VectorMemory:
    """Ordinary memory; any thread may use it.

    Attributes:
        is_short: Whether there is so little that also what comes and goes is not kept in between.
    """

    is_short: bool = False

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """A vector with any values."""
        return torch.empty(count, dtype=dtype)

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """A vector of zeros."""
        return torch.zeros(count, dtype=dtype)

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Zeros as this tensor is, without gradient."""
        return torch.zeros_like(tensor, requires_grad=False)

    def copy(self, vector: Tensor) -> Tensor:
        """A copy of a vector."""
        copied = self.empty(vector.numel(), vector.dtype)
        for part in parts_of(vector):
            copied[part] = vector[part]
            self.leave(vector[part], copied[part])
        return copied

    def leave(self, *tensors: Tensor) -> None:
        """Nobody looks at these, or at these parts of vectors, for a while. What lies elsewhere stays where it is."""

    def make_room(self) -> None:
        """Something long is coming that is not like what was freed before: give that back to the system."""
        give_back_freed()


IN_MEMORY: Final = VectorMemory()


class FileVectorMemory(VectorMemory):
    """Files of one disk. What is short, or of another device, or has no room there, lies in memory."""

    is_short = True

    def __init__(self, files: FileMemory) -> None:
        self._files = files
        self._is_full = False

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        found = self._in_file(count, dtype)
        return super().empty(count, dtype) if found is None else found

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        found = self._in_file(count, dtype)  # a new file reads as zeros
        return super().zeros(count, dtype) if found is None else found

    def zeros_like(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return super().zeros_like(tensor)
        return self.zeros(tensor.numel(), tensor.dtype).view(tensor.shape)

    def leave(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.nbytes:
                self._files.leave(tensor.data_ptr(), tensor.nbytes)

    def _in_file(self, count: int, dtype: torch.dtype) -> Tensor | None:
        num_bytes = count * dtype.itemsize
        if num_bytes < LONG_BYTES:
            return None
        try:
            mapping = self._files.map(num_bytes)
        except OSError as error:
            if not self._is_full:
                emit(logger, ServerDiskIsFull(num_bytes, str(error)))
            self._is_full = True
            return None
        self._is_full = False
        return torch.frombuffer(mapping, dtype=dtype)


def parts_of(vector: Tensor) -> Iterator[slice]:
    """Where to stop on the way through a vector, and leave what is done."""
    step = PART_BYTES // vector.itemsize
    return (slice(start, start + step) for start in range(0, vector.numel(), step))
