"""Several codecs for one run: who encodes is told which one, and a payload says itself what it is."""

from __future__ import annotations

import pytest
import torch

from shoal.averaging.round_average import averaging_codec
from shoal.codec.auto import AutoCodec, encoder_in
from shoal.codec.cast import BF16
from shoal.codec.gathered import GatheredCodec
from shoal.codec.registry import CodecSettings, codec_of
from shoal.config.diloco import AUTO_BYTES_PER_VALUE, DilocoConfig
from shoal.errors import RemoteProtocolError

NAMES = list(AUTO_BYTES_PER_VALUE)


@pytest.fixture
def codec() -> AutoCodec:
    codec = averaging_codec(DilocoConfig(averaging_compression="auto"))
    assert isinstance(codec, AutoCodec)
    return codec


@pytest.mark.parametrize("name", NAMES)
def test_what_any_of_them_has_encoded_is_decoded_by_all(codec: AutoCodec, name: str) -> None:
    values_N = torch.randn(5000)
    encoder = encoder_in(codec, name)
    assert encoder.name == name
    encoded = encoder.encode(values_N, codec.initial_state(5000))
    expected_N = encoder.decode(encoded.tensors, torch.empty(5000))
    assert codec.decode(encoded.tensors, torch.empty(5000)).equal(expected_N)
    assert codec.sent(encoded.tensors, 5000) is None
    assert encoded.tensors[0].numel() <= codec.max_size_bytes(5000)
    # What one of them has left out the next one has.
    [residual_N] = encoded.state
    assert torch.allclose(expected_N + residual_N, values_N, atol=1e-6)
    assert len(codec.named("int8").encode(values_N, encoded.state).state) == 1


@pytest.mark.parametrize("name", NAMES)
def test_the_rule_knows_what_they_make_of_a_value(codec: AutoCodec, name: str) -> None:
    size_bytes = codec.named(name).max_size_bytes(1 << 20)
    assert size_bytes / (1 << 20) == pytest.approx(AUTO_BYTES_PER_VALUE[name], rel=0.02)


def test_where_no_record_has_named_one_it_is_the_finest(codec: AutoCodec) -> None:
    assert codec.named("").name == codec.named("int4_e3m0").name == NAMES[0]
    values_N = torch.randn(300)
    assert codec.encode(values_N).tensors[0].equal(codec.named("int8").encode(values_N).tensors[0])
    assert codec.rounded(values_N).equal(codec.named("int8").rounded(values_N))
    assert encoder_in(BF16, "int4") is BF16, "who has named a codec in the configuration has that one"


def test_other_payloads_are_refused(codec: AutoCodec) -> None:
    sparse = codec_of(CodecSettings("sparse"))
    assert isinstance(sparse, GatheredCodec)
    payload = sparse.encode(torch.randn(5000)).tensors
    with pytest.raises(RemoteProtocolError, match="none of int8, int4, 2bit"):
        codec.decode(payload, torch.empty(5000))
    with pytest.raises(RemoteProtocolError, match="has no header"):
        codec.decode((torch.zeros(3, dtype=torch.uint8),), torch.empty(5000))
    with pytest.raises(RemoteProtocolError, match="not"):
        codec.sent((torch.zeros(3),), 5000)
