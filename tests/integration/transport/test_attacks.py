"""Attacks on a busy endpoint: counted by offence, logged in few lines, bounded in memory, and nobody else notices."""

from __future__ import annotations

import os
import socket
import ssl
from collections import Counter
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
import pytest
from tests.alongside import until
from tests.integration.transport.samples import BOB, CAROL, KEY, MIB, RUN, over_tcp, step, take, tensor
from tests.integration.transport.scene import Scene, refusals, talking
from tests.integration.transport.strangers import TIMEOUT_S, Stranger

from shoal.control.run_question import RunTeller
from shoal.errors import Offence
from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.transport import tls_stream
from shoal.transport.base import PeerLost, PeerUp
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.transport.rests import Pace
from shoal.transport.tls import tls_contexts
from shoal.wire.frame import FRAME_VERSION, HEADER, encode_frame
from shoal.wire.handshake import Hello, encode_handshake
from shoal.wire.messages.control import AskRun, Heartbeat
from shoal.wire.messages.step import Forward, Opened

MAX_LINES = 25
"""Of one event in ten seconds, whoever causes it."""


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_five_hundred_connections_that_say_nothing_take_no_place_no_memory_and_no_log(
    host: Any, strangers: list[Stranger], caplog: pytest.LogCaptureFixture
) -> None:
    async with talking(host, handshake_timeout_s=20.0) as scene:
        before = _rss_bytes()
        for _ in range(10):
            await anyio.to_thread.run_sync(_connect, strangers, scene.target, 50)
            await scene.goes_on()
        await scene.has_refused(Offence.CROWDED, 500 - 64)
        await scene.until(lambda: len(scene.target._admission.connections) == 1 + 64, "the others are gone")
        assert _rss_bytes() - before < 48 * MIB
        assert len(refusals(caplog)) <= 3 * MAX_LINES
        assert {line["source"] for line in refusals(caplog)} == {"127.0.0.1"}
        # A peer is not kept out: see `test_tcp_strangers`.


def _connect(strangers: list[Stranger], target: StreamEndpoint, count: int) -> None:
    for _ in range(count):
        strangers.append(Stranger.over_tcp(target))


async def _let_in(target: StreamEndpoint, strangers: list[Stranger]) -> None:
    """The first of them has the key, and is a peer."""
    strangers.append(Stranger.over_tcp(target))
    await strangers[0].secure(CAROL)
    assert isinstance(await strangers[0].greet(CAROL.peer_id), Hello)


async def test_connections_that_say_nothing_are_ended_at_the_deadline(
    host: Any, strangers: list[Stranger], caplog: pytest.LogCaptureFixture
) -> None:
    async with talking(host, handshake_timeout_s=0.5) as scene:
        for _ in range(8):
            strangers.append(Stranger.over_tcp(scene.target))
        await scene.has_refused(Offence.SLOW, 8)
        for one in strangers:
            assert await one.is_closed()
        assert scene.others == []
        assert refusals(caplog)[0]["reason"] == "no hello within 0.5 s"


async def test_a_flood_of_garbage_is_counted_whole_and_logged_in_fewrefusals(
    host: Any, strangers: list[Stranger], caplog: pytest.LogCaptureFixture
) -> None:
    async with talking(host) as scene:
        for _ in range(100):
            with anyio.fail_after(TIMEOUT_S):
                one = Stranger.over_tcp(scene.target)
                with suppress(OSError):
                    # Not random: a second byte of 3 would begin a record of TLS, whose length would be waited for.
                    await one.say(b"GG" + os.urandom(4094))
                assert await one.is_closed()
                one.socket.close()
        await scene.has_refused(Offence.TLS, 100)
        lines = refusals(caplog)
        assert 1 <= len(lines) <= MAX_LINES
        assert (lines[0]["source"], lines[0]["offence"]) == ("127.0.0.1", "tls")
        assert scene.others == []


async def test_a_peer_without_tls_is_refused(host: Any, strangers: list[Stranger]) -> None:
    async with talking(host) as scene:
        strangers.append(Stranger.over_tcp(scene.target))
        await strangers[0].say(encode_handshake(Hello(RUN, CAROL.peer_id, "test", (), 1, 2, 0)))
        assert await strangers[0].is_closed()
        await scene.has_refused(Offence.TLS)
        assert scene.others == []


async def test_a_wrong_swarm_key_is_counted_as_such(
    host: Any, strangers: list[Stranger], caplog: pytest.LogCaptureFixture
) -> None:
    async with talking(host) as scene:
        strangers.append(Stranger.over_tcp(scene.target))
        with pytest.raises(ssl.SSLError):
            await strangers[0].secure(CAROL, b"x" * 32)
        await scene.has_refused(Offence.SWARM_KEY)
        assert "shoal key fingerprint" in refusals(caplog)[0]["reason"]
        assert scene.others == []


def _frame(body: object, *, count: int = 0, payload: int = 0, traffic: int = 4, version: int = FRAME_VERSION) -> bytes:
    raw = msgspec.msgpack.encode(body)
    return HEADER.pack(b"SHOL", version, traffic, count, len(raw), payload, payload) + raw


KEY_OF_STEP = [0, 0, 1, 0]
BAD_FRAMES = {
    "garbage": os.urandom(200),
    "oversized body": HEADER.pack(b"SHOL", FRAME_VERSION, 4, 0, 1 << 31, 0, 0),
    "oversized tensors": HEADER.pack(b"SHOL", FRAME_VERSION, 0, 1, 10, 1 << 62, 0),
    "too many tensors": HEADER.pack(b"SHOL", FRAME_VERSION, 0, 60_000, 10, 0, 0),
    "an unknown message": _frame([["reboot", 1], []]),
    "a field too many": _frame([["opened", KEY_OF_STEP, 1, 1], []]),
    "a field of another type": _frame([["opened", "now"], []]),
    "a message too long for its type": _frame([["refused", KEY_OF_STEP, "x" * (2 * MIB)], []]),
    "an endless nest": HEADER.pack(b"SHOL", FRAME_VERSION, 4, 0, 60_000, 0, 0) + b"\x91" * 60_000,
    "text that is no text": _frame([["refused", KEY_OF_STEP, "abc"], []]).replace(b"abc", b"\xff\xfe\xff"),
    "a tensor where none belongs": _frame([["opened", KEY_OF_STEP], [["uint8", [4]]]], count=1, payload=4),
    "no tensor where one belongs": _frame([["forward", KEY_OF_STEP, 0], []]),
    "an unknown element type": _frame([["forward", KEY_OF_STEP, 0], [["object", [4]]]], count=1, payload=4),
    "a negative size": _frame([["forward", KEY_OF_STEP, 0], [["uint8", [-4, -1]]]], count=1, payload=4),
    "an absurd shape": _frame([["forward", KEY_OF_STEP, 0], [["uint8", [1 << 40] * 8]]], count=1, payload=4),
    "too many dimensions": _frame([["forward", KEY_OF_STEP, 0], [["uint8", [1] * 9]]], count=1, payload=1),
    "another length than the shape says": _frame([["forward", KEY_OF_STEP, 0], [["uint8", [4]]]], count=1, payload=5),
    "an unknown kind of traffic": _frame([["opened", KEY_OF_STEP], []], traffic=99),
    "another version of frames": _frame([["opened", KEY_OF_STEP], []], version=FRAME_VERSION + 1),
}


@pytest.mark.parametrize("name", sorted(BAD_FRAMES))
async def test_a_peer_with_the_key_that_sends_bad_frames_is_closed_and_named(
    host: Any, strangers: list[Stranger], caplog: pytest.LogCaptureFixture, name: str
) -> None:
    async with talking(host) as scene:
        strangers.append(Stranger.over_tcp(scene.target))
        await strangers[0].secure(CAROL)
        assert isinstance(await strangers[0].greet(CAROL.peer_id), Hello)
        before = _rss_bytes()
        with suppress(OSError):  # it may close before it has read everything
            await strangers[0].say(BAD_FRAMES[name])
        assert await strangers[0].is_closed()
        await scene.has_refused(Offence.FRAME)
        assert _rss_bytes() - before < 32 * MIB
        up, lost = scene.others
        assert up == PeerUp(CAROL.peer_id)
        assert isinstance(lost, PeerLost)
        [line] = refusals(caplog)
        assert (line["peer"], line["source"], line["offence"]) == (CAROL.peer_id, "127.0.0.1", "frame")


async def test_a_peer_that_never_reads_costs_a_bounded_queue_and_is_lost(host: Any, strangers: list[Stranger]) -> None:
    async with talking(host, max_queued_bytes=96 * MIB) as scene:
        strangers.append(Stranger.over_tcp(scene.target))
        await strangers[0].secure(CAROL)
        assert isinstance(await strangers[0].greet(CAROL.peer_id), Hello)
        await scene.until(lambda: scene.others == [PeerUp(CAROL.peer_id)], "it is up")
        large = tensor(8 * MIB)
        before = _rss_bytes()
        peak = 0
        for number in range(40):
            # It says that it lives, and takes nothing.
            await strangers[0].say(bytes(encode_frame(Heartbeat()).head))
            scene.target.post(CAROL.peer_id, Forward(step(number), 0), [large])
            await anyio.sleep(0.01)
            peak = max(peak, _rss_bytes())
            if scene.target.counters["transport.lost"]:
                break
        await scene.until(lambda: len(scene.others) == 2, "it is lost")
        lost = scene.others[1]
        assert isinstance(lost, PeerLost)
        assert (lost.peer, lost.reason.partition(":")[0]) == (CAROL.peer_id, "overloaded")
        assert scene.target.metrics.counter("transport.lost", cause="overloaded").value == 1
        # The tensor itself is shared by all frames: only what is encrypted and not taken yet is a copy.
        assert peak - before < 24 * MIB
        assert 10 <= number <= 30


async def _ask_and_never_read(scene: Scene, one: Stranger, identity: Identity, num_asks: int) -> None:
    """Say hello, ask again and again which run it is, and read no answer."""
    await one.secure(identity)
    assert isinstance(await one.greet(identity.peer_id), Hello)
    asks = bytes(encode_frame(AskRun()).head) * 100

    def ask() -> None:
        with suppress(OSError):  # it closes
            for _ in range(num_asks // 100):
                one.socket.sendall(asks)

    await anyio.to_thread.run_sync(ask)


def _run_teller(endpoint: StreamEndpoint) -> RunTeller:
    return RunTeller(endpoint, {"what": "nothing shorter: " + os.urandom(2500).hex()}, lambda: None)


async def test_a_peer_that_asks_without_end_and_never_reads_is_lost_before_its_answers_fill_the_memory(
    host: Any, strangers: list[Stranger]
) -> None:
    async with talking(host, _run_teller, max_unsent_bytes=4 * MIB) as scene:
        strangers.append(Stranger.over_tcp(scene.target))
        before = _rss_bytes()
        await _ask_and_never_read(scene, strangers[0], CAROL, 20_000)
        await scene.until(lambda: len(scene.others) == 2, "it is lost")
        assert _rss_bytes() - before < 48 * MIB
        up, lost = scene.others
        assert up == PeerUp(CAROL.peer_id)
        assert isinstance(lost, PeerLost)
        assert lost.reason.startswith("overloaded: it does not take what it is sent; ")
        assert scene.target.metrics.counter("transport.lost", cause="overloaded").value == 1


async def test_many_that_ask_and_never_read_do_not_fill_the_memory_together_and_peers_are_kept(
    host: Any, strangers: list[Stranger]
) -> None:
    async with talking(host, _run_teller, max_unsent_total_bytes=6 * MIB) as scene:
        names = [Identity(bytes((number,)) * 32) for number in range(4)]
        for name in names:
            strangers.append(Stranger.over_tcp(scene.target))
            # Of each some 10 MB of answers, of which the sockets take a part: none of them alone is too much.
            await _ask_and_never_read(scene, strangers[-1], name, 4_000)
        await scene.until(lambda: any(isinstance(event, PeerLost) for event in scene.others), "one is lost")
        await scene.goes_on()
        lost = [event for event in scene.others if isinstance(event, PeerLost)]
        assert all("of messages wait for all peers" in event.reason for event in lost)
        assert sum(state.message_bytes for state in scene.target._peers.values()) <= 7 * MIB


async def test_a_peer_that_sends_faster_than_it_is_heard_is_not_read_any_more(
    host: Any, strangers: list[Stranger]
) -> None:
    target = await host(BOB, limits=TransportLimits(max_unread_bytes=16 * MIB))
    await _let_in(target, strangers)
    frame = b"".join(encode_frame(Forward(step(), 0), [tensor(4 * MIB)]).in_one_piece())
    sent = 0

    def flood() -> None:
        nonlocal sent
        strangers[0].socket.settimeout(3.0)
        with suppress(TimeoutError, OSError):
            for _ in range(100):
                strangers[0].socket.sendall(frame)
                sent += 1

    before = _rss_bytes()
    await anyio.to_thread.run_sync(flood)
    assert sent < 20, "it was stopped"
    assert _rss_bytes() - before < 64 * MIB
    assert len(await take(target, 1 + 4)) == 5


async def test_small_messages_that_are_not_heard_count_by_what_they_take_in_memory(
    host: Any, strangers: list[Stranger]
) -> None:
    target = await host(BOB, limits=TransportLimits(max_unread_bytes=16 * MIB))
    await _let_in(target, strangers)
    frames = bytes(encode_frame(Opened(step())).head) * 1000

    def flood() -> None:
        strangers[0].socket.settimeout(3.0)
        with suppress(TimeoutError, OSError):
            while True:
                strangers[0].socket.sendall(frames)

    before = _rss_bytes()
    await anyio.to_thread.run_sync(flood)
    assert 0 < target.received_bytes < MIB // 2
    assert _rss_bytes() - before < 64 * MIB


async def _sends_much_at_once(target: StreamEndpoint, strangers: list[Stranger]) -> None:
    """Some 40 kB of small messages lie in the socket before the loop reads any."""
    await _let_in(target, strangers)
    frame = bytes(encode_frame(Opened(step())).head)
    for _ in range(40_000 // len(frame) // 20):
        strangers[0].socket.sendall(frame * 20)


async def test_who_sends_small_messages_without_end_is_read_a_buffer_in_each_turn_of_the_loop(
    host: Any, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_stream, "_READ_BYTES", 4096)
    target = await host(BOB)
    await _sends_much_at_once(target, strangers)
    turns: list[int] = []
    while target.received_bytes < 32_000:
        before = target.received_bytes
        await anyio.lowlevel.checkpoint()
        turns.append(target.received_bytes - before)
    assert 0 < max(turns) < 2 * 4096


async def test_whose_messages_take_long_is_not_read_for_as_long(
    host: Any, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    hours_s = count(step=10_000.0)
    monkeypatch.setattr(tls_stream, "_READ_BYTES", 4096)
    monkeypatch.setattr(tls_stream, "thread_cpu_s", lambda: next(hours_s))
    target = await host(BOB)
    await _sends_much_at_once(target, strangers)
    for _ in range(200):
        await anyio.sleep(0.001)
    assert 0 < target.received_bytes < 2 * 4096


async def test_of_two_whose_messages_take_long_each_rests_for_the_other_as_well(
    host: Any, strangers: list[Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    hours_s = count(step=10_000.0)
    rested_s: list[float] = []
    begin = Pace.begin

    def begins(self: Pace, took_s: float, now_s: float) -> float:
        rested_s.append(begin(self, took_s, now_s))
        return rested_s[-1]

    monkeypatch.setattr(Pace, "begin", begins)
    monkeypatch.setattr(tls_stream, "_READ_BYTES", 4096)
    monkeypatch.setattr(tls_stream, "thread_cpu_s", lambda: next(hours_s))
    target = await host(BOB)
    await _sends_much_at_once(target, strangers)
    await until(lambda: len(rested_s) == 1)
    other, dave = Stranger.over_tcp(target), Identity(b"d" * 32)
    strangers.append(other)
    await other.secure(dave)
    await other.greet(dave.peer_id)
    other.socket.sendall(bytes(encode_frame(Opened(step())).head) * 100)
    await until(lambda: len(rested_s) == 2)
    assert rested_s[0] == pytest.approx(10_000.0, rel=0.01)
    assert rested_s[1] == pytest.approx(30_000.0, rel=0.01)


async def test_a_mixed_attack_from_many_threads_is_counted_by_offence(host: Any) -> None:
    async with talking(host, max_handshaking=400) as scene:
        address = over_tcp(scene.target).addresses[0].rpartition(":")[2]

        def attack(kind: int) -> None:
            for number in range(25):
                with suppress(OSError), socket.create_connection(("127.0.0.1", int(address)), TIMEOUT_S) as one:
                    if kind == 0:
                        one.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
                    else:
                        key = KEY if kind == 2 else b"x" * 32
                        identity = Identity(bytes([number]) * 32)
                        with tls_contexts(identity, key).client.wrap_socket(one) as secure:
                            secure.sendall(b"G" * 100)
                            while secure.recv(4096):
                                pass

        async with anyio.create_task_group() as threads:
            for kind in range(3):
                threads.start_soon(anyio.to_thread.run_sync, attack, kind)
        wanted = {Offence.TLS: 25, Offence.SWARM_KEY: 25, Offence.GARBAGE: 25}
        await scene.until(lambda: all(scene.refused(o) >= n for o, n in wanted.items()), "all are refused")
        assert Counter({o: scene.refused(o) for o in Offence}) == Counter(wanted)
        assert not [e for e in scene.others if not isinstance(e, PeerLost)]
        assert PeerId(BOB.peer_id) == scene.target.peer_id
