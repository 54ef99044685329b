"""Snapshots between real endpoints: sent, kept, given back, and refused when they are not what they should be."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import msgspec
import pytest
import torch
from tests.alongside import alongside, until
from torch import Tensor

from shoal.averaging.contents import Contents
from shoal.averaging.digest_fetch import digest_of, offered
from shoal.averaging.snapshot_exchange import SEARCH_S, SnapshotExchange, SnapshotFetch
from shoal.averaging.snapshot_owner import SnapshotOwner, SnapshotSettings
from shoal.clock import SystemClock
from shoal.codec.raw import to_wire
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId, StageIndex, StepKey
from shoal.swarm.content_transfer import Late
from shoal.swarm.snapshots import CHUNK_BYTES, Base
from shoal.swarm.view import NO_BASE, Replica, SwarmView
from shoal.transport.base import Received
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.snapshot import NoSnapshot, OfferSnapshot, Snapshot
from shoal.wire.messages.step import StepEntry
from shoal.wire.messages.transfer import Chunk, ContentKind, ContentName, Have, Missing, Read, Want

OWNER, BUDDY, OTHER = PeerId("owner"), PeerId("buddy"), PeerId("other")
BASE = Base(0, "genesis", StageHashes("p", "m", "b"))
ROUND_2 = Base(1, "record", StageHashes("p2", "m2", "b2"))
CONTENT = torch.arange(2 * CHUNK_BYTES + 100, dtype=torch.int64).to(torch.uint8)
ROOM = 1 << 30


def log(steps: int = 2) -> tuple[StepEntry, ...]:
    return tuple(
        StepEntry(
            StepKey(0, 1, number, 0),
            (OWNER, BUDDY),
            number,
            (SampleRange(0, number, number + 1),),
            1,
            1,
            1.0,
            0.1,
            False,
        )
        for number in range(steps)
    )


class Inline:
    """Computes at once; `before` happens while it does."""

    before: Callable[[], None] = staticmethod(lambda: None)

    async def run(self, function: Callable[..., Tensor], *arguments: object) -> Tensor:
        self.before()
        return function(*arguments)


@dataclass
class Server:
    endpoint: MemoryEndpoint
    device: Inline
    contents: Contents
    exchange: SnapshotExchange
    base: Base = BASE
    num_captures: int = 0

    @property
    def num_kept(self) -> int:
        return self.endpoint.metrics.counts().get("snapshot.kept", 0)


class Swarm:
    """Servers that come and go."""

    def __init__(self, *stages: tuple[PeerId, int]) -> None:
        self.network = MemoryNetwork(seed=0)
        self.view = SwarmView(
            replicas=tuple(Replica(self.network_hop(peer), 0.0, stage=StageIndex(stage)) for peer, stage in stages)
        )

    def network_hop(self, peer: PeerId):  # type: ignore[no-untyped-def]
        endpoint = self.network.endpoint(peer)
        hop = endpoint.hop
        self.network.remove(peer, "not yet")
        return hop

    @asynccontextmanager
    async def server(
        self, peer: PeerId, stage: int, generation: int = 1, room_bytes: int = ROOM, key: bytes = b"own"
    ) -> AsyncIterator[Server]:
        endpoint, device = self.network.endpoint(peer), Inline()
        settings = SnapshotSettings(2, room_bytes, key)
        contents = Contents(endpoint, SystemClock())

        def capture() -> Tensor:
            found.num_captures += 1
            return CONTENT.clone()

        owner = SnapshotOwner(
            contents,
            stage,
            generation=generation,
            settings=settings,
            view=lambda: self.view,
            device=device,
            capture=capture,
            base=lambda: found.base,
        )
        exchange = SnapshotExchange(
            contents,
            stage,
            owner=owner,
            settings=settings,
            generation=generation,
            follows=generation > 1,
            view=lambda: self.view,
        )
        found = Server(endpoint, device, contents, exchange)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dispatch, endpoint, (contents, exchange))
            tasks.start_soon(contents.run)
            tasks.start_soon(exchange.run)
            yield found
            self.network.remove(peer, "ended")
            tasks.cancel_scope.cancel()


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


async def keep(server: Server, steps: int = 2) -> None:
    """Have a snapshot made and kept."""
    before = server.num_kept
    await server.exchange.owner.boundary(server.base.round + 1, log(steps))
    await until(lambda: server.num_kept > before)


async def test_the_next_life_goes_on_from_the_newest_one_bit_for_bit() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1))
    async with swarm.server(BUDDY, 1):
        async with swarm.server(OWNER, 0) as first:
            await keep(first)
            await keep(first, 4)
        async with swarm.server(OWNER, 0, generation=2) as second:
            await second.exchange.settled(BASE)
            found = second.exchange.take(BASE)
            assert found is not None
            assert found.snapshot.log == log(4)
            assert torch.equal(found.content, CONTENT)
            assert second.exchange.take(BASE) is None


@pytest.mark.parametrize("generation", [2, 3])
async def test_another_generation_or_another_state_gets_nothing(generation: int) -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1))
    async with swarm.server(BUDDY, 1):
        async with swarm.server(OWNER, 0) as first:
            await keep(first)
        async with swarm.server(OWNER, 0, generation=generation) as later:
            await later.exchange.settled(ROUND_2)
            assert later.exchange.take(ROUND_2 if generation == 2 else BASE) is None


async def test_a_buddy_cannot_change_what_the_owner_has_sealed(caplog: pytest.LogCaptureFixture) -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1))
    async with swarm.server(BUDDY, 1) as buddy:
        async with swarm.server(OWNER, 0) as first:
            await keep(first)
        kept = buddy.exchange._whole[OWNER]
        longer = msgspec.structs.replace(kept.snapshot, log=log(3))
        kept.offer = OfferSnapshot(msgspec.msgpack.encode(longer), kept.offer.seal)
        async with swarm.server(OWNER, 0, generation=2) as second:
            await second.exchange.settled(BASE)
            assert second.exchange.take(BASE) is None
    assert "snapshot.forged" in [record.message for record in caplog.records]


async def test_one_that_has_no_room_is_passed_over() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1), (OTHER, 1))
    async with swarm.server(BUDDY, 1, room_bytes=100) as full, swarm.server(OTHER, 1) as other:
        async with swarm.server(OWNER, 0) as first:
            await keep(first)
        assert (len(full.exchange._whole), len(other.exchange._whole)) == (0, 1)


async def test_one_that_dies_is_passed_over() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1), (OTHER, 1))
    async with swarm.server(OTHER, 1) as other, swarm.server(OWNER, 0) as first:
        await keep(first)
        assert len(other.exchange._whole) == 1


async def test_the_next_record_makes_a_kept_one_go() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1))
    async with swarm.server(BUDDY, 1) as buddy, swarm.server(OWNER, 0) as first:
        await keep(first)
        buddy.exchange.recorded(1)
        assert not buddy.exchange._whole
        first.base = ROUND_2
        await keep(first)
        assert len(buddy.exchange._whole) == 1


async def test_nothing_is_copied_when_it_is_not_due_or_one_is_on_its_way_or_a_record_has_come() -> None:
    swarm = Swarm((OWNER, 0))
    async with swarm.server(OWNER, 0) as server:
        owner = server.exchange.owner
        await owner.boundary(1, log(1))
        await owner.boundary(2, log(2))
        assert server.num_captures == 0

        def swap() -> None:
            server.base = ROUND_2

        server.device.before = swap
        await owner.boundary(1, log(2))
        assert server.num_captures == 1
        assert owner._made is None
        await owner.boundary(2, log(2))
        await owner.boundary(2, log(4))
        assert server.num_captures == 2


async def test_what_is_no_snapshot_ends_the_connection_and_what_is_not_there_is_said_to_be_missing() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1))
    async with swarm.server(BUDDY, 1) as buddy:
        small = Snapshot(OWNER, 0, 1, 0, "genesis", BASE.hashes, log(), 10, "digest")
        for body in (b"", msgspec.msgpack.encode(msgspec.structs.replace(small, num_bytes=0))):
            with pytest.raises(RemoteProtocolError, match="no snapshot"):
                buddy.exchange.receive(Received(OWNER, OfferSnapshot(body, b""), ()))
        # An owner that does not have what it offers: the buddy says so, and gives the room back.
        answers = swarm.network.endpoint(OWNER)
        answers.introduce(buddy.endpoint.hop)
        answers.post(BUDDY, OfferSnapshot(msgspec.msgpack.encode(small), b""))
        async for event in answers.events():
            match event:
                case Received(_, Want(name)):
                    answers.post(BUDDY, Missing(name, NO_BASE))
                case Received(_, NoSnapshot(digest)):
                    assert digest == "digest"
                    break
                case _:
                    pass
        assert buddy.exchange._store.used_bytes == 0


async def test_an_owner_that_dies_in_the_middle_leaves_what_was_kept_before() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1))
    async with swarm.server(BUDDY, 1) as buddy:
        async with swarm.server(OWNER, 0) as first:
            await keep(first)
            kept = buddy.exchange._whole[OWNER]
            chunks: list[int] = []

            def die(source: PeerId, target: PeerId, message: object) -> None:
                if source == OWNER and isinstance(message, Chunk):
                    chunks.append(message.chunk)
                    swarm.network.kill(OWNER)

            swarm.network.before_delivery = die
            await first.exchange.owner.boundary(1, log(4))
            await until(lambda: chunks)
        await until(lambda: not buddy.exchange._coming)
        assert buddy.exchange._whole == {OWNER: kept}
        assert buddy.exchange._store.used_bytes == len(kept.offer.body) + CONTENT.numel()


async def test_what_two_buddies_have_comes_from_both_and_one_that_gives_it_wrong_costs_nothing() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1), (OTHER, 1))
    async with swarm.server(BUDDY, 1) as buddy, swarm.server(OTHER, 1) as other:
        async with swarm.server(OWNER, 0) as first:
            await keep(first)
        [has, has_not] = sorted((buddy, other), key=lambda each: not each.exchange._whole)
        kept = has_not.exchange._whole[OWNER] = has.exchange._whole[OWNER]
        wrong = kept.content.clone()
        wrong[-1] += 1
        has_not.contents.offer(kept.name, offered(wrong, hashes=kept.machine.offer))
        async with swarm.server(OWNER, 0, generation=2) as second:
            await second.exchange.settled(BASE)
            found = second.exchange.take(BASE)
            assert found is not None
            assert torch.equal(found.content, CONTENT)


async def test_each_chunk_waits_until_the_one_before_has_left() -> None:
    network = MemoryNetwork(seed=0)
    endpoint, sent = network.endpoint(OWNER), list[object]()

    class Stalling:
        def post(self, peer: PeerId, message: object, *_: object) -> None:
            sent.append(message)

        async def flushed(self, peer: PeerId) -> None:
            await anyio.sleep_forever()

        def __getattr__(self, name: str) -> object:
            return getattr(endpoint, name)

    contents, name = Contents(Stalling(), SystemClock()), ContentName(ContentKind.SNAPSHOT, 0, "digest")
    contents.offer(name, offered(CONTENT))
    async with alongside(contents.run):
        for chunk in range(3):
            contents.receive(Received(BUDDY, Read(name, chunk)))
        await anyio.wait_all_tasks_blocked()
        assert sent == [Chunk(name, 0)]


async def test_a_snapshot_is_offered_while_a_large_state_is_being_hashed_for_somebody_else() -> None:
    network = MemoryNetwork(seed=0)
    contents, asker = Contents(network.endpoint(BUDDY), SystemClock()), network.endpoint(OWNER)
    kept, state = ContentName(ContentKind.SNAPSHOT, 0, "digest"), ContentName(ContentKind.STATE, 1, "hash")
    known, is_over = offered(CONTENT).hashes(), threading.Event()
    contents.offer(kept, offered(CONTENT, hashes=known))
    large = offered(CONTENT)
    hashes = large.hashes

    def hashed_late() -> bytes:
        is_over.wait()
        return hashes()

    large.hashes = hashed_late  # type: ignore[method-assign]
    contents.offer(state, large)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(contents.run)
        asker.introduce(contents.endpoint.hop)
        asker.post(BUDDY, Want(kept))  # makes the connection
        contents.receive(Received(OTHER, Want(state)))
        await until(lambda: contents._hashing.locked())
        contents.receive(Received(OWNER, Want(kept)))
        try:
            await anyio.wait_all_tasks_blocked()
            assert not contents._requests.get(OWNER)
        finally:
            is_over.set()
            tasks.cancel_scope.cancel()


async def test_what_was_not_asked_for_or_comes_twice_does_not_wait_in_memory() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1))
    hashes = offered(CONTENT).hashes()
    snapshot = Snapshot(OWNER, 0, 1, 0, "genesis", BASE.hashes, log(), CONTENT.numel(), digest_of(hashes))
    async with swarm.server(BUDDY, 1) as buddy:
        owner = swarm.network.endpoint(OWNER)
        owner.introduce(buddy.endpoint.hop)
        owner.post(BUDDY, OfferSnapshot(msgspec.msgpack.encode(snapshot), b""))
        await until(lambda: buddy.exchange._coming)
        coming = buddy.exchange._coming[OWNER]
        owner.post(BUDDY, Have(snapshot.name, hashes))
        await until(lambda: coming.machine.is_requested(OWNER, 0))
        chunk = to_wire(CONTENT[:CHUNK_BYTES])
        for number in (0, 0, 0, 7, -1):
            buddy.contents.receive(Received(OWNER, Chunk(snapshot.name, number), (chunk,)))
        buddy.contents.receive(Received(OTHER, Chunk(snapshot.name, 1), (chunk,)))
        assert [event.message.chunk for event in coming._events] == [0]


async def test_a_snapshot_over_a_slow_link_goes_on_as_long_as_somebody_waits_for_it() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1))
    snapshot = Snapshot(OWNER, 0, 1, 0, "genesis", BASE.hashes, log(), CONTENT.numel(), "digest")
    async with swarm.server(BUDDY, 1) as buddy:
        machine = SnapshotFetch(buddy.contents, snapshot, OfferSnapshot(b"", b""), lambda: (OWNER,)).machine
        machine.peers([OWNER], 0.0)
        machine.offered(OWNER, bytes(32 * 3), 0.0)
        late = [effect for hours in range(24) for effect in machine.tick(3600.0 * hours) if isinstance(effect, Late)]
        assert late == []


async def test_a_buddy_that_falls_silent_is_replaced_by_another_before_both_are_given_up() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1), (OTHER, 1))
    snapshot = Snapshot(OWNER, 0, 1, 0, "genesis", BASE.hashes, log(), CONTENT.numel(), "digest")
    async with swarm.server(OWNER, 0) as server:
        givers = (BUDDY, OTHER)
        machine = SnapshotFetch(server.contents, snapshot, OfferSnapshot(b"", b""), lambda: givers).machine
        machine.tick(0.0)
        machine.peers(givers, 0.0)
        machine.offered(BUDDY, bytes(32 * 3), 0.0)  # all three are asked of it, and it says nothing more
        machine.offered(OTHER, bytes(32 * 3), 0.0)
        now_s = machine.wake_at_s
        while not any(machine.is_requested(OTHER, chunk) for chunk in range(3)):
            assert now_s < SEARCH_S, "the search gives both up"
            machine.tick(now_s)
            now_s = machine.wake_at_s


async def test_an_owner_whose_round_is_over_gives_its_snapshot_no_more() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1))
    endpoint = swarm.network.endpoint(BUDDY)  # it does not answer
    async with swarm.server(OWNER, 0) as server:
        await server.exchange.owner.boundary(1, log(2))
        await until(lambda: server.contents.offered)
        server.base = ROUND_2
        server.exchange.recorded(1)
        await anyio.wait_all_tasks_blocked()
        assert not server.contents.offered
        assert server.exchange.owner._made is None
    await endpoint.aclose()
