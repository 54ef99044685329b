"""Payloads: the bytes and values of an independent computation, exact residuals, sizes, and what is refused."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference import payloads
from tests.unit.codec.payload_cases import (
    EXACT,
    LARGEST,
    NAMES,
    bits,
    every_payload,
    kept_of,
    normal,
    payload_codec,
    vectors,
)
from torch import Tensor

from shoal.codec.base import NO_STATE, Codec
from shoal.errors import LocalProtocolError

DENSITIES = (1 / 4096, 1 / 64, 1 / 16, 0.3, 1.0)


def decoded(codec: Codec, tensors: tuple[Tensor, ...], num_elements: int) -> Tensor:
    return codec.decode(tensors, torch.full((num_elements,), 7.0))


@every_payload
@settings(max_examples=25, deadline=None)
@given(values=vectors(), feedback=st.sampled_from([0.0, 0.95, 1.0]), density=st.sampled_from(DENSITIES))
def test_bytes_values_and_residuals_are_those_of_the_plain_computation(
    name: str, values: Tensor, feedback: float, density: float
) -> None:
    codec = payload_codec(name, feedback, density)
    before = normal(len(values), 3) * 0.01
    state = (before,) if feedback else NO_STATE
    kept_values, kept_before = bits(values), bits(before)
    encoded = codec.encode(values, state)
    expected = payloads.encoded(name, values.tolist(), before.tolist() if feedback else [], feedback, kept_of(density))
    assert bytes(encoded.tensors[0].tolist()) == expected.content
    sent = decoded(codec, encoded.tensors, len(values))
    assert bits(sent) == bits(torch.tensor(expected.sent))
    if feedback:
        assert bits(encoded.state[0]) == bits(torch.tensor(expected.residual))
    else:
        assert encoded.state == NO_STATE
    assert (bits(values), bits(before)) == (kept_values, kept_before), "it changes what it is given"


@pytest.mark.parametrize("name", EXACT)
@settings(max_examples=40, deadline=None)
@given(values=vectors())
def test_what_is_sent_and_what_is_left_are_the_values_exactly(name: str, values: Tensor) -> None:
    codec = payload_codec(name, 1.0)
    encoded = codec.encode(values)
    assert torch.equal(decoded(codec, encoded.tensors, len(values)) + encoded.state[0], values)


@every_payload
def test_what_is_left_out_comes_later(name: str) -> None:
    """All that was sent and what is left make up all that was given, but for the rounding of float32."""
    codec = payload_codec(name, 1.0)
    num_elements, num_times = 10_000, 50
    state, given_N, sent_N = codec.initial_state(num_elements), torch.zeros(num_elements).double(), 0.0
    for time in range(num_times):
        values = normal(num_elements, time)
        encoded = codec.encode(values, state)
        state = encoded.state
        given_N += values.double()
        sent_N = sent_N + decoded(codec, encoded.tensors, num_elements).double()
    error = (sent_N + state[0].double() - given_N).abs().max().item()
    assert error <= num_times * 2**-24 * 40
    assert state[0].abs().max() < 40, "the residual must not grow without end"


@every_payload
def test_no_state_counts_as_a_residual_of_zeros(name: str) -> None:
    codec = payload_codec(name, 0.95)
    values = normal(5000)
    without, zeros = codec.encode(values), codec.encode(values, codec.initial_state(5000))
    assert torch.equal(without.tensors[0], zeros.tensors[0])
    assert torch.equal(without.state[0], zeros.state[0])


@every_payload
def test_a_decay_takes_from_what_was_left(name: str) -> None:
    codec, left, values = payload_codec(name, 0.5), normal(5000, 2), normal(5000)
    decayed = payload_codec(name, 1.0).encode(values, (left * 0.5,))
    assert torch.equal(codec.encode(values, (left,)).state[0], decayed.state[0])


@pytest.mark.parametrize(
    ("name", "density", "times_smaller"),
    [
        ("int8", 1, 3.95),
        ("int4", 1, 7.8),
        ("int4_e3m0", 1, 7.8),
        ("2bit", 1, 15),
        ("sparse", 1 / 16, 64),
        ("sparse", 1 / 64, 200),
    ],
)
def test_a_payload_is_as_small_as_it_says(name: str, density: float, times_smaller: float) -> None:
    values = normal(1_000_003)
    [payload] = payload_codec(name, density=density).encode(values).tensors
    assert values.nbytes / payload.nbytes >= times_smaller


@every_payload
@pytest.mark.parametrize("num_elements", [0, 1, 255, 4097, 300_001])
@pytest.mark.parametrize("density", [1 / 64, 1.0])
def test_no_payload_is_larger_than_the_most_that_it_can_be(name: str, num_elements: int, density: float) -> None:
    codec = payload_codec(name, density=density)
    # All that is sent of a chunk lies at its end: the first gap is as long as it can be.
    late = torch.arange(num_elements).float() % 4096
    for values in (late, normal(num_elements)):
        [payload] = codec.encode(values).tensors
        assert payload.nbytes <= codec.max_size_bytes(num_elements)
        if name != "sparse":
            assert payload.nbytes == codec.max_size_bytes(num_elements)
    if name == "sparse" and num_elements == 300_001:
        assert codec.encode(late).tensors[0].nbytes > 0.9 * codec.max_size_bytes(num_elements)


@every_payload
def test_a_long_vector_is_one_section_after_the_other(name: str) -> None:
    codec, header_bytes = payload_codec(name), 16
    section, rest = 2**18, 3 * 4096 + 77
    values = normal(section + rest)
    [payload] = codec.encode(values).tensors
    cuts = [values[:section], values[section : section + rest - 77], values[section + rest - 77 :]]
    alone = [codec.encode(cut).tensors[0][header_bytes:] for cut in cuts]
    if name in ("int4", "int4_e3m0", "2bit"):
        # Their blocks are shorter: the last 77 begin one of their own, as they do here.
        alone[1] = codec.encode(cuts[1]).tensors[0][header_bytes:]
    assert torch.equal(payload[header_bytes:], torch.cat(alone))
    parts = [decoded(codec, codec.encode(cut).tensors, len(cut)) for cut in cuts]
    assert torch.equal(decoded(codec, (payload,), len(values)), torch.cat(parts))


@every_payload
def test_the_number_of_threads_changes_nothing(name: str) -> None:
    codec, values, before = payload_codec(name, 0.95), normal(600_000), normal(600_000, 2)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 4):
            torch.set_num_threads(number)
            encoded = codec.encode(values, (before,))
            found.append((encoded.tensors[0].clone(), encoded.state[0], decoded(codec, encoded.tensors, 600_000)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, four) for one, four in zip(*found, strict=True))


@every_payload
def test_zeros_are_sent_as_zeros_and_leave_none(name: str) -> None:
    codec = payload_codec(name, 1.0)
    encoded = codec.encode(torch.zeros(5000))
    assert not decoded(codec, encoded.tensors, 5000).any()
    assert not encoded.state[0].any()


@every_payload
def test_values_too_small_for_a_scale_are_left_for_later(name: str) -> None:
    codec = payload_codec(name, 1.0)
    for size, is_sent in ((2.0**-80, True), (2.0**-101, False)):
        values = normal(5000).clamp(-1, 1) * size
        encoded = codec.encode(values)
        assert bool(decoded(codec, encoded.tensors, 5000).any()) is is_sent
        assert is_sent or torch.equal(encoded.state[0], values)


@every_payload
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 2.0**112])
@pytest.mark.parametrize("place", [0, 4999])
def test_what_is_no_number_is_not_encoded(name: str, wrong: float, place: int) -> None:
    values = normal(5000)
    values[place] = wrong
    with pytest.raises(LocalProtocolError, match="NaN, infinite or huge"):
        payload_codec(name).encode(values)
    with pytest.raises(LocalProtocolError, match="NaN, infinite or huge"):
        payload_codec(name, 1.0).encode(normal(5000), (values,))


@every_payload
def test_the_largest_values_are_encoded_and_stay_finite(name: str) -> None:
    codec = payload_codec(name, 1.0, density=1.0)
    values = torch.full((5000,), LARGEST)
    values[::2] *= -1
    encoded = codec.encode(values)
    sent = decoded(codec, encoded.tensors, 5000)
    assert torch.allclose(sent, values, rtol=2**-7)
    assert encoded.state[0].isfinite().all()


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    codec = payload_codec("sparse", density=2 / 4096)
    values = torch.zeros(2 * 4096)
    values[[5, 9, 4000]] = torch.tensor([1.0, -1.0, 1.0])
    just_below = 1.0 - 2.0**-24
    values[[4096 + 6, 4096 + 7, 4096 + 8, 4096 + 9]] = torch.tensor([just_below, 1.0, 2.0, -1.0])
    is_sent = codec.sent(codec.encode(values).tensors, len(values))
    assert is_sent is not None
    assert is_sent.nonzero().flatten().tolist() == [5, 9, 4096 + 7, 4096 + 8]


@pytest.mark.parametrize("num_elements", [0, 1, 100, 4096, 300_000])
@pytest.mark.parametrize("density", DENSITIES)
def test_sparse_says_which_values_it_sends(density: float, num_elements: int) -> None:
    codec, values = payload_codec("sparse", density=density), normal(num_elements)
    tensors = codec.encode(values).tensors
    is_sent = codec.sent(tensors, num_elements)
    assert is_sent is not None
    whole, rest = divmod(num_elements, 4096)
    assert int(is_sent.sum()) == whole * kept_of(density) + -(-kept_of(density) * rest // 4096)
    assert torch.equal(is_sent, decoded(codec, tensors, num_elements) != 0)
    for chunk, sent in zip(values.split(4096), is_sent.split(4096), strict=True):
        if not sent.all():
            assert chunk[sent].abs().min() >= chunk[~sent].abs().max()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sparse"])
def test_all_others_send_every_value(name: str) -> None:
    codec = payload_codec(name)
    assert codec.sent(codec.encode(normal(100)).tensors, 100) is None


GOLDEN = {
    "int8": "60acd24638a61c8a6ac9f8d4e7920edc713001ac7b07ce75e3ce1df5bed05038",
    "int4": "44fe295d3a6032d13b731f063792309f88132fe118e15326901d6a705b8edbbd",
    "int4_e3m0": "6e43dd8c300ea12a249b0d9e59e5f6514c54739907b2371fc20bd5115351db65",
    "2bit": "a3c3192113c2dcac7669f883bb8b67ef98589c61c857110cd9c84dc9630c6fa4",
    "sparse": "2fd7a693d176f555195e936428e2f45e2ca7401e848aff24c34e4ebf702be2d5",
}
"""SHA-256 of payloads of version 1. Other bytes are another version: see `codec/payload.py`."""


@every_payload
def test_a_version_of_payloads_keeps_its_bytes(name: str) -> None:
    # Longer than a section; whole numbers, so that no library's random numbers matter.
    numbers = torch.arange(300_001) * 2654435761 % 1_000_003 - 500_000
    [payload] = payload_codec(name).encode(numbers.float() / 1000).tensors
    assert hashlib.sha256(payload.numpy().tobytes()).hexdigest() == GOLDEN[name]
