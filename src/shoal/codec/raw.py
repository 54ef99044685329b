"""Torch tensors as they are: the bytes of a contiguous CPU tensor, shared with it, nothing compressed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from shoal.errors import LocalProtocolError
from shoal.wire.tensors import WireTensor, empty_bytes

_TORCH_OF: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "float32": torch.float32,
        "float64": torch.float64,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "int64": torch.int64,
        "int32": torch.int32,
        "uint16": torch.uint16,
        "uint8": torch.uint8,
        "bool": torch.bool,
    }
)
_NAME_OF: Final[Mapping[torch.dtype, str]] = MappingProxyType({dtype: name for name, dtype in _TORCH_OF.items()})


def to_wire(tensor: torch.Tensor) -> WireTensor:
    """Return the wire form of a tensor.

    A contiguous CPU tensor keeps its memory: it must stay unchanged until the result is written. Any other one is
    copied first. Autograd history is left behind.

    Raises:
        LocalProtocolError: the element type cannot travel.
    """
    name = _NAME_OF.get(tensor.dtype)
    if name is None:
        raise LocalProtocolError(
            f"tensors of type {tensor.dtype} cannot travel; use one of {', '.join(_NAME_OF.values())}"
        )
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return WireTensor(name, shape, empty_bytes(0))
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    # numpy knows no bfloat16; as bytes every type looks the same.
    data = flat.view(torch.uint8).numpy().data
    return WireTensor(name, shape, data)


def from_wire(wire: WireTensor) -> torch.Tensor:
    """Return a CPU tensor without gradient over the memory of `wire`, copied only if that is read-only."""
    dtype = _TORCH_OF[wire.dtype]
    if wire.num_bytes == 0:
        return torch.empty(wire.shape, dtype=dtype)
    data = wire.copy().data if wire.data.readonly else wire.data
    return torch.frombuffer(data, dtype=dtype).view(wire.shape)
