"""The flat form of a stage's parameters and buffers: one contiguous vector, its layout, its hash.

Rounds average, hash and transfer flat vectors; modules keep their own tensors. Shapes: N = elements of the layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor, nn

from shoal.errors import StateMismatch
from shoal.optim.vector_memory import leave, parts_of

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class FlatEntry:
    """Where one tensor lies: `numel` elements from `offset` on, both counted in elements of the flat vector."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """The order, shapes and places of named tensors in one flat vector.

    Attributes:
        entries: One for each tensor, in the module's order, without gaps.
        dtype: Of the flat vector: float32, float64 when a tensor is float64, int64 for integer buffers.
    """

    entries: tuple[FlatEntry, ...]
    dtype: torch.dtype

    @classmethod
    def of_named(cls, named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> Self:
        """The layout of named tensors in the order given.

        Args:
            named: Names and tensors, all floating or all not.
            dtype: Of the flat vector; None: float32 or wider for floating tensors, int64 for the others.
        """
        entries: list[FlatEntry] = []
        offset = 0
        for name, tensor in named:
            entries.append(FlatEntry(name, tuple(tensor.shape), tensor.dtype, offset))
            offset += tensor.numel()
        if dtype is None:
            dtypes = {entry.dtype for entry in entries}
            if any(not kind.is_floating_point for kind in dtypes):
                dtype = torch.int64
            else:
                dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        return cls(tuple(entries), dtype)

    @classmethod
    def of_parameters(cls, module: nn.Module) -> Self:
        """The layout of the module's parameters that are trained."""
        return cls.of_named(trained_parameters(module))

    @classmethod
    def of_float_buffers(cls, module: nn.Module) -> Self:
        """The layout of the module's floating buffers (BatchNorm's running statistics): averaged in a round."""
        return cls.of_named((name, b) for name, b in state_buffers(module) if b.is_floating_point())

    @classmethod
    def of_integer_buffers(cls, module: nn.Module) -> Self:
        """The layout of the module's integer and boolean buffers: a round takes the maximum of each element."""
        named = ((name, b) for name, b in state_buffers(module) if not b.is_floating_point())
        return cls.of_named(named, torch.int64)

    @property
    def numel(self) -> int:
        """N, the number of elements of the flat vector."""
        return self.entries[-1].offset + self.entries[-1].numel if self.entries else 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.name for entry in self.entries)

    def select(self, module: nn.Module) -> list[Tensor]:
        """The module's own tensors, by name, in the layout's order.

        Raises:
            StateMismatch: The module has no tensor of one of the names.
        """
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        missing = [name for name in self.names if name not in own]
        if missing:
            raise StateMismatch(f"the module lacks {', '.join(missing)}; was it built from another configuration?")
        return [own[name] for name in self.names]

    @torch.no_grad()
    def flatten(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
        """Copies `tensors`, in the layout's order, into one vector of N elements of `dtype`.

        Args:
            tensors: As in the layout, on one device.
            out: Where to write; None: a new vector on the tensors' device (CPU if there are none).

        Raises:
            StateMismatch: A tensor is missing or has another shape, or `out` has another size.
        """
        self._check(tensors)
        if out is None:
            device = tensors[0].device if tensors else torch.device("cpu")
            out = torch.empty(self.numel, dtype=self.dtype, device=device)
        for view, tensor in zip(self.views(out), tensors, strict=True):
            view.copy_(tensor)
        return out

    @torch.no_grad()
    def unflatten(self, flat_N: Tensor, into: Sequence[Tensor]) -> None:
        """Copies the vector back into `into` (in the layout's order), which it changes in place.

        Raises:
            StateMismatch: As `flatten`.
        """
        self._check(into)
        for view, tensor in zip(self.views(flat_N), into, strict=True):
            if not tensor.is_contiguous():
                tensor.copy_(view)
                leave(view)
                continue
            values, own = view.view(-1), tensor.view(-1)
            for part in parts_of(values):
                own[part].copy_(values[part])
                leave(values[part])

    def views(self, flat_N: Tensor) -> Iterator[Tensor]:
        """Views of the vector in the shapes of the layout, in its order.

        Raises:
            StateMismatch: The vector has not N elements.
        """
        if flat_N.shape != (self.numel,):
            raise StateMismatch(f"a flat vector of {self.numel} elements was expected, got {tuple(flat_N.shape)}")
        return (flat_N[e.offset : e.offset + e.numel].view(e.shape) for e in self.entries)

    def _check(self, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != len(self.entries):
            raise StateMismatch(f"the layout has {len(self.entries)} tensors, got {len(tensors)}")
        for entry, tensor in zip(self.entries, tensors, strict=True):
            if tuple(tensor.shape) != entry.shape:
                raise StateMismatch(f"{entry.name} has shape {entry.shape} in the layout, got {tuple(tensor.shape)}")


def trained_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The module's parameters by name, without frozen ones: those are no part of what rounds average and name.

    Frozen ones are a constant of the run, as hosts have agreed before the first step (`model.weights`).
    """
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def state_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The module's buffers by name, without constants: what torch does not save either (`persistent=False`).

    A constant follows from the configuration (the frequencies of rotary positions). An average of equal values is not
    always the same value in floating point, so rounds would let it drift.
    """
    owners = cast("Iterator[tuple[str, nn.Module]]", module.named_modules())
    constants = {
        f"{prefix}.{name}" if prefix else name
        for prefix, owner in owners
        for name in owner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    }
    return ((name, buffer) for name, buffer in module.named_buffers() if name not in constants)


def tensor_sha256(tensor: Tensor) -> str:
    """SHA-256 of the tensor's elements as contiguous bytes, in hex. Neither dtype nor shape are part of it.

    Bytes are little-endian, as on every platform that torch has wheels for. Copies only what is not contiguous on the
    CPU. Parts of a file are left.
    """
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    digest = hashlib.sha256()
    for part in parts_of(flat):
        digest.update(cast("Buffer", flat[part].view(torch.uint8).numpy()))
        leave(flat[part])
    return digest.hexdigest()


def buffers_sha256(floats_F: Tensor, integers_I: Tensor) -> str:
    """What stands for a stage's floating and integer buffers together in a record."""
    return hashlib.sha256((tensor_sha256(floats_F) + tensor_sha256(integers_I)).encode()).hexdigest()


def packed(tensors: Iterable[Tensor]) -> Tensor:
    """A copy of the tensors' elements as bytes, one after the other, in one vector on the CPU."""
    parts = [tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    content = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
    leave(*parts)
    return content


@torch.no_grad()
def unpack(content: Tensor, into: Sequence[Tensor]) -> None:
    """Copies what `packed` gave back into tensors of the same shapes and types.

    Raises:
        StateMismatch: It has another size; nothing has changed.
    """
    sizes = [tensor.nbytes for tensor in into]
    if content.numel() != sum(sizes):
        raise StateMismatch(f"{sum(sizes)} bytes were expected, got {content.numel()}")
    start = 0
    for size, tensor in zip(sizes, into, strict=True):
        if size:
            # In memory of its own, since a part may begin where its type may not.
            tensor.copy_(content[start : start + size].clone().view(tensor.dtype).view(tensor.shape))
            leave(tensor)
        start += size
