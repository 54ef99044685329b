"""The first exchange: complete, bounded, and clear about who has to upgrade."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import HandshakeError
from shoal.ids import PeerId, RunId
from shoal.wire.handshake import (
    MAGIC,
    MAX_BODY_BYTES,
    PREFIX,
    PROTOCOL_VERSION,
    HandshakeDecoder,
    Hello,
    Refusal,
    check_hello,
    encode_handshake,
)

HELLO = Hello(RunId("run-1"), PeerId("alice"), "server", ("unix:/tmp/a",), 1, 2, 0)


def feed(raw: bytes, piece: int) -> tuple[Hello | Refusal | None, int]:
    """Return what the decoder says and how many bytes it took."""
    decoder, taken = HandshakeDecoder(), 0
    while taken < len(raw):
        space = decoder.get_buffer()
        num_bytes = min(piece, len(space), len(raw) - taken)
        space[:num_bytes] = raw[taken : taken + num_bytes]
        taken += num_bytes
        said = decoder.advance(num_bytes)
        if said is not None:
            return said, taken
    return None, taken


@pytest.mark.parametrize("piece", [1, 3, 10_000])
@pytest.mark.parametrize("said", [HELLO, Refusal("busy", True)])
def test_a_handshake_message_arrives_and_not_a_byte_behind_it_is_taken(said: Hello | Refusal, piece: int) -> None:
    raw = encode_handshake(said)
    assert feed(raw + b"SHOL frames follow", piece) == (said, len(raw))


@pytest.mark.parametrize(
    ("version", "says"), [(PROTOCOL_VERSION + 1, "upgrade this side"), (PROTOCOL_VERSION - 1, "upgrade the other side")]
)
@pytest.mark.parametrize("said", [HELLO, Refusal("version")])
def test_another_protocol_version_says_which_side_to_upgrade(said: Hello | Refusal, version: int, says: str) -> None:
    with pytest.raises(HandshakeError, match=says):
        feed(encode_handshake(said, version), 10_000)


@pytest.mark.parametrize(
    "raw",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        PREFIX.pack(MAGIC, PROTOCOL_VERSION, 0, MAX_BODY_BYTES + 1),
        PREFIX.pack(MAGIC, PROTOCOL_VERSION, 0, 0),
        PREFIX.pack(MAGIC, PROTOCOL_VERSION, 2, 1) + b"\x00",
        PREFIX.pack(MAGIC, PROTOCOL_VERSION, 0, 1) + b"\x00",
    ],
)
def test_what_is_no_handshake_is_refused(raw: bytes) -> None:
    with pytest.raises(HandshakeError):
        feed(raw, 10_000)


def test_a_hello_with_absurd_fields_is_refused() -> None:
    for change in ({"role": "x" * 600}, {"addresses": ("a",) * 9}, {"generation": -1}):
        body = msgspec.msgpack.encode(msgspec.structs.replace(HELLO, **change))
        with pytest.raises(HandshakeError, match="schema"):
            feed(PREFIX.pack(MAGIC, PROTOCOL_VERSION, 0, len(body)) + body, 10_000)


@given(raw=st.binary(min_size=1, max_size=300), piece=st.integers(1, 40))
def test_garbage_raises_nothing_but_a_handshake_error(raw: bytes, piece: int) -> None:
    try:
        said, _ = feed(raw, piece)
    except HandshakeError:
        return
    assert said is None


def test_a_peer_of_another_run_or_with_our_own_id_or_another_one_than_dialled_is_refused() -> None:
    run, own = RunId("run-1"), PeerId("bob")
    check_hello(HELLO, run_id=run, own_peer=own, expected=PeerId("alice"))
    with pytest.raises(HandshakeError, match="run-2"):
        check_hello(HELLO, run_id=RunId("run-2"), own_peer=own)
    with pytest.raises(HandshakeError, match="two processes"):
        check_hello(HELLO, run_id=run, own_peer=PeerId("alice"))
    with pytest.raises(HandshakeError, match="out of date"):
        check_hello(HELLO, run_id=run, own_peer=own, expected=PeerId("carol"))


def test_an_endless_list_of_addresses_is_not_even_sent() -> None:
    with pytest.raises(HandshakeError, match="announce less"):
        encode_handshake(msgspec.structs.replace(HELLO, addresses=("a" * 500,) * 20))
