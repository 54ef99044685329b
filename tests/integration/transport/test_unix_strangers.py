"""Peers that break the rules, come too often, or say nothing: closed, counted, told why; others are undisturbed."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.linux_calls import needs

from shoal.ids import RunId
from shoal.runtime.linux_calls import LinuxCall
from shoal.transport import unix
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.connection import Connection
from shoal.transport.limits import TransportLimits
from shoal.transport.tcp import TcpCarrier
from shoal.wire.frame import FRAME_VERSION, HEADER, encode_frame
from shoal.wire.handshake import Hello, Refusal
from shoal.wire.limits import WireLimits
from shoal.wire.messages.step import Forward, Opened

from .samples import ALICE, MIB, A, B, C, step, take, tensor
from .strangers import Stranger

BAD_FRAMES = {
    "garbage": b"G" * 100,
    "oversized tensor": b"".join(
        encode_frame(Forward(step(), 0), [tensor(2 * MIB)], limits=WireLimits(max_tensor_bytes=4 * MIB)).in_one_piece()
    )[:200],
    "oversized body": HEADER.pack(b"SHOL", FRAME_VERSION, 0, 0, 1 << 30, 0, 0),
    "no message": HEADER.pack(b"SHOL", FRAME_VERSION, 0, 0, 5, 0, 0) + b"\x93abcd",
}


@pytest.mark.parametrize("name", sorted(BAD_FRAMES))
async def test_a_peer_that_breaks_the_protocol_is_closed_and_counted_and_others_are_undisturbed(
    endpoint: Any, strangers: list[Stranger], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = TransportLimits(wire=WireLimits(max_tensor_bytes=MIB))
    a, b = await endpoint(A, limits=limits), await endpoint(B, limits=limits)
    a.introduce(b.hop)
    a.post(B, Opened(step()))
    await take(b, 2)
    strangers.append(Stranger.on_this_host(b))
    assert isinstance(await strangers[0].greet(C), Hello)
    await strangers[0].say(encode_frame(Opened(step(7))).head)
    await strangers[0].say(BAD_FRAMES[name])
    assert await strangers[0].is_closed()
    events = await take(b, 3)
    assert events[:2] == [PeerUp(C), Received(C, Opened(step(7)))]
    assert isinstance(events[2], PeerLost)
    assert b.counters["transport.refused"] == 1
    assert "transport.refused" in caplog.messages
    a.post(B, Opened(step(1)))
    assert await take(b, 1) == [Received(A, Opened(step(1)))]


async def test_a_peer_of_another_run_or_version_is_told_why(endpoint: Any, strangers: list[Stranger]) -> None:
    b = await endpoint(B)
    strangers += [Stranger.on_this_host(b), Stranger.on_this_host(b), Stranger.on_this_host(b)]
    refusal = await strangers[0].greet(C, run=RunId("other"))
    assert isinstance(refusal, Refusal)
    assert "other" in refusal.reason
    refusal = await strangers[1].greet(C, version=9)
    assert isinstance(refusal, Refusal)
    assert "version 9" in refusal.reason
    refusal = await strangers[2].greet(B)
    assert isinstance(refusal, Refusal)
    assert "two processes" in refusal.reason
    assert b.counters["transport.refused"] == 3
    for one in strangers:
        assert await one.is_closed()


async def test_silent_and_too_many_connections_are_closed(endpoint: Any, strangers: list[Stranger]) -> None:
    b = await endpoint(B, limits=TransportLimits(handshake_timeout_s=0.2, max_handshaking=2))
    strangers += [Stranger.on_this_host(b), Stranger.on_this_host(b), Stranger.on_this_host(b)]
    refusal = await strangers[2].hear()
    assert isinstance(refusal, Refusal)
    assert await strangers[0].is_closed()
    assert await strangers[1].is_closed()
    assert b.counters["transport.refused"] == 3
    strangers.append(Stranger.on_this_host(b))
    assert isinstance(await strangers[3].greet(C), Hello)


@needs(LinuxCall.PEER_CREDENTIALS, "the mode is all that keeps others out, or getpeereid(3), which Linux lacks")
async def test_who_connects_before_an_endpoint_is_open_is_heard_like_any_other(
    host: Any, folder: Path, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, listen = folder / "early.sock", TcpCarrier.listen

    async def listen_later(carrier: TcpCarrier, make: Callable[[], Connection]) -> None:
        strangers.append(Stranger(socket.socket(socket.AF_UNIX)))
        strangers[0].socket.connect(str(path))
        await anyio.wait_all_tasks_blocked()
        await listen(carrier, make)

    monkeypatch.setattr(TcpCarrier, "listen", listen_later)
    opened = await host(ALICE, path=path, limits=TransportLimits(handshake_timeout_s=0.2))
    assert await strangers[0].is_closed(), "it has said nothing in time"
    assert opened.counters["transport.refused"] == 1


async def test_the_socket_is_private_and_peers_of_other_users_are_refused(
    endpoint: Any, strangers: list[Stranger], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = await endpoint(B)
    assert (folder / "b.sock").stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(unix.os, "getuid", lambda: 12345)
    strangers.append(Stranger.on_this_host(b))
    refusal = await strangers[0].hear()
    assert isinstance(refusal, Refusal)
    assert "user 12345" in refusal.reason
    assert await strangers[0].is_closed()


async def test_a_second_connection_of_a_peer_is_taken_only_if_the_peer_saw_the_first_one_end(
    endpoint: Any, strangers: list[Stranger]
) -> None:
    b = await endpoint(B)
    strangers += [Stranger.on_this_host(b), Stranger.on_this_host(b), Stranger.on_this_host(b)]
    assert isinstance(await strangers[0].greet(C, connection=2), Hello)
    refusal = await strangers[1].greet(C, connection=3)
    assert isinstance(refusal, Refusal)
    assert refusal.duplicate
    assert isinstance(await strangers[2].greet(C, connection=4, previous=2), Hello)
    assert await take(b, 3) == [PeerUp(C), PeerLost(C, "the peer connected anew"), PeerUp(C)]
    assert await strangers[0].is_closed()
