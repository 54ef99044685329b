"""Whether tensors from the network are what an operation expects; said in words, for the refusal and the log."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.model.stage import TensorSpec
from shoal.wire.tensors import WireTensor


def misfit(tensors: Sequence[WireTensor], spec: TensorSpec, num_samples: int) -> str | None:
    """What is wrong with the tensors of a message that carries one of `num_samples` samples; None if nothing is."""
    if len(tensors) != 1:
        return f"one tensor expected, got {len(tensors)}"
    expected = (num_samples, *spec.shape)
    dtype, shape = tensors[0].dtype, tensors[0].shape
    if dtype != spec.dtype or tuple(shape) != expected:
        return f"{spec.dtype}{list(expected)} expected, got {dtype}{list(shape)}"
    return None
