"""What a codec is: how values travel that need not arrive bit for bit.

    values --> encode --> tensors ~~~ network ~~~> tensors --> decode --> rounded(values)
    state  -->        --> state of the next time

Two uses. Where a sum is formed on its way, each member encodes what it hands on, piece by piece: only an element-wise
codec can be used there. Any other one encodes a member's vector once, whole, and all members decode what all have sent.

Whatever a codec keeps from one time to the next (what rounding has left out so far, say) is a `CodecState`: it is given
and returned, never kept inside, since a state counts only if what was encoded with it has counted.
"""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple, Protocol

import torch
from torch import Tensor

CodecState = tuple[Tensor, ...]
"""What a codec keeps between two encodings, as flat vectors; whose it is keeps it with the rest of its state."""

NO_STATE: Final[CodecState] = ()


class Encoded(NamedTuple):
    """Encoded values, and the state after them. The tensors may share memory with the values."""

    tensors: tuple[Tensor, ...]
    state: CodecState = NO_STATE


class Codec(Protocol):
    """How vectors travel, the same on all members; any thread may call it. N = elements of a vector or a piece of one.

    Attributes:
        is_elementwise: It makes one tensor of N elements, each from one value, and has no state; rounding twice changes
            nothing. So it does not matter how a vector is cut, and who passes a value on passes on the same bits.
    """

    is_elementwise: ClassVar[bool]

    @property
    def name(self) -> str:
        """As configuration and errors call it."""
        ...

    def wire_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        """The dtypes of the tensors that values of a dtype become.

        Raises:
            LocalProtocolError: It cannot encode those.
        """
        ...

    def max_size_bytes(self, num_elements: int) -> int:
        """How many bytes N float32 values become at most."""
        ...

    def initial_state(self, num_elements: int) -> CodecState:
        """The state of who has encoded nothing yet."""
        ...

    def encode(self, values_N: Tensor, state: CodecState = NO_STATE) -> Encoded:
        """Encode values; neither they nor the state are changed.

        Raises:
            LocalProtocolError: The codec is not element-wise, and they are NaN, infinite or too large for it.
        """
        ...

    def decode(self, tensors: tuple[Tensor, ...], out_N: Tensor | None = None) -> Tensor:
        """Return the values of encoded tensors.

        Args:
            tensors: Perhaps a peer's; their dtypes are those of `wire_dtypes`.
            out_N: Where they are put: a float32 vector as long as the encoded one; after an error it may have some of
                them. An element-wise codec can do without: they are then in new memory, or in that of the tensors.

        Raises:
            LocalProtocolError: There is no `out_N`, and the codec is not element-wise.
            RemoteProtocolError: The tensors are not what any values become, or not so many.
        """
        ...

    def sent(self, tensors: tuple[Tensor, ...], num_elements: int) -> Tensor | None:
        """Return which of N elements were sent, as a bool vector, or None if all were; for means over who has sent one.

        Args:
            tensors: Perhaps a peer's, of N elements.

        Raises:
            RemoteProtocolError: As `decode`.
        """
        ...

    def rounded(self, values_N: Tensor) -> Tensor:
        """Return what receivers make of values that are encoded without a state; the same tensor if nothing changes."""
        ...
