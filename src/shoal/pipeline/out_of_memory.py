"""Which errors of torch say that memory is exhausted: those are cured by smaller microbatches, others are not."""

from __future__ import annotations

import torch

# The CPU's allocator has no error of its own.
_ON_CPU = ("can't allocate memory", "DefaultCPUAllocator")


DEVICE_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    NameError,
    ImportError,
    ArithmeticError,
    AssertionError,
    OSError,
    MemoryError,
)
"""What is raised for values that an operation cannot take (an index out of range), by a mistake in a model of the
user's own, and where memory is exhausted. The step is refused for it: whoever hosts the stage would meet it as well."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that a tensor did not fit into the memory of its device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ON_CPU)
