"""A process uses the DHT node of another one over a real socket; what stands behind it is a dictionary."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream
from tests.alongside import alongside, until

from shoal.clock import SystemClock
from shoal.control import node_service
from shoal.control.node_service import (
    NodeState,
    ReadAnswered,
    ReadAsked,
    RemoteNode,
    StoreAnswered,
    StoreAsked,
    first_of_each,
    is_own_process,
    node_served,
)
from shoal.control.record_checker import RecordChecker
from shoal.control.record_holders import SOME
from shoal.control.records import MAX_RECORD_BYTES, Rejection, StageRecord, seal
from shoal.errors import RecordRejected
from shoal.identity import Identity, namespace
from shoal.ids import PeerId
from shoal.runtime.frames import FrameReader, framed
from shoal.telemetry.registry import MetricRegistry

NAMESPACE = namespace(b"k" * 32, "test")
CLOCK = SystemClock()
TOPIC = "stage.0"
Told = NodeState | StoreAnswered | ReadAnswered
NESTED = b"\x82\xa4type\xa4read\xa1x" + b"\x91" * 100_000 + b"\xc0"
"""A message with a field that nobody knows."""


class Shelf:
    """What is served."""

    def __init__(self) -> None:
        self.alive = True
        self.maddrs = ("/ip4/127.0.0.1/tcp/1/p2p/node",)
        self.clock_difference_s: float | None = None
        self.values: dict[tuple[str, str], bytes] = {}
        self.reads = 0
        self.known: list[tuple[str, str, bytes]] | None = None
        self.asked: tuple[int | None, float] | None = None
        self.may_read = anyio.Event()
        self.may_read.set()

    async def store(self, topic: str, value: bytes, expires_unix_s: float, peer: PeerId | None = None) -> bool:
        self.values[topic, str(peer)] = value
        return True

    def at_hand(
        self, topics: tuple[str, ...], holders: int | None, age_s: float
    ) -> list[tuple[str, str, bytes]] | None:
        return self.known

    async def found(self, topics: tuple[str, ...], holders: int | None, age_s: float) -> list[tuple[str, str, bytes]]:
        self.reads += 1
        self.asked = holders, age_s
        await self.may_read.wait()
        return [(topic, peer, value) for (topic, peer), value in self.values.items() if topic in topics]


def sealed(identity: Identity, expires_unix_s: float) -> bytes:
    record = StageRecord(("unix:/a",), 1.0, stage=0)
    return seal(identity, NAMESPACE, TOPIC, record, sequence=1, expires_unix_s=expires_unix_s)


@asynccontextmanager
async def remote(path: Path, peer: PeerId) -> AsyncIterator[RemoteNode]:
    checker = RecordChecker(NAMESPACE, str.encode, CLOCK, MetricRegistry())
    node = RemoteNode(await anyio.connect_unix(path), peer, checker)
    async with alongside(node.run):
        await node.heard()
        yield node


async def test_what_one_process_stores_another_one_reads_and_verifies(tmp_path: Path) -> None:
    alice, bob, path, shelf = Identity.generate(), Identity.generate(), tmp_path / "node", Shelf()
    expiry = CLOCK.unix_s() + 30
    async with (
        node_served(shelf, path),
        remote(path, alice.peer_id) as of_alice,
        remote(path, bob.peer_id) as of_bob,
    ):
        assert path.stat().st_mode & 0o777 == 0o600
        assert of_alice.alive
        assert of_alice.maddrs == shelf.maddrs
        assert await of_alice.store(TOPIC, sealed(alice, expiry), expiry)
        # Under Bob's name, and not by Bob.
        shelf.values[TOPIC, bob.peer_id] = sealed(alice, expiry)
        assert [record.peer for record in await of_bob.get((TOPIC,), SOME, 0.5)] == [alice.peer_id]
        assert shelf.asked == (SOME, 0.5)
        assert of_bob._checker.rejected == {Rejection.WRONG_SIGNER: 1}
        with pytest.raises(RecordRejected, match="8192 are allowed"):
            await of_bob.store(TOPIC, bytes(MAX_RECORD_BYTES + 1), expiry)
        shelf.alive, shelf.clock_difference_s = False, 40.0
        await of_bob.refresh()
        assert (of_bob.alive, of_bob.clock_difference_s) == (False, 40.0)
        assert shelf.reads == 1, "to ask how it is reads nothing"


async def test_what_the_node_has_at_hand_comes_at_once_and_before_anything_else_its_word_that_it_is_there(
    tmp_path: Path,
) -> None:
    path, shelf = tmp_path / "node", Shelf()
    shelf.may_read = anyio.Event()
    told = FrameReader[Told](Told)

    async def next_of(stream: SocketStream) -> list[str]:
        return [type(message).__name__ for message in told.feed(await stream.receive())]

    async with node_served(shelf, path), await anyio.connect_unix(path) as stream:
        assert await next_of(stream) == ["NodeState"]
        shelf.known = [(TOPIC, "alice", b"record")]
        await stream.send(framed(ReadAsked(1, (TOPIC,), SOME, 0.5)))
        assert await next_of(stream) == ["ReadAnswered"]
        assert shelf.reads == 0
        shelf.known = None
        await stream.send(framed(ReadAsked(2, (TOPIC,), SOME, 0.5)))
        assert await next_of(stream) == ["NodeState"], "the answer takes its time"
        shelf.may_read.set()
        assert await next_of(stream) == ["ReadAnswered"]


async def test_a_long_read_keeps_no_store_waiting(tmp_path: Path) -> None:
    alice, path, shelf = Identity.generate(), tmp_path / "node", Shelf()
    shelf.may_read = anyio.Event()
    expiry, found = CLOCK.unix_s() + 30, []
    async with node_served(shelf, path), remote(path, alice.peer_id) as node, anyio.create_task_group() as tasks:

        async def read() -> None:
            found.extend(await node.get((TOPIC,), None))

        tasks.start_soon(read)
        await until(lambda: shelf.reads)
        assert await node.store(TOPIC, sealed(alice, expiry), expiry)
        assert not found
        shelf.may_read.set()
    assert [record.peer for record in found] == [alice.peer_id]


async def test_whoever_waits_for_an_answer_when_the_node_goes_has_none(tmp_path: Path) -> None:
    alice, path, shelf = Identity.generate(), tmp_path / "node", Shelf()
    shelf.may_read = anyio.Event()
    answers: list[object] = []
    async with anyio.create_task_group() as tasks:
        async with node_served(shelf, path), anyio.create_task_group() as served:
            node = RemoteNode(
                await anyio.connect_unix(path),
                alice.peer_id,
                RecordChecker(NAMESPACE, str.encode, CLOCK, MetricRegistry()),
            )
            tasks.start_soon(node.run)
            await node.heard()

            async def read() -> None:
                answers.append(await node.get((TOPIC,), None))

            tasks.start_soon(read)
            await until(lambda: shelf.reads)
            served.cancel_scope.cancel()
        await until(lambda: answers)
        assert answers == [()]
        assert not node.alive
        assert node.maddrs == shelf.maddrs, "where it was is known still"
        expiry = CLOCK.unix_s() + 30
        assert not await node.store(TOPIC, sealed(alice, expiry), expiry)


@pytest.mark.parametrize(
    "said",
    [
        b"\x01\x00\x00\x00\xc1",
        len(NESTED).to_bytes(4, "little") + NESTED,
        framed(StoreAsked(0, TOPIC, bytes(MAX_RECORD_BYTES + 1), 0.0, PeerId("x"))),
    ],
    ids=["no message", "nested too deeply", "a record that is too large"],
)
async def test_who_says_what_cannot_be_is_cut_off_and_nobody_else(tmp_path: Path, said: bytes) -> None:
    path, shelf = tmp_path / "node", Shelf()
    async with node_served(shelf, path), remote(path, Identity.generate().peer_id) as node:
        async with await anyio.connect_unix(path) as stranger:
            await stranger.receive()
            await stranger.send(said)
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                while True:  # it may have said that it is there
                    await stranger.receive()
        await node.refresh()
        assert node.alive
        assert not shelf.values


async def test_an_answer_has_no_more_than_a_frame_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_service, "_MOST_VALUES", 2)
    path, shelf = tmp_path / "node", Shelf()
    expiry = CLOCK.unix_s() + 30
    for identity in (Identity.generate() for _ in range(3)):
        shelf.values[TOPIC, identity.peer_id] = sealed(identity, expiry)
    async with node_served(shelf, path), remote(path, Identity.generate().peer_id) as node:
        assert len(await node.get((TOPIC,), None)) == 2


def test_what_stands_under_one_topic_leaves_out_nothing_of_the_others() -> None:
    flood = [("stage.0", str(number), b"") for number in range(9)]
    others = [("stage.1", "a", b""), ("client", "b", b"")]
    assert first_of_each([*flood, *others], 11) == (*flood, *others)
    few = first_of_each([*flood, *others], 4)
    assert len(few) == 4
    assert set(others) < set(few)


async def test_a_process_of_another_user_is_not_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_service, "other_end", lambda _: (1, os.getuid() + 1))
    path = tmp_path / "node"
    async with node_served(Shelf(), path), await anyio.connect_unix(path) as stranger:
        assert not is_own_process(stranger)
        with pytest.raises(anyio.EndOfStream):
            await stranger.receive()


async def test_a_process_that_is_silent_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_service, "_WORD_TIMEOUT_S", 0.05)
    alice, path = Identity.generate(), tmp_path / "node"
    async with await anyio.create_unix_listener(path), remote(path, alice.peer_id) as node:
        assert (node.is_known, node.is_up, node.alive) == (False, False, False)
        assert await node.get((TOPIC,), None) == ()


async def test_a_process_that_may_open_no_more_files_serves_on_and_takes_who_has_dialled_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_service, "_NO_ROOM_PAUSE_S", 0.0)
    real, num_refused = anyio.create_unix_listener, 0

    async def listening(path: Path, mode: int) -> anyio.abc.SocketListener:
        listener = await real(path, mode=mode)
        accept = listener.accept

        async def accept_when_there_is_room() -> anyio.abc.SocketStream:
            nonlocal num_refused
            num_refused += 1
            if num_refused < 3:
                raise anyio.BrokenResourceError from OSError(24, "Too many open files")
            return await accept()

        monkeypatch.setattr(listener, "accept", accept_when_there_is_room)
        return listener

    monkeypatch.setattr(node_service.anyio, "create_unix_listener", listening)
    alice, path = Identity.generate(), tmp_path / "node"
    async with node_served(Shelf(), path), remote(path, alice.peer_id) as node:
        assert node.alive
    assert num_refused >= 3
