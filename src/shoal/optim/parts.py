"""What a replica of a stage is, listed once: who copies, counts, averages or restores one goes over its parts.

part            a round makes of it      of it a record names          a snapshot has it
parameters      an outer step            outer parameters, momentum    yes
floats          their weighted average   buffers                       yes
integers        their maximum            buffers                       yes
inner           nothing, it stays local  -                             yes
residual        what was not sent of it  -                             yes

Shapes: N elements of the parameters, F of the floating buffers, I of the integer buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.errors import StateMismatch
from shoal.optim.flat import FlatLayout, packed, state_buffers, trained_parameters, unpack
from shoal.optim.inner import InnerOptimizer, InnerStates
from shoal.optim.vector_memory import leave

_RESIDUAL = "residual"


class FlatPart:
    """Tensors of a replica that rounds see as one vector; they stay the same objects for ever.

    Args:
        loaded: is told that they were replaced.
    """

    def __init__(self, layout: FlatLayout, tensors: Sequence[Tensor], loaded: Callable[[], None] | None = None) -> None:
        self.layout = layout
        self.tensors = list(tensors)
        self._loaded = loaded

    @property
    def num_bytes(self) -> int:
        """Memory of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def flat(self, out: Tensor | None = None) -> Tensor:
        """A copy as one vector."""
        return self.layout.flatten(self.tensors, out)

    def load(self, flat: Tensor) -> None:
        """Replace the values."""
        self.layout.unflatten(flat, self.tensors)
        if self._loaded is not None:
            self._loaded()


class AveragedParts(NamedTuple):
    """Those that a round replaces, in the order in which they are hashed and sent."""

    parameters: FlatPart
    floats: FlatPart
    integers: FlatPart

    @classmethod
    def of(
        cls,
        parameters: Iterable[tuple[str, Tensor]],
        buffers: Iterable[tuple[str, Tensor]],
        loaded: Callable[[], None] | None = None,
    ) -> AveragedParts:
        """The parts that named tensors are.

        Args:
            loaded: is told that buffers were replaced.
        """
        named, floats, integers = dict(parameters), dict[str, Tensor](), dict[str, Tensor]()
        for name, buffer in buffers:
            kind = floats if buffer.is_floating_point() else integers
            kind[name] = buffer
        return cls(
            FlatPart(FlatLayout.of_named(named.items()), list(named.values())),
            FlatPart(FlatLayout.of_named(floats.items()), list(floats.values()), loaded),
            FlatPart(FlatLayout.of_named(integers.items(), torch.int64), list(integers.values()), loaded),
        )


class ReplicaParts:
    """All parts of a replica.

    Attributes:
        averaged: those that a round replaces.
        inner: the state of the inner optimizer; for each parameter from its first gradient on.
        residual: what codecs have left out of the pseudo-gradients so far (each N, on the CPU); replaced, not changed.
    """

    def __init__(self, averaged: AveragedParts, inner: InnerOptimizer) -> None:
        self.averaged = averaged
        self.inner = inner
        self.residual: tuple[Tensor, ...] = ()

    @classmethod
    def of_module(cls, module: nn.Module, inner: InnerOptimizer, loaded: Callable[[], None]) -> ReplicaParts:
        """The parts of a module that is built; see `AveragedParts.of`."""
        return cls(AveragedParts.of(trained_parameters(module), state_buffers(module), loaded), inner)

    @property
    def num_bytes(self) -> int:
        """Memory of all parts, once every parameter has had a gradient."""
        return sum(part.num_bytes for part in self.averaged) + self.inner.state_bytes

    def snapshot(self) -> Tensor:
        """A copy of all parts, as bytes on the CPU."""
        has_state = torch.tensor(self.inner.has_state, dtype=torch.bool)
        return packed(chain([has_state], self._tensors(self.inner.state_tensors), self.residual))

    def restore(self, snapshot: Tensor) -> None:
        """Make all parts what they were when a snapshot was made.

        Raises:
            StateMismatch: it is not one of this stage.
        """
        count = len(self.averaged.parameters.tensors)
        self.inner.state = self.inner.begun([bool(has) for has in snapshot[:count]])
        residual = tuple(map(torch.empty_like, self.residual))
        unpack(snapshot[count:], [*self._tensors(self.inner.state_tensors), *residual])
        self.residual = residual

    def inner_state(self) -> dict[str, Tensor]:
        """What the inner optimizer knows, and the residual (not copies), by what it is and its parameter:
        `exp_avg/<name>`."""
        return dict(self._named(self.inner.state)) | dict(self._named_residual(self.residual))

    def require_inner_state(self, found: Mapping[str, Tensor]) -> None:
        """Check that this can be taken.

        Raises:
            StateMismatch: It is not what an optimizer of this stage and kind knows.
        """
        self._begun(found)

    def take_inner_state(self, found: Mapping[str, Tensor]) -> None:
        """Make the inner optimizer know what another one of the stage knew, and go on with its residual; see
        `inner_state`. Where only one of the two runs keeps a residual, there is none to go on with.

        Raises:
            StateMismatch: As `require_inner_state`; nothing has changed.
        """
        begun = self._begun(found)
        for name, tensor in self._named(begun):
            tensor.copy_(found[name])
            leave(tensor, found[name])
        self.inner.state = begun
        residual = tuple(map(torch.zeros_like, self.residual))
        for name, view in self._named_residual(residual):
            if name in found:
                view.copy_(found[name])
        self.residual = residual

    def _begun(self, found: Mapping[str, Tensor]) -> InnerStates:
        own = {name: tensor for name, tensor in found.items() if not name.startswith(f"{_RESIDUAL}/")}
        parameters = {name.partition("/")[2] for name in own}
        begun = self.inner.begun([name in parameters for name in self.averaged.parameters.layout.names])
        wanted = dict(self._named(begun))
        wanted |= {name: view for name, view in self._named_residual(self.residual) if name in found}
        given = own | {name: found[name] for name in wanted.keys() & found.keys()}
        if _kinds(given) != _kinds(wanted):
            raise StateMismatch("it is the state of another stage's optimizer, or of one of another type")
        return begun

    def _named(self, state: InnerStates) -> Iterator[tuple[str, Tensor]]:
        names = self.averaged.parameters.layout.names
        for number, of_parameter in sorted(state.items()):
            for kind, tensor in of_parameter.items():
                yield f"{kind}/{names[number]}", tensor

    def _named_residual(self, residual: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Views of it in the shapes of the parameters."""
        layout = self.averaged.parameters.layout
        for vector_N in residual:
            for name, view in zip(layout.names, layout.views(vector_N), strict=True):
                yield f"{_RESIDUAL}/{name}", view

    def _tensors(self, states: Sequence[Tensor]) -> Iterator[Tensor]:
        """All tensors of all parts."""
        return chain(*(part.tensors for part in self.averaged), states)


def _kinds(named: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """By name, what can be copied into what."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in named.items()}
