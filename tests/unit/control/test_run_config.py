"""The shared configuration on its way to a host that joins."""

from __future__ import annotations

import secrets
import zlib

import msgspec
import pytest

from shoal.config import Config
from shoal.config.shared import shared_configuration
from shoal.control.run_question import pack_configuration, unpack_configuration
from shoal.errors import ConfigError, RecordRejected
from shoal.wire.messages.control import MAX_CONFIG_BYTES


def test_what_is_packed_comes_back_and_is_small() -> None:
    shared = shared_configuration(Config())
    packed = pack_configuration(shared)
    assert unpack_configuration(packed) == shared
    assert len(packed) < MAX_CONFIG_BYTES // 2


def test_a_configuration_that_does_not_fit_is_refused_before_it_is_told() -> None:
    with pytest.raises(ConfigError, match=r"model\.extra"):
        pack_configuration({"model": {"extra": {"noise": secrets.token_hex(MAX_CONFIG_BYTES)}}})


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"garbage",
        zlib.compress(b"\xc1"),
        zlib.compress(msgspec.msgpack.encode([1, 2])),
        pack_configuration({"a": 1})[:-2],
        zlib.compress(msgspec.msgpack.encode({"bomb": "x" * 10_000_000})),
    ],
    ids=["empty", "garbage", "no msgpack", "no mapping", "cut off", "bomb"],
)
def test_damaged_and_exploding_bytes_are_rejected(packed: bytes) -> None:
    with pytest.raises(RecordRejected):
        unpack_configuration(packed)
