"""The fields of a sample: what its arrays are called, and which stages of a pipeline each of them goes to.

    inputs   ->  first stage
    labels   ->  where the loss is
    context  ->  every stage, beside what the stage before puts out: positions of packed tokens, lengths

One form holds whatever there is one of for each field: a type and a shape, an array, a place in the pool, a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")
U = TypeVar("U")

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class Fields(NamedTuple, Generic[T]):
    """One thing for each field.

    Attributes:
        context: By name, in the order in which they travel; `Family.context_specs` of the model has the same names.
    """

    inputs: T
    labels: T
    context: Mapping[str, T] = _NONE

    @property
    def everything(self) -> tuple[T, ...]:
        """Of inputs, labels, then the context."""
        return (self.inputs, self.labels, *self.context.values())

    def with_everything(self, values: Iterable[U]) -> Fields[U]:
        """The same fields with other things, which are in the order of `everything`."""
        inputs, labels, *others = values
        return Fields(inputs, labels, dict(zip(self.context, others, strict=True)))

    def each(self, function: Callable[[T], U]) -> Fields[U]:
        """The same fields with what a function makes of each."""
        return self.with_everything(map(function, self.everything))
