"""Where the long vectors of a replica lie: in memory, or in files of which memory has what is being looked at.

A file takes the place of memory for what is needed seldom (the outer state, in rounds) and goes from its beginning to
its end: whoever goes over such a vector leaves the parts that it has done, so that a few megabytes of it are in memory
at a time. The bits are the same, wherever a vector lies; and to leave one that lies in memory does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from shoal.events.base import emit
from shoal.events.servers import ServerFileRefused
from shoal.file_thread import remedy, said_by_disk
from shoal.runtime import file_memory

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

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Zeros as this tensor is, without gradient."""
        return torch.zeros_like(tensor, requires_grad=False)

    def copy(self, vector: Tensor) -> Tensor:
        """A copy of a vector."""
        copied = self.empty(vector.numel(), vector.dtype)
        for part in parts_of(vector, copied):
            copied[part] = vector[part]
            leave(vector[part], copied[part])
        return copied

    def make_room(self) -> None:
        """Something long is coming that is not like what was freed before."""


IN_MEMORY: Final = VectorMemory()


class FileVectorMemory(VectorMemory):
    """Files of one disk. What is short, or of another device, or is given no file, lies in memory.

    Args:
        folder: On that disk.
    """

    is_short = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_refused = False

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        found = self._in_file(count, dtype)
        return super().empty(count, dtype) if found is None else found

    def zeros_like(self, tensor: Tensor) -> Tensor:
        is_plain = tensor.device.type == "cpu" and tensor.is_contiguous()
        found = self._in_file(tensor.numel(), tensor.dtype) if is_plain else None
        # A new file reads as zeros.
        return super().zeros_like(tensor) if found is None else found.view(tensor.shape)

    def make_room(self) -> None:
        file_memory.give_back_freed()

    def _in_file(self, count: int, dtype: torch.dtype) -> Tensor | None:
        num_bytes = count * dtype.itemsize
        if num_bytes < LONG_BYTES:
            return None
        try:
            memory = file_memory.mapped(self._folder, num_bytes)
        except OSError as error:
            if not self._is_refused:
                reason = said_by_disk(error, self._folder)
                emit(logger, ServerFileRefused(str(self._folder), num_bytes, reason, remedy(error, self._folder)))
            self._is_refused = True
            return None
        self._is_refused = False
        return torch.frombuffer(memory, dtype=dtype)


def is_in_file(tensor: Tensor) -> bool:
    """Whether a tensor is all or a part of a vector that lies in a file."""
    return tensor.device.type == "cpu" and file_memory.is_mapped(tensor.untyped_storage().data_ptr())


def leave(*tensors: Tensor) -> None:
    """Nobody looks at these, or at these parts of vectors, for a while. What lies in memory stays there."""
    for tensor in tensors:
        if is_in_file(tensor):
            file_memory.leave(tensor.data_ptr(), tensor.nbytes)


@contextmanager
def left_behind(modules: Iterable[nn.Module]) -> Generator[None]:
    """Inside, each of these leaves its own parameters once it has computed with them."""

    def after(module: nn.Module, *_: object) -> None:
        leave(*module.parameters(recurse=False))

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_hook(after).remove)
        yield


def parts_of(*vectors: Tensor) -> Iterator[slice]:
    """Where to stop on the way through vectors of one length, and leave what is done; if all lie in memory, nowhere."""
    size = vectors[0].numel()
    step = PART_BYTES // vectors[0].itemsize if any(map(is_in_file, vectors)) else max(1, size)
    return (slice(start, start + step) for start in range(0, size, step))
