"""Codecs that encode a whole vector at once, with error feedback: what one payload leaves out, a later one has.

    values + feedback * residual = e --> payload ~~~> decoded,    residual of the next time = e - decoded

(Seide et al. 2014, "1-bit stochastic gradient descent"; with a decay as in SparseLoCo, arXiv 2508.15706.) Three float32
operations an element, each rounded. Encoding is numpy in one thread: equal bits give equal bytes, however many threads
torch has. Decoding looks codes up, and multiplies small integers with scales of eight bits, which is exact: the values
have the same bits on any hardware.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from shoal.codec.base import NO_STATE, CodecState, Encoded
from shoal.codec.payload import SECTION_ELEMENTS, Bytes, Floats, PayloadForm, PayloadReader, header, sections
from shoal.errors import LocalProtocolError, RemoteProtocolError


@dataclass(frozen=True, slots=True)
class GatheredCodec:
    """See `codec.base.Codec`; a payload is one uint8 tensor (`codec/payload.py`).

    Its state, if it has feedback, is the residual: one float32 vector of N elements. No state counts as zeros.

    Attributes:
        form: How rows become bytes.
        feedback: What the residual is multiplied with before it is added; 0: there is none. At most 1.
    """

    form: PayloadForm
    feedback: float = 0.0
    is_elementwise: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return self.form.name

    def wire_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        if dtype != torch.float32:
            raise LocalProtocolError(f"values of {dtype} cannot be encoded as {self.name}")
        return (torch.uint8,)

    def initial_state(self, num_elements: int) -> CodecState:
        return (torch.zeros(num_elements),) if self.feedback else NO_STATE

    def max_size_bytes(self, num_elements: int) -> int:
        """How many bytes a payload of N elements has at most."""
        parts = sections(num_elements, self.form.row_elements)
        return len(header(self.form, 0)) + sum(self.form.max_bytes(part.rows, part.columns) for part in parts)

    def encode(self, values_N: Tensor, state: CodecState = NO_STATE) -> Encoded:
        """See `Codec.encode`; the payload has memory of its own.

        Raises:
            LocalProtocolError: Values that are no float32 vector of the CPU or not finite; a state of another length.
        """
        pieces = self.pieces(values_N, state)
        while True:
            try:
                next(pieces)
            except StopIteration as done:
                return done.value

    def pieces(self, values_N: Tensor, state: CodecState) -> Generator[None, None, Encoded]:
        """`encode` in pieces of a few milliseconds each, between which others may compute; raises as that does."""
        values = _floats(values_N)
        before = _floats(state[0]) if state and self.feedback else None
        if before is not None and len(before) != len(values):
            raise LocalProtocolError(f"a residual of {len(before)} elements is not that of {len(values)} values")
        residual_N = torch.empty(len(values) if self.feedback else min(len(values), SECTION_ELEMENTS))
        residual = residual_N.numpy()
        parts = [header(self.form, len(values))]
        for start, stop, rows, columns in sections(len(values), self.form.row_elements):
            left = residual[start:stop] if self.feedback else residual[: stop - start]
            if before is None:
                whole = values[start:stop]
            else:
                whole = np.multiply(before[start:stop], np.float32(self.feedback))
                whole += values[start:stop]
            parts += self.form.write(whole.reshape(rows, columns), left.reshape(rows, columns))
            yield
        payload = torch.empty(sum(map(len, parts)), dtype=torch.uint8)
        np.concatenate(parts, out=payload.numpy())
        return Encoded((payload,), (residual_N,) if self.feedback else NO_STATE)

    def decode(self, tensors: tuple[Tensor, ...], out_N: Tensor | None = None) -> Tensor:
        """See `Codec.decode`; it needs `out_N`, whose length the payload must have.

        Raises:
            LocalProtocolError: There is no `out_N`, or it is no float32 vector of the CPU, without gaps.
        """
        if out_N is None or not out_N.is_contiguous():
            raise LocalProtocolError(f"{self.name} decodes into a given vector without gaps alone")
        out = _floats(out_N)
        reader = PayloadReader(payload_bytes(tensors), self.form, len(out))
        for start, stop, rows, columns in sections(len(out), self.form.row_elements):
            self.form.read(reader, out[start:stop].reshape(rows, columns))
        reader.finish()
        return out_N

    def sent(self, tensors: tuple[Tensor, ...], num_elements: int) -> Tensor | None:
        if self.form.sends_all:
            return None
        reader = PayloadReader(payload_bytes(tensors), self.form, num_elements)
        is_sent_N = torch.zeros(num_elements, dtype=torch.bool)
        is_sent = is_sent_N.numpy()
        for start, stop, rows, columns in sections(num_elements, self.form.row_elements):
            self.form.read_sent(reader, is_sent[start:stop].reshape(rows, columns))
        reader.finish()
        return is_sent_N

    def rounded(self, values_N: Tensor) -> Tensor:
        return self.decode(self.encode(values_N).tensors, torch.empty(values_N.shape))


def _floats(vector: Tensor) -> Floats:
    if vector.dtype != torch.float32 or vector.dim() != 1 or vector.device.type != "cpu":
        raise LocalProtocolError(f"{tuple(vector.shape)} of {vector.dtype} on {vector.device} is no float32 CPU vector")
    return vector.detach().contiguous().numpy()


def payload_bytes(tensors: tuple[Tensor, ...]) -> Bytes:
    """The bytes of a payload.

    Raises:
        RemoteProtocolError: The tensors are no payload.
    """
    is_payload = len(tensors) == 1 and tensors[0].dtype == torch.uint8 and tensors[0].dim() == 1
    if not is_payload:
        found = ", ".join(f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in tensors)
        raise RemoteProtocolError(f"a payload is one vector of bytes, not {found or 'nothing'}")
    return tensors[0].contiguous().numpy()
