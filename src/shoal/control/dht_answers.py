"""What others send in the DHT, before hivemind works with it: nothing of it but the records themselves is believed.

hivemind has each record checked, and then goes by what stands around them: a dictionary's own limit of entries, and the
moment at which an answer as a whole expires. Neither is signed. A text instead of the limit ends the search, which
nobody notices, so that its caller waits for ever; a moment far in the future ends it before anybody else has answered.
And it unpacks values within values, however deep, until the stack of the process overruns.
"""

# hivemind ships no type information, nor does msgpack.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, cast

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

_DICTIONARY = 0x50
"""How hivemind marks a packed `DictionaryDHTValue`."""


class FlatSerializer(MSGPackSerializer):
    """hivemind's, but for values within values: none of ours has any but the records of a topic in a dictionary."""

    @classmethod
    def loads(cls, buf: bytes) -> object:
        """Unpack.

        Raises:
            ValueError: it is not packed well, or holds what no node packs.
        """
        return msgpack.loads(buf, ext_hook=_dictionary, raw=False)


def _dictionary(code: int, data: bytes) -> Any:
    """Unpack records into a dictionary of our own."""
    if code != _DICTIONARY:
        raise ValueError(f"a value of the unknown kind {code}")
    _, _, items = cast(tuple[Any, Any, Any], msgpack.loads(data, ext_hook=_nothing, raw=False))
    return _ours(items)


def _nothing(code: int, _data: bytes) -> object:
    raise ValueError(f"a value of the kind {code} within another one")


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
    # Not its method `items`, which goes by the limit.
    records = cast(dict[Any, Any], value.value.data)
    ours = _ours((subkey, item.value, item.expiration_time) for subkey, item in records.items())
    return ValueWithExpiration(ours, ours.latest_expiration_time) if ours.data else None


def _ours(items: Iterable[tuple[Any, Any, Any]]) -> Any:
    ours: Any = DictionaryDHTValue()
    for subkey, value, expires_unix_s in items:
        ours.store(subkey, value, expires_unix_s)
    return ours
