"""Quick reads and stores among nodes in memory, some of whom are silent or lie."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hivemind.dht.node import Blacklist
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import get_dht_time

from shoal.control.dht_lookup import QuickLookup
from shoal.control.record_holders import REPLICAS, SOME

KEY = DHTID(0)
NUM_NODES = 30


class Node:
    """What `QuickLookup` uses of a hivemind node; `swarm` is the network."""

    def __init__(self, swarm: dict[str, Node], node_id: int) -> None:
        self.node_id, self.peer_id = DHTID(node_id), f"peer {node_id}"
        self.blacklist = Blacklist(5.0, 2.0)
        self.silent = False
        self.names: dict[DHTID, str] | None = None
        """What it says of who is near, instead of the truth."""
        self.asked = 0
        self._swarm = swarm
        swarm[self.peer_id] = self
        self.protocol = SimpleNamespace(
            storage=DHTLocalStorage(),
            serializer=MSGPackSerializer,
            record_validator=SimpleNamespace(validate=lambda record: True),
            routing_table=SimpleNamespace(peer_id_to_uid={}, get_nearest_neighbors=self.neighbours),
            call_find=self.call_find,
            call_store=self.call_store,
        )
        self.lookup = QuickLookup(cast(Any, self))

    def neighbours(self, key: DHTID, number: int) -> list[tuple[DHTID, str]]:
        known = {uid: peer for peer, uid in self.protocol.routing_table.peer_id_to_uid.items()}
        return [(uid, known[uid]) for uid in sorted(known, key=key.xor_distance)[:number]]

    async def call_find(self, peer: str, keys: list[DHTID]) -> dict[DHTID, Any] | None:
        other = self._swarm.get(peer)
        if other is None or other.silent:
            return None
        other.asked += 1
        self.protocol.routing_table.peer_id_to_uid[peer] = other.node_id
        return {key: (other.protocol.storage.get(key), other.named(key, self)) for key in keys}

    def named(self, key: DHTID, asker: Node) -> dict[DHTID, str]:
        if self.names is not None:
            return self.names
        near = {node.node_id: node.peer_id for node in self._swarm.values() if node is not asker}
        return {uid: near[uid] for uid in sorted(near, key=key.xor_distance)[:20]}

    async def call_store(
        self, peer: str, keys: list[DHTID], values: list[bytes], expires_s: float, subkeys: list[str]
    ) -> list[bool] | None:
        other = self._swarm.get(peer)
        if other is None or other.silent:
            return None
        self.protocol.routing_table.peer_id_to_uid[peer] = other.node_id
        stored = zip(keys, values, subkeys, strict=True)
        return [other.protocol.storage.store(key, value, expires_s, subkey) for key, value, subkey in stored]

    async def read(self, number: int = SOME) -> object:
        """The value under the key, if the read was whole and there is one."""
        found = await self.lookup.read((KEY,), number)
        return None if found is None else found[KEY].get("name")

    async def store(self, value: bytes, life_s: float = 30.0) -> tuple[bool, bool]:
        stored = await self.lookup.store(KEY, "name", value, get_dht_time() + life_s)
        return stored.taken, stored.everywhere


def _swarm(seed: int = 0, number: int = NUM_NODES) -> list[Node]:
    """Nodes of which each knows one other, the nearest to the key first."""
    dice, swarm = random.Random(seed), dict[str, Node]()
    nodes = sorted(
        (Node(swarm, node_id) for node_id in dice.sample(range(1, 10_000), number)), key=lambda node: node.node_id
    )
    for node in nodes:
        other = dice.choice([each for each in nodes if each is not node])
        node.protocol.routing_table.peer_id_to_uid[other.peer_id] = other.node_id
    return nodes


def _holders(node: Node) -> list[str]:
    return list(cast(Any, node.lookup)._holders.of(KEY))


@pytest.mark.parametrize("seed", range(10))
async def test_what_one_stores_every_other_reads_from_few(seed: int) -> None:
    nodes = _swarm(seed)
    writer, reader = nodes[-1], nodes[-2]
    assert await writer.read() is None
    assert await writer.store(b"first") == (True, True)
    assert [KEY in node.protocol.storage for node in nodes] == [True] * REPLICAS + [False] * (NUM_NODES - REPLICAS)
    assert await reader.read() == b"first"
    assert await writer.store(b"second", 40.0) == (True, True)
    for node in nodes:
        node.asked = 0
    assert await reader.read() == b"second"
    assert sum(node.asked for node in nodes) == SOME
    assert await reader.read(REPLICAS) == b"second"
    assert await nodes[0].read() == b"second"


async def test_nothing_is_stored_before_a_read_has_found_the_holders() -> None:
    nodes = _swarm()
    assert await nodes[-1].store(b"x") == (False, False)
    assert not any(KEY in node.protocol.storage for node in nodes)


async def test_a_node_stores_with_itself_where_it_is_one_of_the_nearest() -> None:
    nodes = _swarm()
    await nodes[2].read()
    assert await nodes[2].store(b"x") == (True, True)
    assert [KEY in node.protocol.storage for node in nodes[: REPLICAS + 1]] == [True] * REPLICAS + [False]


async def test_a_silent_holder_is_said_left_out_and_looked_for_anew() -> None:
    nodes = _swarm()
    writer = nodes[-1]
    await writer.read()
    for node in nodes[:REPLICAS]:
        node.silent = True
    assert await writer.store(b"x") == (False, False)
    assert await writer.store(b"x") == (False, False), "nobody is settled now"
    nodes[0].silent = False
    incomplete = 0
    while await writer.lookup.read((KEY,), REPLICAS) is None:
        incomplete += 1
    assert 1 <= incomplete <= REPLICAS, "some are silent: everybody has to be searched"
    assert _holders(writer) == [nodes[0].peer_id, *(node.peer_id for node in nodes[REPLICAS : 2 * REPLICAS - 1])]
    assert await writer.store(b"x") == (True, True)


async def test_one_that_is_silent_to_a_store_makes_it_incomplete() -> None:
    nodes = _swarm()
    await nodes[-1].read()
    nodes[0].silent = True
    assert await nodes[-1].store(b"x") == (True, False)


async def test_names_without_end_end_in_nothing() -> None:
    nodes = _swarm()
    swarm = cast(Any, nodes[0])._swarm
    liars = [Node(swarm, 20_000 >> number) for number in range(14)]
    for liar, nearer in pairwise(liars):
        liar.names = {nearer.node_id: nearer.peer_id}
    reader = nodes[-1]
    reader.protocol.routing_table.peer_id_to_uid.clear()
    reader.protocol.routing_table.peer_id_to_uid[liars[0].peer_id] = liars[0].node_id
    assert await reader.lookup.read((KEY,), REPLICAS) is None
    assert sum(liar.asked for liar in liars) < len(liars) // 2
    assert await reader.store(b"x") == (False, False)


async def test_untrue_ids_of_honest_nodes_are_believed_for_one_read_of_all_holders_at_most() -> None:
    nodes = _swarm()
    # Too far away for the honest ones to name them, and to correct what was said.
    liar, reader, far = nodes[0], nodes[-1], nodes[22 : 22 + REPLICAS]
    liar.names = {DHTID(number): node.peer_id for number, node in enumerate(far, 1)}
    # Whom the liar has named were asked, and have said their own ids.
    await reader.read(REPLICAS)
    liar.names = None
    assert await reader.read(REPLICAS) is None
    assert _holders(reader) == [node.peer_id for node in nodes[:REPLICAS]]


async def test_a_node_that_is_known_under_two_ids_stands_at_its_present_one() -> None:
    nodes = _swarm()
    reader, moved, former = nodes[-1], nodes[20], DHTID(1)
    for node in nodes:
        node.names = {DHTID(former): moved.peer_id} | {
            each.node_id: each.peer_id for each in (*nodes[: REPLICAS + 1], moved)
        }
    reader.protocol.routing_table.peer_id_to_uid[moved.peer_id] = moved.node_id
    await reader.read(REPLICAS)
    assert _holders(reader) == [node.peer_id for node in nodes[:REPLICAS]]


async def test_what_a_node_holds_itself_it_asks_one_holder_less_for() -> None:
    nodes = _swarm(number=3)
    for node in nodes:
        await node.read()
    assert await nodes[0].store(b"x") == (True, True)
    for node in nodes:
        node.asked = 0
    assert await nodes[0].read() == b"x"
    assert sum(node.asked for node in nodes) == SOME - 1
    for node in nodes[1:]:
        node.silent = True
    assert await nodes[0].lookup.read((KEY,), SOME) is None, "its own copy alone is not enough"


async def test_a_node_that_nobody_has_told_anything_does_not_count_itself() -> None:
    nodes = _swarm(number=3)
    reader = nodes[0]
    reader.protocol.storage.store(KEY, MSGPackSerializer.dumps(b"x"), get_dht_time() + 30.0, reader.peer_id)
    assert await reader.lookup.read((KEY,), SOME) == {KEY: {reader.peer_id: b"x"}}
    assert sum(node.asked for node in nodes) == SOME


@pytest.mark.parametrize("way", ["few", "all", "search"])
async def test_renewals_go_to_nodes_that_have_come_nearer(way: str) -> None:
    nodes = _swarm()
    writer, swarm = nodes[-1], cast(Any, nodes[0])._swarm
    await writer.read()
    assert await writer.store(b"first") == (True, True)
    # Halfway to the key, which is zero, as often as it takes.
    nearest = int(nodes[0].node_id)
    newcomers = [Node(swarm, nearest - number) for number in range(1, REPLICAS + 1)]
    if way == "search":
        writer.lookup.forget_all()
        assert await writer.store(b"second", 40.0) == (False, False), "everybody has to be searched"
        writer.protocol.routing_table.peer_id_to_uid |= {node.peer_id: node.node_id for node in newcomers}
    # Who is asked names all that are nearer.
    await writer.read(REPLICAS if way == "all" else SOME)
    assert await writer.store(b"third", 50.0) == (True, True)
    assert all(KEY in node.protocol.storage for node in newcomers)
