"""What the tests of payloads share: the codecs that encode a whole vector, and vectors that are easy to get wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from shoal.codec.base import Codec
from shoal.codec.registry import CodecSettings, codec_of

NAMES = ("int8", "int4", "int4_e3m0", "2bit", "sparse")
EXACT = ("int8", "int4", "int4_e3m0")
every_payload = pytest.mark.parametrize("name", NAMES)
LARGEST = float(np.nextafter(np.float32(2.0**112), np.float32(0)))


def payload_codec(name: str, feedback: float = 0.0, density: float = 0.0625) -> Codec:
    return codec_of(CodecSettings(name, feedback, density))


def kept_of(density: float) -> int:
    return max(1, round(4096 * density))


def normal(num_elements: int, seed: int = 1) -> Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


def bits(tensor: Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


_few = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 3.0, 1e-40, -(2.0**-100), 2.0**-101, LARGEST, 1.00390625])
_any = st.floats(-LARGEST, LARGEST, width=32)
_usual = st.floats(-8, 8, width=32)


@st.composite
def vectors(draw: st.DrawFn, max_elements: int = 5000) -> Tensor:
    """Random values, among them runs of equal ones, with some that were chosen, of lengths near those of rows."""
    near = st.sampled_from([0, 1, 2, 3, 7, 8, 9, 255, 256, 257, 300, 511, 1025, 4095, 4096, 4097, 4100])
    length = draw(st.one_of(near, st.integers(0, max_elements)))
    values = normal(length, draw(st.integers(0, 1000))) * draw(st.sampled_from([1.0, 1e-30, 1e30, 0.0]))
    if draw(st.booleans()):
        # Many equal ones.
        values = values.clamp(-0.1, 0.1).round(decimals=draw(st.integers(1, 3)))
    chosen = draw(st.lists(st.tuples(st.integers(0, 5000), st.one_of(_few, _usual, _any)), max_size=20))
    for place, value in chosen:
        if length:
            values[place % length] = value
    return values
