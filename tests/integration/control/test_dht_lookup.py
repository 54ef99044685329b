"""Quick reads and stores of real DHT nodes: few questions, and nothing is missed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
from hivemind.dht.routing import DHTID

from shoal.clock import SystemClock
from shoal.control.dht import DhtNode
from shoal.control.dht_lookup import QuickLookup
from shoal.control.record_holders import REPLICAS, SOME
from shoal.control.records import StageRecord, VerifiedRecord, seal, topics
from shoal.identity import Identity, namespace

LOOKS = 10
"""A busy machine answers some questions too late; then who ought to hold a record is asked again."""

NAMESPACE = namespace(b"k" * 32, "test")
CLOCK = SystemClock()
TOPICS = topics(5)
NUM_NODES = 7


class Member:
    """A node with a record of its own."""

    def __init__(self, node: DhtNode, identity: Identity, stage: int) -> None:
        self.node, self.identity, self.topic = node, identity, f"stage.{stage}"
        self.sequence = 0
        self.asked = 0
        protocol = cast(Any, node._node).protocol
        call_find = protocol.call_find

        async def counted(*arguments: Any) -> Any:
            self.asked += 1
            return await call_find(*arguments)

        protocol.call_find = counted

    async def renew(self) -> bool:
        self.sequence += 1
        expiry = CLOCK.unix_s() + 30
        record = StageRecord(("unix:/a",), 1.0, stage=int(self.topic.removeprefix("stage.")))
        value = seal(self.identity, NAMESPACE, self.topic, record, sequence=self.sequence, expires_unix_s=expiry)
        return await self.node.store(self.topic, value, expiry)

    async def read(self, holders: int | None = SOME) -> dict[str, int]:
        """The sequence numbers that it sees, by peer."""
        found: tuple[VerifiedRecord, ...] = await self.node.get(TOPICS, holders)
        return {opened.peer: opened.sequence for opened in found}


@asynccontextmanager
async def _swarm(state_dir: Path, number: int = NUM_NODES) -> AsyncIterator[list[Member]]:
    async with AsyncExitStack() as stack:
        members: list[Member] = []
        for each in range(number):
            members.append(await stack.enter_async_context(_joined(state_dir, members, each % 5)))
        yield members


@asynccontextmanager
async def _joined(state_dir: Path, members: list[Member], stage: int) -> AsyncIterator[Member]:
    identity = Identity.generate()
    peers = await members[0].node.visible_maddrs() if members else ()
    async with await DhtNode.create(
        identity, namespace=NAMESPACE, state_dir=state_dir, clock=CLOCK, initial_peers=peers
    ) as node:
        yield Member(node, identity, stage)


async def _renew(members: list[Member]) -> dict[str, int]:
    for member in members:
        assert await member.renew()
    return {member.identity.peer_id: member.sequence for member in members}


def _lookup(member: Member) -> QuickLookup:
    lookup = member.node._lookup
    assert lookup is not None
    return lookup


async def test_a_quick_read_sees_every_record_and_asks_few(tmp_path: Path) -> None:
    async with _swarm(tmp_path) as members:
        wanted = await _renew(members)
        for member in members:
            assert await member.read(None) == wanted
            assert member.asked > NUM_NODES
            for holders, most in ((SOME, NUM_NODES // 2), (REPLICAS, NUM_NODES - 1)):
                member.asked = 0
                assert await member.read(holders) == wanted
                assert 1 <= member.asked <= most


async def test_renewals_reach_the_readers_without_a_search(tmp_path: Path) -> None:
    async with _swarm(tmp_path) as members:
        await _renew(members)
        for member in members:
            await member.read()
        for _ in range(3):
            for member in members:
                member.asked = 0
            wanted = await _renew(members)
            assert not any(member.asked for member in members), "nobody was looked for"
            for holders in (None, REPLICAS, SOME):
                for member in members:
                    assert await member.read(holders) == wanted


async def test_after_a_search_renewals_look_for_the_nearest_too(tmp_path: Path) -> None:
    async with _swarm(tmp_path, 3) as members:
        await _renew(members)
        for holders in (SOME, None):
            for member in members:
                await member.read(holders)
                member.asked = 0
            await _renew(members)
            assert [member.asked > 0 for member in members] == [holders is None] * len(members)


async def test_a_newcomer_is_seen_and_sees_everybody(tmp_path: Path) -> None:
    async with _swarm(tmp_path) as members:
        await _renew(members)
        for member in members:
            await member.read()
        async with _joined(tmp_path, members, 3) as newcomer:
            everybody = [*members, newcomer]
            for _ in range(2):
                wanted = await _renew([newcomer, *members])
                for member in everybody:
                    assert await member.read() == wanted


async def test_a_node_that_was_revived_under_another_id_holds_what_it_ought_to(tmp_path: Path) -> None:
    async with _swarm(tmp_path) as members:
        await _renew(members)
        for member in members:
            await member.read()
        await members[2].node.revive()
        for _ in range(LOOKS):
            wanted = await _renew(members)
            for member in members:
                assert await member.read(REPLICAS) == wanted
            if not (wrong := _wrong_holders(members)):
                break
        assert wrong == []


def _wrong_holders(members: Sequence[Member]) -> list[str]:
    """Return who believes that others hold a record than those that ought to, or has not settled who does."""
    ids = {member.identity.peer_id: cast(Any, member.node._node).node_id for member in members}
    wrong: list[str] = []
    for member in members:
        lookup = _lookup(member)
        for key in lookup._settled:
            nearest = sorted(ids, key=lambda peer, key=key: ids[peer] ^ key)[:REPLICAS]
            others = [peer for peer in nearest if peer != member.identity.peer_id]
            if [peer.to_base58() for peer in lookup._holders.of(key)] != others:
                wrong.append(f"{member.identity.peer_id}: {key}")
        if not lookup._settled:
            wrong.append(f"{member.identity.peer_id}: nothing settled")
    return wrong


async def test_a_dead_holder_hides_nothing(tmp_path: Path) -> None:
    async with _swarm(tmp_path) as members:
        await _renew(members)
        for member in members:
            await member.read()
        for dead in members[2:4]:
            await dead.node.aclose()
        alive = [*members[:2], *members[4:]]
        wanted = await _renew(alive)
        for member in alive:
            # On a starved machine the living may not answer in time either.
            while not wanted.items() <= (await member.read()).items():
                wanted |= await _renew(alive)


async def test_a_node_that_is_alone_reads_thoroughly(tmp_path: Path) -> None:
    async with _swarm(tmp_path, 1) as [member]:
        wanted = await _renew([member])
        assert await _lookup(member).read((DHTID.generate(),), SOME) is None
        assert await member.read() == wanted
        assert await member.renew()


async def test_a_cancelled_quick_read_leaves_the_node_whole(tmp_path: Path) -> None:
    async with _swarm(tmp_path, 4) as members:
        wanted = await _renew(members)
        cancelled = 0
        for delay_s in (0.0, 0.0005, 0.001, 0.002):
            with anyio.move_on_after(delay_s) as timer:
                await members[0].read()
            cancelled += timer.cancelled_caught
        assert cancelled
        assert await members[0].read() == wanted
        assert members[0].node.alive
