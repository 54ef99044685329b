"""What others answer in the DHT, before hivemind works with it: nothing of it but the records themselves is believed.

hivemind has each record checked, and then goes by what stands around them: a dictionary's own limit of entries, and the
moment at which an answer as a whole expires. Neither is signed. A text instead of the limit ends the search, which
nobody notices, so that its caller waits for ever; a moment far in the future ends it before anybody else has answered.
"""

# hivemind ships no type information.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import ValueWithExpiration


def believe_records_alone(node: DHTNode) -> None:
    """Have a node take nothing but the records from what others answer to its questions."""
    protocol: Any = node.protocol
    ask = protocol.call_find

    async def call_find(peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, tuple[Any, dict[DHTID, PeerID]]] | None:
        answer = await ask(peer, keys)
        if answer is None:
            return None
        found = {key: answer.get(key, (None, {})) for key in keys}
        return {key: (_records(value), nearest) for key, (value, nearest) in found.items()}

    protocol.call_find = call_find


def _records(value: Any) -> Any:
    """Return the same records, which have been checked, in a dictionary of our own; None if there are none."""
    if value is None or not isinstance(value.value, DictionaryDHTValue):
        return None
    ours = DictionaryDHTValue()
    # Not its method `items`, which goes by the limit.
    for subkey, item in value.value.data.items():
        ours.store(subkey, item.value, item.expiration_time)
    return ValueWithExpiration(ours, ours.latest_expiration_time) if ours.data else None
