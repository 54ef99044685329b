"""Quick reads and stores: the few nodes that hold a record are asked and told, instead of everybody near to it.

They are for a swarm in which nothing happens. Where somebody does not answer, or nobody is known, the caller goes
hivemind's thorough way.
"""

# hivemind ships no type information; what crosses this file's border is typed.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import anyio
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID

from shoal.control.record_holders import REPLICAS, RecordHolders

_MAX_HOPS = 4
"""Of a read: each answer names nodes that are nearer, and few steps lead to the nearest of a large swarm."""

Found = dict[DHTID, dict[object, object]]
"""Values by key and subkey."""
_Dated = dict[object, tuple[object, float]]
"""Of one key: values by subkey, with the moment at which each expires."""


@dataclass(frozen=True)
class Stored:
    """What has become of a record.

    Attributes:
        everywhere: all its holders are known and have answered.
    """

    taken: bool
    everywhere: bool


class QuickLookup:
    """Reads and stores through the nodes that hold a key's records, as far as they are known."""

    def __init__(self, node: DHTNode) -> None:
        """Know no holder yet.

        Args:
            node: its neighbours are asked first, over its protocol.
        """
        self._node = node
        self._protocol = cast(Any, node.protocol)
        # Seeded by the system: nobody may foresee who is asked.
        self._holders: RecordHolders[DHTID, PeerID] = RecordHolders(node.node_id, random.Random())
        # The keys whose holders a read has found and none has been found missing since.
        self._settled: set[DHTID] = set()

    async def read(self, keys: Sequence[DHTID], number: int) -> Found | None:
        """Ask `number` holders of each key; a read that asks all of them begins with this node's own neighbours.

        If other nodes know this node as a holder, what it holds counts as one answer.

        Returns:
            Of each value the copy that expires last; None: a node has not answered, no node is known, or nodes still
            name others that are nearer.
        """
        if number >= REPLICAS:
            self.forget_all()
        found = self._own(keys)
        for key in keys:
            self._learn(key, dict(self._protocol.routing_table.get_nearest_neighbors(key, REPLICAS)))
        # Where nobody has told it anything, others do not know it yet, or cannot reach it.
        told = any(subkey != str(self._node.peer_id) for values in found.values() for subkey in values)
        asked: dict[PeerID, list[DHTID]] = {}
        silent: list[PeerID] = []
        chosen = self._holders.to_ask(keys, number, asked, own_counts=told)
        for _ in range(_MAX_HOPS):
            async with anyio.create_task_group() as tasks:
                for peer, its_keys in chosen.items():
                    tasks.start_soon(self._ask, peer, its_keys, found, silent)
            asked |= {peer: [*asked.get(peer, ()), *its_keys] for peer, its_keys in chosen.items()}
            chosen = self._holders.to_ask(keys, number, asked, own_counts=told)
            if silent or not chosen:
                break
        if silent or chosen or not asked:
            return None
        self._settled.update(keys)
        return _undated(found)

    def alone(self, keys: Sequence[DHTID]) -> Found | None:
        """Return what this node holds itself: all that there is where it knows nobody; None: it knows others."""
        return _undated(self._own(keys)) if self._is_alone else None

    def forget_all(self) -> None:
        """Know nobody, as in the beginning."""
        self._holders.begin_anew()
        self._settled.clear()

    async def store(self, key: DHTID, subkey: str, value: bytes, expires_unix_s: float) -> Stored:
        """Store a record at its holders, if a read has found them, or this node is the only one."""
        raw, tag = (self._protocol.serializer.dumps(each) for each in (value, subkey))
        own = DHTRecord(key.to_bytes(), tag, raw, expires_unix_s)
        is_known = key in self._settled or self._is_alone
        if not is_known or not self._protocol.record_validator.validate(own):
            return Stored(taken=False, everywhere=False)
        taken, silent = list[bool](), list[PeerID]()
        if self._holders.include_own(key):
            taken.append(self._protocol.storage.store(key, raw, expires_unix_s, subkey=subkey))

        async def tell(peer: PeerID) -> None:
            answer = await self._protocol.call_store(peer, [key], [raw], expires_unix_s, [subkey])
            if answer is None:
                silent.append(peer)
                self._forget(peer)
            else:
                taken.extend(answer)

        async with anyio.create_task_group() as tasks:
            for peer in self._holders.of(key):
                tasks.start_soon(tell, peer)
        return Stored(taken=any(taken), everywhere=not silent)

    @property
    def _is_alone(self) -> bool:
        return not self._protocol.routing_table.peer_id_to_uid

    def _own(self, keys: Sequence[DHTID]) -> dict[DHTID, _Dated]:
        """Return what this node holds."""
        found: dict[DHTID, _Dated] = {key: {} for key in keys}
        for key, values in found.items():
            _merge(values, self._protocol.storage.get(key), self._protocol.serializer)
        return found

    async def _ask(self, peer: PeerID, keys: Sequence[DHTID], found: dict[DHTID, _Dated], silent: list[PeerID]) -> None:
        answer = await self._protocol.call_find(peer, keys)
        if answer is None:
            silent.append(peer)
            self._node.blacklist.register_failure(peer)
            self._forget(peer)
            return
        self._node.blacklist.register_success(peer)
        for key, (value, nearest) in answer.items():
            _merge(found[key], value, self._protocol.serializer)
            self._learn(key, nearest)

    def _learn(self, key: DHTID, named: Mapping[DHTID, PeerID]) -> None:
        """Note who was named, at the id that the peer itself has said where it has: others know its former ones too."""
        id_of = self._protocol.routing_table.peer_id_to_uid
        # Others still name those that have just been found missing.
        left_out = {peer for peer in named.values() if peer in self._node.blacklist} | {self._node.peer_id}
        self._holders.learn(key, {peer: id_of.get(peer, i) for i, peer in named.items() if peer not in left_out})

    def _forget(self, peer: PeerID) -> None:
        """Leave out who does not answer; its keys have other holders now."""
        self._settled -= {key for key in self._settled if peer in self._holders.of(key)}
        self._holders.forget(peer)


def _undated(found: Mapping[DHTID, _Dated]) -> Found:
    return {key: {subkey: value for subkey, (value, _) in values.items()} for key, values in found.items()}


def _merge(values: _Dated, answer: Any, serializer: Any) -> None:
    """Take over what an answer says of a key; what is no dictionary is not one of our records."""
    if answer is None or not isinstance(answer.value, DictionaryDHTValue):
        return
    for subkey, item in answer.value.items():
        if subkey not in values or values[subkey][1] < item.expiration_time:
            values[subkey] = (serializer.loads(item.value), item.expiration_time)
