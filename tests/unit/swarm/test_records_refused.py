"""Round records that somebody with the key has signed, and that are none: refused, whatever they hold."""

from __future__ import annotations

import msgspec
import pytest

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.swarm.records import unseal
from shoal.wire.messages.round import SignedRecord


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"junk",
        msgspec.msgpack.encode([1, 2, 3]),
        # A text that is none: msgspec says that with another error than for all else.
        msgspec.msgpack.encode([msgspec.Raw(b"\xa3\xff\xfe\xff"), 1]),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_record_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="no round record"):
        unseal(SignedRecord(body, PeerId("a"), b""), "run", lambda *_: None)
