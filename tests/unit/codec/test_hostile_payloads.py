"""What a receiver does with payloads that no sender makes: a typed error, and memory for no more than N elements."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import torch
from tests.unit.codec.payload_cases import every_payload, normal, payload_codec
from torch import Tensor

from shoal.codec.base import Codec
from shoal.errors import LocalProtocolError, RemoteProtocolError

N = 5000
HEADER_BYTES = 16


def refused(codec: Codec, content: bytes | bytearray, match: str, num_elements: int = N) -> None:
    payload = (torch.tensor(list(content), dtype=torch.uint8),)
    with pytest.raises(RemoteProtocolError, match=match):
        codec.decode(payload, torch.zeros(num_elements))
    if codec.name == "sparse":
        with pytest.raises(RemoteProtocolError, match=match):
            codec.sent(payload, num_elements)


def content_of(codec: Codec, num_elements: int = N) -> bytearray:
    return bytearray(codec.encode(normal(num_elements)).tensors[0].tolist())


@every_payload
def test_a_payload_that_is_cut_short_or_goes_on_is_refused(name: str) -> None:
    codec = payload_codec(name)
    content = content_of(codec)
    for size in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3, len(content) // 2, len(content) - 1):
        refused(codec, content[:size], "cut short")
    refused(codec, content + b"\0", "1 bytes too many")


@every_payload
@pytest.mark.parametrize(("place", "what"), [(0, "version"), (1, "form"), (2, "parameter"), (4, "zero"), (8, "number")])
def test_a_header_that_says_something_else_is_refused(name: str, place: int, what: str) -> None:
    codec = payload_codec(name)
    content = content_of(codec)
    content[place] ^= 1
    refused(codec, content, "has the header")


@every_payload
@pytest.mark.parametrize("num_elements", [0, N - 1, N + 1])
def test_a_payload_of_another_length_is_refused(name: str, num_elements: int) -> None:
    refused(payload_codec(name), content_of(payload_codec(name)), "has the header", num_elements)


@every_payload
@pytest.mark.parametrize("scale", [0x7FC0, 0x7F80, 0x8000, 0xBF80, 0x7801])
def test_a_scale_that_is_none_is_refused(name: str, scale: int) -> None:
    """NaN, infinite, negative zero, negative, and above 2^112."""
    codec = payload_codec(name)
    content = content_of(codec)
    at = HEADER_BYTES + (4 if name == "sparse" else 0)
    content[at : at + 2] = struct.pack("<H", scale)
    refused(codec, content, "scale that is none")


@every_payload
def test_the_largest_scale_gives_finite_values_whatever_the_codes_are(name: str) -> None:
    codec = payload_codec(name)
    content = content_of(codec, 1)
    at = HEADER_BYTES + (4 if name == "sparse" else 0)
    content[at : at + 2] = struct.pack("<H", 0x7780)
    for code in range(256) if name != "sparse" else [content[-1]]:
        content[-1] = code
        out = codec.decode((torch.tensor(list(content), dtype=torch.uint8),), torch.zeros(1))
        assert out.isfinite().all()


def sparse_parts(codec: Codec, num_elements: int = 4096) -> tuple[bytearray, int]:
    """The payload of a single chunk, and where its quotients begin."""
    content = content_of(codec, num_elements)
    (size,) = struct.unpack_from("<I", content, HEADER_BYTES)
    return content, len(content) - size


def test_more_or_fewer_places_than_the_chunk_has_values_are_refused() -> None:
    codec = payload_codec("sparse")
    content, at = sparse_parts(codec)
    refused(codec, content[:at] + bytes(len(content) - at), "0 places", 4096)
    refused(codec, content[:at] + b"\xff" * (len(content) - at), "places in the chunks of a section, not 256", 4096)


def test_a_gap_beyond_the_end_of_its_chunk_is_refused() -> None:
    codec = payload_codec("sparse", density=1 / 4096)
    content, at = sparse_parts(codec)
    # One value, 8 bits of remainder: with 16 zeros in front its place is 4096 or more.
    content[HEADER_BYTES : HEADER_BYTES + 4] = struct.pack("<I", 3)
    refused(codec, content[:at] + b"\0\0\1", "at most 2", 4096)
    codec = payload_codec("sparse")
    content, at = sparse_parts(codec)
    quotients = int.from_bytes(content[at:], "little")
    # The same number of ones, all later: the last one ends beyond.
    later = (quotients << 8 * (codec.max_size_bytes(4096) - len(content))).to_bytes(
        codec.max_size_bytes(4096) - at, "little"
    )
    content[HEADER_BYTES : HEADER_BYTES + 4] = struct.pack("<I", len(later))
    refused(codec, content[:at] + later, "beyond the end of a chunk", 4096)


def test_a_section_that_claims_gigabytes_is_refused_before_anything_is_made_of_it() -> None:
    codec = payload_codec("sparse")
    content = content_of(codec)
    content[HEADER_BYTES : HEADER_BYTES + 4] = struct.pack("<I", 2**32 - 1)
    payload, out = (torch.tensor(list(content), dtype=torch.uint8),), torch.zeros(N)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="quotients of 4294967295 bytes: at most"):
            codec.decode(payload, out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@every_payload
@pytest.mark.parametrize(
    "tensors",
    [(), (torch.zeros(3),), (torch.zeros(2, 8, dtype=torch.uint8),), (torch.zeros(16, dtype=torch.uint8),) * 2],
)
def test_what_is_not_one_vector_of_bytes_is_refused(name: str, tensors: tuple[Tensor, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match="one vector of bytes"):
        payload_codec(name).decode(tensors, torch.zeros(1))


@every_payload
def test_our_own_mistakes_are_told_from_theirs(name: str) -> None:
    codec = payload_codec(name, 1.0)
    payload = codec.encode(normal(N)).tensors
    with pytest.raises(LocalProtocolError, match="given vector"):
        codec.decode(payload)
    with pytest.raises(LocalProtocolError, match="given vector"):
        codec.decode(payload, torch.zeros(2 * N)[::2])
    for wrong in (torch.zeros(N, dtype=torch.float64), torch.zeros(N, 1)):
        with pytest.raises(LocalProtocolError, match="no float32 CPU vector"):
            codec.decode(payload, wrong)
        with pytest.raises(LocalProtocolError, match="no float32 CPU vector"):
            codec.encode(wrong)
    with pytest.raises(LocalProtocolError, match="a residual of 4999 elements"):
        codec.encode(normal(N), (torch.zeros(N - 1),))
    with pytest.raises(LocalProtocolError, match="float64 cannot be encoded as"):
        codec.wire_dtypes(torch.float64)
