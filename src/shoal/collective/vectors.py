"""A vector that an operation works on, and what a member does with its pieces: add, store, encode.

With a codec every sum that is handed on counts as what receivers make of it, also where it is read from shared memory
and was never encoded: the result does not depend on who shares memory with whom. Sums themselves are formed in the
vector's dtype. A value that passes h members on its way to the root is rounded h times, and once more at the root.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.codec.base import Codec
from shoal.codec.plain import PLAIN
from shoal.errors import LocalProtocolError


class Reduction(enum.Enum):
    """How contributions are combined."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class RingVector:
    """A vector to be reduced in place; N = its elements, n = those of a piece.

    Attributes:
        number: Its `RingPart.buffer`.
        values_N: This member's contribution, later the result: contiguous, on the CPU, with no other user meanwhile.
        reduction: The same on all members.
        codec: How its pieces travel: an element-wise one, the same on all members.

    Raises:
        LocalProtocolError: on construction, if the vector cannot be reduced.
    """

    number: int
    values_N: Tensor
    reduction: Reduction = Reduction.SUM
    codec: Codec = PLAIN

    def __post_init__(self) -> None:
        values_N = self.values_N
        if values_N.dim() != 1 or not values_N.is_contiguous() or values_N.device.type != "cpu":
            raise LocalProtocolError(f"vector {self.number} of a ring is not a contiguous CPU vector")
        if not self.codec.is_elementwise:
            raise LocalProtocolError(f"{self.codec.name} cannot encode a sum on its way: gather what it encodes")
        self.codec.wire_dtypes(values_N.dtype)

    @property
    def wire_dtype(self) -> torch.dtype:
        """As what it travels."""
        [dtype] = self.codec.wire_dtypes(self.values_N.dtype)
        return dtype

    def piece(self, elements: range) -> Tensor:
        """Its elements in a range, as a view."""
        return self.values_N[elements.start : elements.stop]

    def encoded(self, elements: range) -> Tensor:
        """What travels of it: a view, or a copy in the wire's form."""
        [encoded_n] = self.codec.encode(self.piece(elements)).tensors
        return encoded_n

    def add(self, elements: range, received_n: Tensor, is_root: bool, is_encoded: bool = True) -> None:
        """Combine the own piece with a child's, in place, because the sum replaces the contribution.

        Args:
            received_n: The child's.
            is_root: The sum is complete now: it becomes what everybody gets.
            is_encoded: As it travels; if not, it is the child's own, from its memory.
        """
        own_n, codec = self.piece(elements), self.codec
        theirs_n = codec.decode((received_n,)) if is_encoded else codec.rounded(received_n)
        if self.reduction is Reduction.SUM:
            torch.add(theirs_n, own_n, out=own_n)
        else:
            torch.maximum(theirs_n, own_n, out=own_n)
        if is_root:
            own_n.copy_(codec.rounded(own_n))

    def store(self, elements: range, received_n: Tensor, is_encoded: bool = True) -> None:
        """Replace the own piece by the complete one, which is rounded already."""
        if is_encoded:
            self.codec.decode((received_n,), self.piece(elements))
        else:
            self.piece(elements).copy_(received_n)
