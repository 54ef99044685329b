"""The proxy that emulates a link: bytes, ends and resets pass; it holds, drops, cuts and heals as it is told."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream
from tests.alongside import alongside

from shoal_lab.faults.link import Direction, Link, LinkConditions
from shoal_lab.faults.link_grammar import parse_link
from shoal_lab.faults.link_proxy import LinkProxy

LINK = parse_link("80mbit,10ms,jitter=2ms,loss=1%")


class Ends(NamedTuple):
    proxy: LinkProxy
    dialler: SocketStream
    listener: SocketStream


@asynccontextmanager
async def linked(link: Link = LINK) -> AsyncIterator[Ends]:
    """Yield both ends of one connection through a proxy."""
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as multi:
        (inner,) = multi.listeners
        async with (
            LinkProxy(("127.0.0.1", inner.extra(SocketAttribute.local_port)), link) as proxy,
            await anyio.connect_tcp("127.0.0.1", proxy.port) as dialler,
            await inner.accept() as listener,
        ):
            yield Ends(proxy, dialler, listener)


async def receive(stream: SocketStream, num_bytes: int) -> bytes:
    received = b""
    while len(received) < num_bytes:
        received += await stream.receive()
    return received


def reset(stream: SocketStream) -> None:
    stream.extra(SocketAttribute.raw_socket).setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def test_all_bytes_arrive_in_order_both_ways_at_once() -> None:
    async with linked() as (proxy, dialler, listener), anyio.create_task_group() as tasks:
        data = bytes(range(256)) * 1200
        for one, other in ((dialler, listener), (listener, dialler)):
            tasks.start_soon(one.send, data)

            async def check(stream: SocketStream = other) -> None:
                assert await receive(stream, len(data)) == data

            tasks.start_soon(check)
    assert [proxy.taken_bytes(direction) for direction in Direction] == [len(data)] * 2
    assert proxy.model(Direction.OUTWARD).num_lost > 0


@pytest.mark.parametrize("who", ["dialler", "listener"])
async def test_the_end_of_one_direction_leaves_the_other_open(who: str) -> None:
    async with linked() as (_, dialler, listener):
        one, other = (dialler, listener) if who == "dialler" else (listener, dialler)
        await one.send(b"last")
        await one.send_eof()
        assert await other.receive() == b"last"
        with pytest.raises(anyio.EndOfStream):
            await other.receive()
        await other.send(b"answer")
        assert await one.receive() == b"answer"


async def test_a_reset_arrives_as_a_reset() -> None:
    async with linked() as (_, dialler, listener):
        reset(dialler)
        await dialler.aclose()
        with pytest.raises(anyio.BrokenResourceError):
            await listener.receive()


@pytest.mark.parametrize("as_reset", [False, True])
async def test_a_cut_ends_connections_and_refuses_new_ones_until_it_is_healed(as_reset: bool) -> None:
    async with linked() as (proxy, dialler, listener):
        await dialler.send(b"x")
        assert await listener.receive() == b"x"
        proxy.cut(reset=as_reset)
        for end in (dialler, listener):
            with pytest.raises(anyio.BrokenResourceError if as_reset else anyio.EndOfStream):
                await end.receive()
        async with await anyio.connect_tcp("127.0.0.1", proxy.port) as refused:
            with pytest.raises(anyio.BrokenResourceError):
                await refused.receive()
        proxy.heal()
        async with await anyio.connect_tcp("127.0.0.1", proxy.port) as again:
            await again.send(b"back")
            await proxy.taken(Direction.OUTWARD, 5)


async def test_what_is_held_arrives_after_healing_and_nothing_before() -> None:
    async with linked() as (proxy, dialler, listener):
        proxy.hold(Direction.OUTWARD)
        await dialler.send(b"patience")
        await listener.send(b"the other direction passes")
        assert await dialler.receive() == b"the other direction passes"
        with anyio.move_on_after(0.1) as waiting:
            await listener.receive()
        assert waiting.cancelled_caught
        proxy.heal()
        assert await receive(listener, 8) == b"patience"


async def test_what_is_dropped_is_gone_and_its_end_is_not_seen_while_it_is() -> None:
    async with linked() as (proxy, dialler, listener):
        proxy.drop(Direction.OUTWARD)
        await dialler.send(b"gone")
        await proxy.taken(Direction.OUTWARD, 4)
        await dialler.send_eof()
        with anyio.move_on_after(0.1) as waiting:
            await listener.receive()
        assert waiting.cancelled_caught
        proxy.heal()
        with pytest.raises(anyio.EndOfStream):
            await listener.receive()


async def test_each_direction_has_its_own_conditions() -> None:
    async with linked(Link()) as (proxy, dialler, listener):
        proxy.change(LinkConditions(bytes_per_flip=1e-9), Direction.INWARD)
        await dialler.send(bytes(100))
        assert await receive(listener, 100) == bytes(100)
        await listener.send(bytes(100))
        assert all(await receive(dialler, 100))
        assert proxy.model(Direction.INWARD).num_flipped == 100


async def test_a_sender_is_held_up_when_the_queue_of_a_slow_link_is_full() -> None:
    async with linked(Link(outward=LinkConditions(rate_bytes_per_s=1000))) as (proxy, dialler, _):
        async with alongside() as tasks:
            tasks.start_soon(dialler.send, bytes(16 << 20))
            await proxy.taken(Direction.OUTWARD, 64 * 1024)
            with anyio.move_on_after(0.3):
                await proxy.taken(Direction.OUTWARD, 128 * 1024)
        assert 64 * 1024 <= proxy.taken_bytes(Direction.OUTWARD) < 128 * 1024


async def test_a_listener_that_is_not_there_is_a_reset() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and listens to nobody
        async with LinkProxy(bound.getsockname()) as proxy, await anyio.connect_tcp("127.0.0.1", proxy.port) as dialler:
            with pytest.raises(anyio.BrokenResourceError):
                await dialler.receive()


async def test_errors_within_its_context_pass_as_they_are() -> None:
    with pytest.raises(LookupError, match="mine"):
        async with LinkProxy(("127.0.0.1", 1)):
            raise LookupError("mine")
