"""Somebody who has the swarm's key, or has listened to one who has: dripped, cut off, replayed and changed traffic."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
from tests.integration.transport.samples import CAROL, KEY, MIB, RUN, port_of, step, tensor
from tests.integration.transport.scene import refusals, talking
from tests.integration.transport.strangers import TIMEOUT_S, Stranger

from shoal.errors import Offence
from shoal.identity import Identity
from shoal.runtime.process_info import resident_bytes
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.peers import StreamEndpoint
from shoal.transport.tls import tls_contexts
from shoal.wire.frame import FRAME_VERSION, HEADER, encode_frame
from shoal.wire.handshake import Hello, encode_handshake
from shoal.wire.messages.snapshot import OfferSnapshot
from shoal.wire.messages.step import Forward, Opened


async def insider(
    scene: Any, strangers: list[Stranger], identity: Identity = CAROL, source: str = "127.0.0.1"
) -> Stranger:
    """Somebody with the key who has said hello."""
    strangers.append(Stranger.over_tcp(scene.target, source))
    await strangers[-1].secure(identity)
    assert isinstance(await strangers[-1].greet(identity.peer_id), Hello)
    return strangers[-1]


def frame(number: int = 0) -> bytes:
    return b"".join(encode_frame(Forward(step(number), 0), [tensor(300)]).in_one_piece())


async def test_frames_that_drip_are_taken_when_they_are_whole_and_disturb_nobody(
    host: Any, strangers: list[Stranger]
) -> None:
    async with talking(host) as scene:
        carol = await insider(scene, strangers)
        raw = frame() + bytes(encode_frame(Opened(step(1))).head)
        for byte in raw:
            await carol.say(bytes((byte,)))
        await scene.until(lambda: len(scene.others) == 3, "both frames")
        await scene.goes_on()
    [up, first, second] = scene.others
    assert up == PeerUp(CAROL.peer_id)
    assert isinstance(first, Received)
    assert isinstance(second, Received)
    assert (first.message, len(first.tensors[0].data)) == (Forward(step(), 0), 300)
    assert second.message == Opened(step(1))


async def test_tensors_that_are_announced_and_then_drip_cost_only_what_has_come(
    host: Any, strangers: list[Stranger]
) -> None:
    announced = 512 * MIB
    body = bytes(encode_frame(Forward(step(), 0), [tensor(1)]).head)[HEADER.size :].replace(b"\x91\x01", b"\x91\xce")
    body += announced.to_bytes(4, "big")
    head = HEADER.pack(b"SHOL", FRAME_VERSION, 0, 1, len(body), announced, announced) + body
    async with talking(host) as scene:
        before = resident_bytes()
        for index in range(8):
            one = await insider(scene, strangers, Identity(bytes((index,)) * 32))
            await one.say(head + bytes(1000))
            for _ in range(20):
                await one.say(bytes(1))
        await scene.goes_on()
        # Four gigabytes are announced, eight kilobytes have come.
        assert scene.refused(Offence.FRAME) == 0
        assert sum(isinstance(event, PeerUp) for event in scene.others) == 8
        assert resident_bytes() - before < 32 * MIB


def _long_body() -> bytes:
    """A message without tensors, of some 2 MiB."""
    return b"".join(encode_frame(OfferSnapshot(bytes(2 * MIB), b"")).in_one_piece())


def _tensor() -> bytes:
    return b"".join(encode_frame(Forward(step(), 0), [tensor(2 * MIB)]).in_one_piece())


@pytest.mark.parametrize("whole", [_tensor, _long_body])
async def test_what_has_come_of_frames_that_never_end_is_bounded_in_sum_and_who_floods_loses_his_own(
    host: Any, strangers: list[Stranger], whole: Callable[[], bytes]
) -> None:
    async with talking(host, max_unfinished_total_bytes=9 * MIB) as scene:
        # Of all of them it holds most, and is the only one of its address.
        other = await insider(scene, strangers, source="127.0.0.2")
        theirs = b"".join(encode_frame(Forward(step(1), 0), [tensor(4 * MIB)]).in_one_piece())
        await other.say(theirs[:-1])
        names = [Identity(bytes((number,)) * 32) for number in range(6)]
        for name in names:
            one = await insider(scene, strangers, name)
            await one.say(whole()[:-1])
        # Two of them fit beside it.
        await scene.until(lambda: sum(isinstance(e, PeerLost) for e in scene.others) == 4, "the rest is lost")
        await scene.goes_on()
        await scene.until(lambda: len(scene.target._inbound.pool._leases) <= 3, "what had come is gone as well")
        await other.say(theirs[-1:])
        await scene.until(lambda: isinstance(scene.others[-1], Received), "the other one is heard")
        lost = [event for event in scene.others if isinstance(event, PeerLost)]
        assert {event.peer for event in lost} <= {name.peer_id for name in names}
        assert all(event.reason.startswith("overloaded: it does not end what it sends; ") for event in lost)
        assert scene.target.metrics.counter("transport.lost", cause="overloaded").value == 4


async def test_frames_that_end_are_not_counted_any_more(host: Any, strangers: list[Stranger]) -> None:
    async with talking(host, max_unfinished_total_bytes=5 * MIB) as scene:
        carol = await insider(scene, strangers)
        for _ in range(4):
            await carol.say(_tensor() + _long_body())
        await scene.until(lambda: len(scene.others) == 9, "all of them")
        assert scene.target._inbound._unfinished.total_bytes == 0
        await carol.say(_tensor()[:-1])
        carol.socket.shutdown(socket.SHUT_RDWR)
        await scene.until(lambda: len(scene.others) == 10, "it is lost")
        assert scene.target._inbound._unfinished.total_bytes == 0


async def test_tensors_that_are_announced_count_where_their_memory_is_taken_at_once(
    host: Any, strangers: list[Stranger]
) -> None:
    async with talking(host, max_unfinished_total_bytes=5 * MIB) as scene:
        # As page-locked memory does.
        scene.target.receive_into(lambda num_bytes: np.ones(num_bytes, dtype=np.uint8))
        for number in range(3):
            one = await insider(scene, strangers, Identity(bytes((number,)) * 32))
            await one.say(_tensor()[:1000])
        await scene.until(lambda: any(isinstance(e, PeerLost) for e in scene.others), "one is lost")
        await scene.goes_on()
        assert scene.target.metrics.counter("transport.lost", cause="overloaded").value == 1


@pytest.mark.parametrize("at", [10, HEADER.size + 5, -100])
async def test_a_frame_that_is_cut_off_is_not_taken_and_its_peer_is_lost(
    host: Any, strangers: list[Stranger], at: int
) -> None:
    async with talking(host) as scene:
        carol = await insider(scene, strangers)
        await carol.say(frame(1) + frame(2)[:at])
        await scene.until(lambda: len(scene.others) == 2, "the whole one")
        carol.socket.shutdown(socket.SHUT_RDWR)
        await scene.until(lambda: len(scene.others) == 3, "it is lost")
    _, whole, lost = scene.others
    assert isinstance(whole, Received)
    assert whole.message == Forward(step(1), 0)
    assert isinstance(lost, PeerLost)
    assert "within a frame" in lost.reason


def _recorded(target: StreamEndpoint) -> bytes:
    """Talk to the target as a peer does, and return every byte that went to it over the wire."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    secure = tls_contexts(CAROL, KEY).client.wrap_bio(incoming, outgoing)
    sent = bytearray()
    with socket.create_connection(("127.0.0.1", port_of(target)), TIMEOUT_S) as wire:

        def exchange(call: Any) -> Any:
            while True:
                try:
                    result = call()
                except ssl.SSLWantReadError:
                    result = None
                raw = outgoing.read()
                wire.sendall(raw)
                sent.extend(raw)
                if result is not None:
                    return result
                incoming.write(wire.recv(1 << 16))

        exchange(lambda: secure.do_handshake() or True)
        hello = encode_handshake(Hello(RUN, CAROL.peer_id, "test", (), 1, 2, 0))
        exchange(lambda: secure.write(hello + bytes(encode_frame(Opened(step(7))).head)))
        assert exchange(lambda: secure.read(1)), "the target answers"
    return bytes(sent)


async def test_traffic_that_somebody_has_listened_to_is_worth_nothing_a_second_time(
    host: Any, strangers: list[Stranger], caplog: pytest.LogCaptureFixture
) -> None:
    async with talking(host) as scene:
        raw = await anyio.to_thread.run_sync(_recorded, scene.target)
        await scene.until(lambda: len(scene.others) == 3, "the true one has come, talked and gone")
        assert [type(event) for event in scene.others] == [PeerUp, Received, PeerLost]
        strangers.append(Stranger.over_tcp(scene.target))
        await strangers[0].say(raw)
        assert await strangers[0].is_closed()
        await scene.has_refused(Offence.TLS)
        assert len(scene.others) == 3, "nothing of it was delivered"
        [line] = refusals(caplog)
        assert line["offence"] == "tls"
