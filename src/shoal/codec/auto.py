"""One of several codecs, another one in every round: the record before the round names it.

Who encodes is told which one (`encoder_in`). Who decodes is told nothing, since a payload's header says what it is: so
members that were told differently would still come to one average, and only a replay would notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.codec.base import NO_STATE, Codec, CodecState, Encoded
from shoal.codec.gathered import GatheredCodec, payload_bytes
from shoal.codec.payload import form_number
from shoal.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class AutoCodec:
    """See `codec.base.Codec`. Its state is the residual, whichever of the codecs has left it out.

    Attributes:
        choices: The codecs, each with the same feedback; the first one is used where no record has named one.
    """

    choices: tuple[GatheredCodec, ...]
    is_elementwise: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return "auto"

    def named(self, name: str) -> GatheredCodec:
        """The codec of this name; the first one if there is none."""
        return next((choice for choice in self.choices if choice.name == name), self.choices[0])

    def wire_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return self.choices[0].wire_dtypes(dtype)

    def initial_state(self, num_elements: int) -> CodecState:
        return self.choices[0].initial_state(num_elements)

    def max_size_bytes(self, num_elements: int) -> int:
        return max(choice.max_size_bytes(num_elements) for choice in self.choices)

    def encode(self, values_N: Tensor, state: CodecState = NO_STATE) -> Encoded:
        return self.choices[0].encode(values_N, state)

    def decode(self, tensors: tuple[Tensor, ...], out_N: Tensor | None = None) -> Tensor:
        return self._that_wrote(tensors).decode(tensors, out_N)

    def sent(self, tensors: tuple[Tensor, ...], num_elements: int) -> Tensor | None:
        return self._that_wrote(tensors).sent(tensors, num_elements)

    def rounded(self, values_N: Tensor) -> Tensor:
        return self.choices[0].rounded(values_N)

    def _that_wrote(self, tensors: tuple[Tensor, ...]) -> GatheredCodec:
        number = form_number(payload_bytes(tensors))
        for choice in self.choices:
            if choice.form.number == number:
                return choice
        names = ", ".join(choice.name for choice in self.choices)
        raise RemoteProtocolError(f"a payload of form {number} is none of {names}")


def encoder_in(codec: Codec, named: str) -> Codec:
    """What pseudo-gradients are encoded with in a round.

    Args:
        codec: How they travel in the run.
        named: By the record that the round is trained on (`Record.codec`).
    """
    return codec.named(named) if isinstance(codec, AutoCodec) else codec
