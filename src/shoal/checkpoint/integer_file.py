"""Weights as integers in a tensor file, and as the floating weights that they stand for when it is read.

<name>.integers   int8, uint8, int16 or int32, in the weight's shape    \\  <name> = integers * scale
<name>.scale      the weight's type; broadcasts to the integers          /
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor

from shoal.errors import StateMismatch
from shoal.optim.flat import FlatEntry
from shoal.quant.fold import WeightScale

_INTEGERS, _SCALE = ".integers", ".scale"


def integer_entries(entry: FlatEntry, scale: WeightScale) -> tuple[FlatEntry, FlatEntry]:
    """What stands in a file for a weight."""
    integers = replace(entry, name=entry.name + _INTEGERS, dtype=scale.dtype)
    return integers, replace(entry, name=entry.name + _SCALE, shape=tuple(scale.scale.shape))


def integer_tensors(name: str, weight: Tensor, scale: WeightScale) -> Iterator[tuple[str, Tensor]]:
    """The tensors that stand for a folded weight."""
    yield name + _INTEGERS, scale.integers(weight)
    yield name + _SCALE, scale.scale


def floating(
    shapes: Mapping[str, tuple[int, ...]], read: Callable[[str], Tensor]
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]:
    """What a file holds, with the weights that integers stand for in their places.

    Args:
        shapes: Of all tensors in the file.
        read: Gives one of them.

    Returns:
        The same of the model's tensors. Reading raises StateMismatch where integers and scale are none of one weight.
    """
    names = {name.removesuffix(_INTEGERS) for name in shapes if name.endswith(_INTEGERS)}
    names = {name for name in names if name + _SCALE in shapes}
    parts = {name + end for name in names for end in (_INTEGERS, _SCALE)}
    found = {name: shape for name, shape in shapes.items() if name not in parts}
    found |= {name: shapes[name + _INTEGERS] for name in names}

    def read_floating(name: str) -> Tensor:
        if name not in names:
            return read(name)
        integers, scale = read(name + _INTEGERS), read(name + _SCALE)
        sizes = zip(reversed(scale.shape), reversed(integers.shape), strict=False)
        fits = scale.ndim <= integers.ndim and all(one in (1, size) for one, size in sizes)
        if integers.is_floating_point() or not scale.is_floating_point() or not fits:
            raise StateMismatch(f"{name}{_INTEGERS} and {name}{_SCALE} are not the integers and scale of one weight")
        return integers.to(scale.dtype) * scale

    return found, read_floating
