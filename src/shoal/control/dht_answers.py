"""What others send in the DHT, before hivemind works with it: nothing of it but the records themselves is believed.

hivemind has each record checked, and then goes by what stands around them: a dictionary's own limit of entries, and the
moment at which an answer as a whole expires. Neither is signed. A text instead of the limit ends the search, which
nobody notices, so that its caller waits for ever; a moment far in the future ends it before anybody else has answered.
And it unpacks values within values, however deep, until the stack of the process overruns. It also keeps all that it is
given, and answers nothing where that has become longer than a message may be.
"""

# hivemind ships no type information, nor does msgpack.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final, cast

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

_DICTIONARY = 0x50
"""How hivemind marks a packed `DictionaryDHTValue`."""
_MOST_BYTES: Final = 3 << 20
"""Of all records that a node holds: they and what stands around them fit into one answer, which has 4 MiB at most."""
_LEAST_BYTES: Final = 1 << 10
"""That a record counts: it may say more when it is renewed, and is not to lose its place then."""


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


class BoundedStorage(DHTLocalStorage):
    """What a node holds for others: no more than it can tell. Who is there says what is new as ever; who comes finds a
    place when others have left theirs. So members who come under many names keep others out, and push out nobody."""

    def store_subkey(self, key: Any, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Take a record, or refuse it; see `DHTLocalStorage.store_subkey`."""
        is_renewed = len(value) <= _LEAST_BYTES and subkey in _records_in(self.get(key))
        if not is_renewed and self._bytes_beside(key, subkey) + _counted(value) > _MOST_BYTES:
            return False
        return super().store_subkey(key, subkey, value, expiration_time)

    def _bytes_beside(self, key: Any, subkey: Any) -> int:
        """Return how much all records count but one."""
        everything = sum(_counted(each.value) for _, item in self.items() for each in _records_in(item).values())
        known = _records_in(self.get(key)).get(subkey)
        return everything - (0 if known is None else _counted(known.value))


def _counted(value: bytes) -> int:
    return max(len(value), _LEAST_BYTES)


def _records_in(item: Any) -> dict[Any, Any]:
    """Return the records that stand under a topic and have not expired, by peer."""
    return dict(item.value.items()) if item is not None and isinstance(item.value, DictionaryDHTValue) else {}


def believe_records_alone(node: DHTNode) -> None:
    """Have a node take nothing but the records from what others answer to its questions, and hold no more than it can
    answer to theirs."""
    protocol: Any = node.protocol
    protocol.storage = BoundedStorage()
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
