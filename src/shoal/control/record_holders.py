"""Which nodes of the DHT hold a key's records. Pure: who was asked said so, nobody is asked here.

A record stands at the `REPLICAS` nodes whose ids are nearest to its key, and each of them names its neighbours that are
nearer still, so some questions find them all (Kademlia; Maymounkov and Mazieres, 2002). hivemind looks for them anew
for each record that it stores and in each read, through all nodes that it knows: in a swarm where nothing happens this
is most of what there is to do. What the answers have told is kept here, so that the next time it takes few questions.
"""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

REPLICAS = 5
"""How many nodes each record is stored at, of all that there are."""
SOME = 2
"""How many of a key's holders are enough where nothing happens, whoever reads included: one may have missed the last
renewal."""

Key = TypeVar("Key", bound=int)
Node = TypeVar("Node", bound=Hashable)


class RecordHolders(Generic[Key, Node]):
    """The nodes nearest to each key, of all others that were heard of; a node is whatever a question can be sent to."""

    def __init__(self, own_id: int, dice: random.Random) -> None:
        """Know no node yet.

        Args:
            own_id: of the node that asks; it does not ask itself.
            dice: choose among nodes that are equally good.
        """
        self._own_id = own_id
        self._dice = dice
        self._nearest: dict[Key, dict[Node, int]] = {}

    def begin_anew(self) -> None:
        """Know nobody: what was said may have been wrong."""
        self._nearest.clear()

    def learn(self, key: Key, nodes: Mapping[Node, int]) -> None:
        """Note the nodes near to a key that some node has named. Only the nearest of all are kept.

        Args:
            key: 160 bits.
            nodes: named as holders, with their ids.
        """
        known = {**self._nearest.get(key, {}), **nodes}
        self._nearest[key] = {
            node: known[node] for node in sorted(known, key=lambda node: known[node] ^ key)[:REPLICAS]
        }

    def forget(self, node: Node) -> None:
        """Leave out a node that does not answer."""
        for nodes in self._nearest.values():
            nodes.pop(node, None)

    def of(self, key: Key) -> tuple[Node, ...]:
        """Return the others that hold a key, the nearest first; none if nobody was named yet."""
        return tuple(self._nearest.get(key, ()))[: REPLICAS - self.include_own(key)]

    def include_own(self, key: Key) -> bool:
        """Return whether the node that asks is a holder of a key as well."""
        ids = self._nearest.get(key, {}).values()
        return len(ids) < REPLICAS or any(self._own_id ^ key < each ^ key for each in ids)

    def to_ask(
        self, keys: Iterable[Key], number: int, asked: Mapping[Node, Iterable[Key]], *, own_counts: bool
    ) -> dict[Node, list[Key]]:
        """Choose which nodes to ask for which keys: few nodes for all keys, and not always the same ones.

        Args:
            number: how many holders of each key to ask, if there are that many.
            asked: which nodes were asked for which keys already.
            own_counts: the asking node's own copy of a key counts as an answer.

        Returns:
            Empty if enough nodes were asked.
        """
        needed = {key: min(number - (own_counts and self.include_own(key)), len(self.of(key))) for key in keys}
        for node, its_keys in asked.items():
            for key in its_keys:
                needed[key] -= node in self.of(key)
        chosen: dict[Node, list[Key]] = {}
        while True:
            # Who can be asked for which of the keys of which not enough was asked; then the one who knows most of them.
            able: dict[Node, list[Key]] = {}
            for key in (key for key, times in needed.items() if times > 0):
                for node in self.of(key):
                    if node not in chosen and key not in asked.get(node, ()):
                        able.setdefault(node, []).append(key)
            if not able:
                return chosen
            # Two who keep nothing that they are told must not be all who are asked for as long as it is quiet.
            node = max(able, key=lambda each: (len(able[each]), self._dice.random()))
            chosen[node] = able[node]
            for key in chosen[node]:
                needed[key] -= 1
