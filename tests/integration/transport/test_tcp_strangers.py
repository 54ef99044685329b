"""Over TCP: who has no business here, or breaks the rules, is refused and counted; peers go on undisturbed."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import cycle
from typing import Any

import anyio
import pytest
from tests.alongside import alongside, until
from tests.integration.transport.samples import ALICE, BOB, CAROL, over_tcp, step, take
from tests.integration.transport.scene import refusals
from tests.integration.transport.strangers import Stranger

from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.connection import Connection
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.wire.frame import FRAME_VERSION, HEADER, encode_frame
from shoal.wire.handshake import Hello, Refusal
from shoal.wire.messages import Hop
from shoal.wire.messages.step import Opened

OTHER_KEY = b"x" * 32


async def connect(strangers: list[Stranger], target: StreamEndpoint) -> Stranger:
    strangers.append(Stranger.over_tcp(target))
    return strangers[-1]


@asynccontextmanager
async def undisturbed(host: Any, **limits: Any) -> AsyncIterator[StreamEndpoint]:
    """Yield an endpoint with one connection, which must still work when the strangers have been there."""
    a, b = await host(ALICE), await host(BOB, limits=TransportLimits(**limits))
    a.introduce(over_tcp(b))
    a.post(b.peer_id, Opened(step(1)))
    assert await take(b, 2) == [PeerUp(a.peer_id), Received(a.peer_id, Opened(step(1)))]
    yield b
    a.post(b.peer_id, Opened(step(2)))
    assert await take(b, 1) == [Received(a.peer_id, Opened(step(2)))]
    b.post(a.peer_id, Opened(step(3)))
    assert await take(a, 2) == [PeerUp(b.peer_id), Received(b.peer_id, Opened(step(3)))]


async def refused(endpoint: StreamEndpoint, count: int) -> None:
    await until(lambda: endpoint.counters["transport.refused"] >= count)
    assert endpoint.counters["transport.refused"] == count


async def test_a_host_with_another_swarm_key_is_refused_and_told_how_to_compare(
    host: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with undisturbed(host) as b:
        c = await host(CAROL, key=OTHER_KEY)
        c.introduce(over_tcp(b))
        c.post(b.peer_id, Opened(step()))
        (lost,) = await take(c, 1)
        assert isinstance(lost, PeerLost)
        assert "shoal key fingerprint" in lost.reason
        await refused(b, 1)
        assert "transport.refused" in caplog.messages


async def test_a_stranger_that_trusts_anybody_is_refused_for_its_own_certificate(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with undisturbed(host) as b:
        c = await host(CAROL, key=OTHER_KEY)
        carrier = c._carriers[1]
        monkeypatch.setattr(carrier._contexts.client, "verify_mode", 0)
        c.introduce(over_tcp(b))
        c.post(b.peer_id, Opened(step()))
        (lost,) = await take(c, 1)
        assert isinstance(lost, PeerLost)
        await refused(b, 1)


async def test_a_hello_of_another_peer_than_the_certificates_is_refused(host: Any, strangers: list[Stranger]) -> None:
    async with undisturbed(host) as b:
        stranger = await connect(strangers, b)
        await stranger.secure(CAROL)
        refusal = await stranger.greet(ALICE.peer_id)
        assert isinstance(refusal, Refusal)
        assert f"the certificate is for {CAROL.peer_id}" in refusal.reason
        assert await stranger.is_closed()
        await refused(b, 1)


async def test_an_address_where_another_key_answers_is_told_nothing(host: Any) -> None:
    async with undisturbed(host) as b:
        c = await host(CAROL)
        nobody = Identity(b"n" * 32).peer_id
        c.introduce(Hop(nobody, over_tcp(b).addresses))
        c.post(nobody, Opened(step()))
        (lost,) = await take(c, 1)
        assert isinstance(lost, PeerLost)
        assert f"got {b.peer_id}" in lost.reason
        assert c.counters["transport.refused"] == 1
        assert b.counters["transport.accepted"] == 1


async def test_another_version_of_the_protocol_is_told_who_must_upgrade(host: Any, strangers: list[Stranger]) -> None:
    async with undisturbed(host) as b:
        stranger = await connect(strangers, b)
        await stranger.secure(CAROL)
        refusal = await stranger.greet(CAROL.peer_id, version=9)
        assert isinstance(refusal, Refusal)
        assert "version 9" in refusal.reason
        assert "upgrade this side" in refusal.reason
        await refused(b, 1)


GARBAGE = {"instead of TLS": (b"GET / HTTP/1.1\r\n\r\n", False), "instead of a hello": (b"G" * 100, True)}


@pytest.mark.parametrize("name", sorted(GARBAGE))
async def test_garbage_is_refused(host: Any, strangers: list[Stranger], name: str) -> None:
    raw, secured = GARBAGE[name]
    async with undisturbed(host) as b:
        stranger = await connect(strangers, b)
        if secured:
            await stranger.secure(CAROL)
        await stranger.say(raw)
        assert await stranger.is_closed()
        await refused(b, 1)


async def test_an_oversized_frame_closes_its_connection_only(host: Any, strangers: list[Stranger]) -> None:
    async with undisturbed(host) as b:
        stranger = await connect(strangers, b)
        await stranger.secure(CAROL)
        assert isinstance(await stranger.greet(CAROL.peer_id), Hello)
        await stranger.say(encode_frame(Opened(step(7))).head)
        await stranger.say(HEADER.pack(b"SHOL", FRAME_VERSION, 0, 0, 1 << 31, 0, 0))
        assert await stranger.is_closed()
        events = await take(b, 3)
        assert events[:2] == [PeerUp(CAROL.peer_id), Received(CAROL.peer_id, Opened(step(7)))]
        assert isinstance(events[2], PeerLost)
        assert "limit" in events[2].reason
        await refused(b, 1)


@pytest.mark.parametrize("secured", [False, True])
async def test_a_handshake_that_drips_is_ended_at_the_deadline(
    host: Any, strangers: list[Stranger], secured: bool
) -> None:
    async with undisturbed(host, handshake_timeout_s=0.6) as b:
        stranger = await connect(strangers, b)
        if secured:
            await stranger.secure(CAROL)
        opening = b"SHHI\x02\x00\x00" if secured else b"\x16\x03\x01\x02\x00\x01"
        for i in range(1000):
            try:
                await stranger.say(opening[i % len(opening) :][:1] if i < len(opening) else b"\0")
            except OSError:
                break
            with anyio.move_on_after(0.1):
                await anext(b.events())
            if b.counters["transport.refused"]:
                break
        assert await stranger.is_closed()
        await refused(b, 1)


async def test_a_flood_from_four_addresses_that_fills_all_places_keeps_no_peer_out(
    host: Any, strangers: list[Stranger], caplog: pytest.LogCaptureFixture
) -> None:
    flooders = [f"127.0.0.{number}" for number in range(2, 6)]
    async with undisturbed(host, max_handshaking=8, handshake_timeout_s=600.0) as b:
        c = await host(CAROL, limits=TransportLimits(dial_timeout_s=600.0))
        c.introduce(over_tcp(b))
        for source in flooders * 2:
            strangers.append(Stranger.over_tcp(b, source))
        await until(lambda: len(b._admission._strangers) == 8)

        async def reopen() -> None:
            for count, source in enumerate(cycle(flooders), 1):
                strangers.append(Stranger.over_tcp(b, source))
                await until(lambda count=count: b.counters["transport.refused"] >= count)

        async with alongside(reopen):
            await until(lambda: b.counters["transport.refused"] >= 4)
            c.post(b.peer_id, Opened(step(5)))
            assert await take(c, 1) == [PeerUp(b.peer_id)]
            assert await take(b, 2) == [PeerUp(CAROL.peer_id), Received(CAROL.peer_id, Opened(step(5)))]
        pushed_out = [(line["offence"], line["source"]) for line in refusals(caplog)]
        assert set(pushed_out) == {("crowded", source) for source in flooders}
        for one in strangers[:4]:
            assert await one.is_closed()
        for one in strangers:
            one.socket.close()
        await until(lambda: not b._admission._strangers)
        assert len(b._admission.connections) == 2  # of a and c


async def test_strangers_take_no_place_of_this_host(host: Any, strangers: list[Stranger]) -> None:
    async with undisturbed(host, max_handshaking=4, handshake_timeout_s=600.0) as b:
        for _ in range(7):
            await connect(strangers, b)
        await refused(b, 3)
        c = await host(CAROL)
        c.introduce(Hop(b.peer_id, b.addresses[:1]))
        c.post(b.peer_id, Opened(step(5)))
        assert await take(b, 2) == [PeerUp(CAROL.peer_id), Received(CAROL.peer_id, Opened(step(5)))]


@pytest.mark.skipif(sys.platform != "linux", reason="a connection that is gone is not accepted elsewhere")
async def test_a_stranger_that_is_gone_before_it_is_looked_at_is_none_of_this_host(
    host: Any, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with undisturbed(host) as b:
        sources: list[str] = []
        connected = b._admission.connected

        def noted(connection: Connection) -> Connection | None:
            sources.append(connection.source)
            return connected(connection)

        monkeypatch.setattr(b._admission, "connected", noted)
        stranger = await connect(strangers, b)
        stranger.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        stranger.socket.close()
        await until(lambda: sources)
        assert sources == ["0.0.0.0"]


async def test_who_has_the_key_and_comes_under_many_names_keeps_no_peer_out(
    host: Any, strangers: list[Stranger]
) -> None:
    async with undisturbed(host, max_connections=6) as b:
        lost: list[PeerId] = []
        for number in range(12):
            one = Identity(bytes((number,)) * 32)
            strangers.append(Stranger.over_tcp(b, "127.0.0.6"))
            # With all places taken he is closed, whatever he says.
            with suppress(OSError, AssertionError):
                await strangers[-1].secure(one)
                await strangers[-1].greet(one.peer_id)
        c = await host(CAROL)
        c.introduce(over_tcp(b))
        c.post(b.peer_id, Opened(step(9)))
        assert await take(c, 1) == [PeerUp(b.peer_id)]
        events = b.events()
        while (event := await anext(events)) != Received(c.peer_id, Opened(step(9))):
            if isinstance(event, PeerLost):
                lost.append(event.peer)
                assert "127.0.0.6 had most of all" in event.reason
        assert len(lost) == 1
        assert lost[0] not in (ALICE.peer_id, CAROL.peer_id)


async def test_a_peer_with_the_key_may_not_hold_many_connections(host: Any, strangers: list[Stranger]) -> None:
    async with undisturbed(host, max_connections_per_peer=2) as b:
        for _ in range(3):
            await (await connect(strangers, b)).secure(CAROL)
        assert await strangers[2].is_closed()
        await refused(b, 1)
        assert isinstance(await strangers[0].greet(CAROL.peer_id), Hello)
        assert await take(b, 1) == [PeerUp(CAROL.peer_id)]
