"""The run's shared configuration on its way to a host that joins (`TellRun`): msgpack, compressed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from shoal.errors import ConfigError, RecordRejected
from shoal.wire.messages.control import MAX_CONFIG_BYTES

_MAX_UNPACKED_BYTES: Final = 256 * 1024

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


def pack_configuration(shared: Mapping[str, Any]) -> bytes:
    """Return the bytes for a `TellRun`.

    Args:
        shared: JSON values, see `config.shared.shared_configuration`.

    Raises:
        ConfigError: they do not fit into the message.
    """
    packed = zlib.compress(_encode(shared), level=9)
    if len(packed) > MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the configuration that all hosts share takes {len(packed)} bytes, compressed; at most {MAX_CONFIG_BYTES} "
            "are told to hosts that join: shorten model.extra or quant.rules"
        )
    return packed


def unpack_configuration(packed: bytes) -> dict[str, Any]:
    """Return what `pack_configuration` was given, by a peer of the swarm; what it says is checked by who takes it.

    Raises:
        RecordRejected: the bytes are damaged, or far larger once unpacked.
    """
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(packed, _MAX_UNPACKED_BYTES)
        if not stream.eof:
            raise RecordRejected(
                f"the run's configuration is cut off, or has more than {_MAX_UNPACKED_BYTES} bytes once unpacked"
            )
        values = cast(object, _decode(raw))
    except (zlib.error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RecordRejected(f"the run's configuration cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise RecordRejected("the run's configuration is no mapping")
    return cast(dict[str, Any], values)
