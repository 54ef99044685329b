"""The squared norm of a gradient, in one order of additions, so that swarm and plain loop clip by the same bits; and
whether values are finite."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# What stays in a core's cache as float64: a copy of a whole gradient would be written to memory and read again.
_CHUNK = 1 << 16
_EXTREMES_OF = ("cpu", "cuda")
"""Devices on which the least and the greatest of values with a NaN are NaN."""


def squared_norm(gradient: Tensor) -> Tensor:
    """The sum of squares in float64: a scalar on the gradient's device, or on the CPU if that has no such numbers.

    On the CPU it is added up in chunks, which is four to six times as fast as squaring a copy of the whole.
    """
    if gradient.device.type not in ("cpu", "mps"):
        return gradient.to(torch.float64).square().sum()
    flat = gradient.detach().cpu().reshape(-1)
    buffer = torch.empty(min(_CHUNK, flat.numel()), dtype=torch.float64)
    chunks = (flat[start : start + _CHUNK] for start in range(0, flat.numel() or 1, _CHUNK))
    sums = [buffer[: len(chunk)].copy_(chunk).square_().sum() for chunk in chunks]
    return torch.stack(sums).sum()


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no value of any of them is infinite or NaN.

    Least and greatest value say so, and are found in a tenth of the time that asking each value takes: NaN is both.
    """
    extremes = [extreme.cpu() for each in tensors if each.numel() for extreme in _extremes(each.detach())]
    return not extremes or bool(torch.stack([each.to(torch.float64) for each in extremes]).isfinite().all())


def _extremes(values: Tensor) -> tuple[Tensor, ...]:
    if values.device.type not in _EXTREMES_OF:
        return (torch.where(values.isfinite().all(), 0.0, torch.nan),)
    return tuple(torch.aminmax(values))
