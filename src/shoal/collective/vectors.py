"""A vector that is reduced, and what a member does with its pieces: add, store, encode.

With a wire type (`codec.cast`) every sum that is handed on counts as what the wire makes of it, also where it is read
from shared memory and was never cast: the result does not depend on who shares memory with whom. Sums themselves are
formed in float32. A value that passes h members on its way to the root is rounded h times, and once more at the root.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.codec.cast import decode, encode, rounded
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
        wire: The dtype in which a float32 vector travels; None: its own. The same on all members.

    Raises:
        LocalProtocolError: on construction, if the vector cannot be reduced.
    """

    number: int
    values_N: Tensor
    reduction: Reduction
    wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        values_N = self.values_N
        if values_N.dim() != 1 or not values_N.is_contiguous() or values_N.device.type != "cpu":
            raise LocalProtocolError(f"vector {self.number} of a ring is not a contiguous CPU vector")
        if self.wire is not None and values_N.dtype != torch.float32:
            raise LocalProtocolError(f"vector {self.number} of a ring is {values_N.dtype} and cannot be cast")

    @property
    def wire_dtype(self) -> torch.dtype:
        """As what it travels."""
        return self.wire or self.values_N.dtype

    def piece(self, elements: range) -> Tensor:
        """Its elements in a range, as a view."""
        return self.values_N[elements.start : elements.stop]

    def encoded(self, elements: range) -> Tensor:
        """What travels of it: a view, or a copy in the wire type."""
        own_n = self.piece(elements)
        return own_n if self.wire is None else encode(own_n, self.wire)

    def add(self, elements: range, received_n: Tensor, is_root: bool) -> None:
        """Combine the own piece with a child's, in place, because the sum replaces the contribution.

        Args:
            elements: Indices of the piece.
            received_n: The child's piece, in the wire type, or in float32 from the child's memory.
            is_root: The sum is complete now, and becomes every member's result.
        """
        own_n = self.piece(elements)
        if self.wire is not None:
            is_cast = received_n.dtype == self.wire
            received_n = decode(received_n) if is_cast else rounded(received_n, self.wire)
        if self.reduction is Reduction.SUM:
            torch.add(received_n, own_n, out=own_n)
        else:
            torch.maximum(received_n, own_n, out=own_n)
        if is_root and self.wire is not None:
            own_n.copy_(rounded(own_n, self.wire))

    def store(self, elements: range, received_n: Tensor) -> None:
        """Replace the own piece by the complete one; a conversion from the wire type is exact."""
        self.piece(elements).copy_(received_n)
