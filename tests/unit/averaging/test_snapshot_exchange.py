"""Snapshots between real endpoints: sent, kept, given back, and refused when they are not what they should be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel
import msgspec
import pytest
import torch
from torch import Tensor

from shoal.averaging.snapshot_exchange import SnapshotExchange
from shoal.averaging.snapshot_owner import SnapshotOwner, SnapshotSettings
from shoal.averaging.snapshot_transfer import CHUNK_BYTES
from shoal.clock import SystemClock
from shoal.codec.raw import to_wire
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId, StageIndex, StepKey
from shoal.swarm.snapshots import Base
from shoal.swarm.view import Replica, SwarmView
from shoal.transport.base import Received
from shoal.transport.dispatch import dispatch
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.snapshot import OfferSnapshot, Snapshot, SnapshotChunk, TakeSnapshot
from shoal.wire.messages.step import StepEntry

pytestmark = pytest.mark.anyio

OWNER, BUDDY, OTHER = PeerId("owner"), PeerId("buddy"), PeerId("other")
BASE = Base(0, "genesis", StageHashes("p", "m", "b"))
ROUND_2 = Base(1, "record", StageHashes("p2", "m2", "b2"))
CONTENT = torch.arange(2 * CHUNK_BYTES + 100, dtype=torch.int64).to(torch.uint8)
ROOM = 1 << 30


def log(steps: int = 2) -> tuple[StepEntry, ...]:
    return tuple(
        StepEntry(
            StepKey(0, 1, number, 0), (OWNER, BUDDY), number, (SampleRange(0, number, number + 1),), 1, 1.0, 0.1, False
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

        def capture() -> Tensor:
            found.num_captures += 1
            return CONTENT.clone()

        owner = SnapshotOwner(
            endpoint,
            stage,
            generation=generation,
            settings=settings,
            view=lambda: self.view,
            device=device,
            capture=capture,
            base=lambda: found.base,
        )
        exchange = SnapshotExchange(
            endpoint,
            stage,
            owner=owner,
            settings=settings,
            generation=generation,
            follows=generation > 1,
            view=lambda: self.view,
            clock=SystemClock(),
        )
        found = Server(endpoint, device, exchange)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(dispatch, endpoint, (exchange,))
            tasks.start_soon(exchange.run)
            yield found
            self.network.remove(peer, "ended")
            tasks.cancel_scope.cancel()


@pytest.fixture(params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


async def until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(240):
        while not condition():
            await anyio.lowlevel.checkpoint()


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
            with anyio.fail_after(240):
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
            with anyio.fail_after(240):
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
            with anyio.fail_after(240):
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


async def test_more_than_was_offered_and_what_is_no_snapshot_end_the_connection() -> None:
    swarm = Swarm((OWNER, 0), (BUDDY, 1))
    async with swarm.server(BUDDY, 1) as buddy:
        small = Snapshot(OWNER, 0, 1, 0, "genesis", BASE.hashes, log(), 10, "digest")
        buddy.exchange.receive(Received(OWNER, OfferSnapshot(msgspec.msgpack.encode(small), b""), ()))
        with pytest.raises(RemoteProtocolError, match="11 bytes"):
            buddy.exchange.receive(Received(OWNER, SnapshotChunk("digest"), (to_wire(CONTENT[:11]),)))
        for body in (b"", msgspec.msgpack.encode(msgspec.structs.replace(small, num_bytes=0))):
            with pytest.raises(RemoteProtocolError, match="no snapshot"):
                buddy.exchange.receive(Received(OWNER, OfferSnapshot(body, b""), ()))
        # Who asks for what is not its own is told so.
        assert buddy.exchange.receive(Received(OTHER, TakeSnapshot("digest"), ()))
