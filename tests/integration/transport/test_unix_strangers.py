"""Peers that break the rules, come too often, or say nothing: closed, counted, told why; others are undisturbed."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from shoal.ids import PeerId, RunId
from shoal.transport import unix
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.wire.frame import HEADER, encode_frame
from shoal.wire.handshake import HandshakeDecoder, Hello, Refusal, encode_handshake
from shoal.wire.limits import WireLimits
from shoal.wire.messages.step import Forward, Opened

from .samples import MIB, RUN, A, B, C, key, take, tensor

pytestmark = pytest.mark.anyio


class Stranger:
    """A blocking socket that says whatever a test wants."""

    def __init__(self, target: StreamEndpoint) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(5)
        self.socket.connect(target.addresses[0].removeprefix("unix:"))

    async def say(self, raw: bytes) -> None:
        await anyio.to_thread.run_sync(self.socket.sendall, raw)

    async def hear(self) -> Hello | Refusal:
        decoder = HandshakeDecoder()
        while True:
            raw = await anyio.to_thread.run_sync(self.socket.recv, len(decoder.get_buffer()))
            assert raw, "closed without a word"
            decoder.get_buffer()[: len(raw)] = raw
            said = decoder.advance(len(raw))
            if said is not None:
                return said

    async def is_closed(self) -> bool:
        try:
            return await anyio.to_thread.run_sync(self.socket.recv, 1) == b""
        except ConnectionResetError:
            return True

    async def greet(
        self, *, run: RunId = RUN, peer: PeerId = C, connection: int = 2, previous: int = 0
    ) -> Hello | Refusal:
        await self.say(encode_handshake(Hello(run, peer, "test", (), 1, connection, previous)))
        return await self.hear()


@pytest.fixture
def stranger() -> Iterator[list[Stranger]]:
    strangers: list[Stranger] = []
    yield strangers
    for one in strangers:
        one.socket.close()


BAD_FRAMES = {
    "garbage": b"G" * 100,
    "oversized tensor": b"".join(
        encode_frame(Forward(key(), 0), [tensor(2 * MIB)], limits=WireLimits(max_tensor_bytes=4 * MIB))
    )[:200],
    "oversized body": HEADER.pack(b"SHOL", 1, 0, 0, 1 << 30, 0),
    "no message": HEADER.pack(b"SHOL", 1, 0, 0, 5, 0) + b"\x93abcd",
}


@pytest.mark.parametrize("name", sorted(BAD_FRAMES))
async def test_a_peer_that_breaks_the_protocol_is_closed_and_counted_and_others_are_undisturbed(
    endpoint: Any, stranger: list[Stranger], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = TransportLimits(wire=WireLimits(max_tensor_bytes=MIB))
    a, b = await endpoint(A, limits=limits), await endpoint(B, limits=limits)
    a.introduce(b.hop)
    a.post(B, Opened(key()))
    await take(b, 2)
    stranger.append(Stranger(b))
    assert isinstance(await stranger[0].greet(), Hello)
    await stranger[0].say(b"".join(encode_frame(Opened(key(7)))))
    await stranger[0].say(BAD_FRAMES[name])
    assert await stranger[0].is_closed()
    events = await take(b, 3)
    assert events[:2] == [PeerUp(C), Received(C, Opened(key(7)))]
    assert isinstance(events[2], PeerLost)
    assert b.counters["transport.refused"] == 1
    assert "transport.refused" in caplog.messages
    a.post(B, Opened(key(1)))
    assert await take(b, 1) == [Received(A, Opened(key(1)))]


async def test_a_peer_of_another_run_or_version_is_told_why(endpoint: Any, stranger: list[Stranger]) -> None:
    b = await endpoint(B)
    stranger += [Stranger(b), Stranger(b), Stranger(b)]
    refusal = await stranger[0].greet(run=RunId("other"))
    assert isinstance(refusal, Refusal)
    assert "other" in refusal.reason
    await stranger[1].say(encode_handshake(Hello(RUN, C, "test", (), 1, 2, 0), version=9))
    refusal = await stranger[1].hear()
    assert isinstance(refusal, Refusal)
    assert "version 9" in refusal.reason
    refusal = await stranger[2].greet(peer=B)
    assert isinstance(refusal, Refusal)
    assert "two processes" in refusal.reason
    assert b.counters["transport.refused"] == 3
    for one in stranger:
        assert await one.is_closed()


async def test_silent_and_too_many_connections_are_closed(endpoint: Any, stranger: list[Stranger]) -> None:
    b = await endpoint(B, limits=TransportLimits(handshake_timeout_s=0.2, max_handshaking=2))
    stranger += [Stranger(b), Stranger(b), Stranger(b)]
    refusal = await stranger[2].hear()
    assert isinstance(refusal, Refusal)
    assert await stranger[0].is_closed()
    assert await stranger[1].is_closed()
    assert b.counters["transport.refused"] == 3
    stranger.append(Stranger(b))
    assert isinstance(await stranger[3].greet(), Hello)


async def test_the_socket_is_private_and_peers_of_other_users_are_refused(
    endpoint: Any, stranger: list[Stranger], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = await endpoint(B)
    assert (folder / "b.sock").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(unix.os, "getuid", lambda: 12345)
    stranger.append(Stranger(b))
    refusal = await stranger[0].hear()
    assert isinstance(refusal, Refusal)
    assert "user 12345" in refusal.reason
    assert await stranger[0].is_closed()


async def test_a_second_connection_of_a_peer_is_taken_only_if_the_peer_saw_the_first_one_end(
    endpoint: Any, stranger: list[Stranger]
) -> None:
    b = await endpoint(B)
    stranger += [Stranger(b), Stranger(b), Stranger(b)]
    assert isinstance(await stranger[0].greet(connection=2), Hello)
    refusal = await stranger[1].greet(connection=3)
    assert isinstance(refusal, Refusal)
    assert refusal.duplicate
    assert isinstance(await stranger[2].greet(connection=4, previous=2), Hello)
    assert await take(b, 3) == [PeerUp(C), PeerLost(C, "the peer connected anew"), PeerUp(C)]
    assert await stranger[0].is_closed()
