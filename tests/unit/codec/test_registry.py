"""What every codec promises, and that the configuration can name each."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from shoal.codec.base import NO_STATE, Codec
from shoal.codec.registry import CODEC_NAMES, CODECS
from shoal.config.diloco import DilocoConfig

INF, NAN = float("inf"), float("nan")
every_codec = pytest.mark.parametrize("codec", list(CODECS.values()), ids=list(CODECS))


def values(num_elements: int) -> torch.Tensor:
    found = torch.randn(num_elements, generator=torch.Generator().manual_seed(2))
    special = torch.tensor([INF, -INF, NAN, 1e38, -1e-38, 0.0])[:num_elements]
    found[: len(special)] = special
    return found


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.int32).tolist()


def test_the_configuration_names_every_codec() -> None:
    assert set(get_args(DilocoConfig.model_fields["averaging_compression"].annotation)) == {*CODEC_NAMES, "auto"}


@every_codec
@pytest.mark.parametrize("num_elements", [0, 1, 2, 1001])
def test_what_is_decoded_is_what_it_calls_rounded(codec: Codec, num_elements: int) -> None:
    before = values(num_elements)
    encoded = codec.encode(before, codec.initial_state(num_elements))
    assert tuple(tensor.dtype for tensor in encoded.tensors) == codec.wire_dtypes(torch.float32)
    out = torch.full((num_elements,), 7.0)
    assert codec.decode(encoded.tensors, out) is out
    expected = bits(codec.rounded(before))
    assert bits(out) == bits(codec.decode(encoded.tensors)) == expected
    assert bits(before) == bits(values(num_elements)), "it changes what it encodes"


@every_codec
def test_an_element_wise_codec_rounds_each_value_by_itself_once_and_has_no_state(codec: Codec) -> None:
    if not codec.is_elementwise:
        return
    whole = values(1001)
    encoded = codec.encode(whole)
    assert [tensor.shape for tensor in encoded.tensors] == [whole.shape]
    assert encoded.state == codec.initial_state(1001) == NO_STATE
    once = codec.rounded(whole)
    assert bits(codec.rounded(once)) == bits(once)
    assert bits(torch.cat([codec.rounded(piece) for piece in whole.split(77)])) == bits(once)
