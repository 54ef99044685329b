"""What others answer in the DHT: the records are believed, what stands around them is not."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p.p2p_daemon_bindings.control import DEFAULT_MAX_MSG_SIZE
from hivemind.utils import MSGPackSerializer, timed_storage
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from shoal.control import dht_answers
from shoal.control.dht_answers import BoundedStorage, FlatSerializer, _records_in, believe_records_alone
from shoal.control.records import MAX_RECORD_BYTES

NEAREST = {DHTID(7): "a neighbour"}
KEYS = (DHTID(1), DHTID(2))


async def _believed(answer: dict[DHTID, Any] | None) -> Any:
    """What a node takes from an answer to a question for `KEYS`."""

    async def call_find(peer: str, keys: tuple[DHTID, ...]) -> dict[DHTID, Any] | None:
        assert (peer, keys) == ("somebody", KEYS)
        return answer

    node = SimpleNamespace(protocol=SimpleNamespace(call_find=call_find))
    believe_records_alone(cast(Any, node))
    return await node.protocol.call_find("somebody", KEYS)


def _dictionary(expires_s: float, **limits: Any) -> DictionaryDHTValue:
    dictionary = DictionaryDHTValue()
    dictionary.store("peer", b"record", expires_s)
    for name, value in limits.items():
        setattr(dictionary, name, value)
    return dictionary


@pytest.mark.parametrize(
    "limits", [{"maxsize": "x"}, {"maxsize": 0}, {"latest_expiration_time": math.inf}, {}], ids=repr
)
@pytest.mark.parametrize("expires_s", [math.inf, math.nan, -1.0])
async def test_an_answer_expires_with_its_last_record_and_has_no_limit(
    limits: dict[str, Any], expires_s: float
) -> None:
    later_s = get_dht_time() + 30
    answer = {KEYS[0]: (ValueWithExpiration(_dictionary(later_s, **limits), expires_s), NEAREST), KEYS[1]: (None, {})}
    found = await _believed(answer)
    value, nearest = found[KEYS[0]]
    assert nearest == NEAREST
    assert value.expiration_time == later_s
    assert dict(value.value.items()) == {"peer": ValueWithExpiration(b"record", later_s)}
    assert found[KEYS[1]] == (None, {})


async def test_what_has_no_record_is_nothing_and_each_key_has_an_answer() -> None:
    plain = (ValueWithExpiration(b"plain", math.inf), NEAREST)
    assert await _believed({KEYS[0]: plain}) == {KEYS[0]: (None, NEAREST), KEYS[1]: (None, {})}
    empty = (ValueWithExpiration(DictionaryDHTValue(), math.inf), NEAREST)
    assert await _believed({KEYS[0]: empty, DHTID(3): plain}) == {KEYS[0]: (None, NEAREST), KEYS[1]: (None, {})}


async def test_no_answer_stays_none() -> None:
    assert await _believed(None) is None


def test_records_come_out_as_hivemind_has_packed_them_less_its_own_limit_and_expiry() -> None:
    packed = DictionaryDHTValue(7)
    packed.store("a", b"1", 9e9)
    packed.latest_expiration_time = 9e10
    found = FlatSerializer.loads(MSGPackSerializer.dumps(packed))
    assert isinstance(found, DictionaryDHTValue)
    assert (found.maxsize, found.latest_expiration_time) == (DictionaryDHTValue().maxsize, 9e9)
    assert found.data["a"] == (b"1", 9e9)


@pytest.mark.parametrize("kind", [0x40, 0x50, 0x7F])
def test_values_within_values_are_refused_before_they_are_unpacked(kind: int) -> None:
    value: bytes = msgpack.packb([1, 2, []])
    for _ in range(400):  # which would overrun the stack
        value = msgpack.packb(msgpack.ExtType(kind, value))
    with pytest.raises(ValueError, match="kind"):
        FlatSerializer.loads(value)


MOST_BYTES = 64 << 10


@pytest.mark.parametrize("size", [100, MAX_RECORD_BYTES])
def test_whoever_comes_under_many_names_pushes_nobody_out_and_makes_no_answer_too_long(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    assert 1.2 * dht_answers._MOST_BYTES < DEFAULT_MAX_MSG_SIZE
    monkeypatch.setattr(dht_answers, "_MOST_BYTES", MOST_BYTES)
    storage, now_s = BoundedStorage(), get_dht_time()
    assert storage.store_subkey(KEYS[0], "who is there", b"x" * 600, now_s + 30)
    taken = [
        storage.store_subkey(key, f"{number:0>52}", b"x" * size, now_s + 100) for number in range(70) for key in KEYS
    ]
    assert any(taken)
    assert not all(taken)
    grown = [storage.store_subkey(KEYS[0], f"{number:0>52}", b"x" * 2000, now_s + 110) for number in range(70)]
    assert not all(grown)
    # What those who have shrunk leave is taken, too.
    while storage.store_subkey(KEYS[1], f"{len(_records_in(storage.get(KEYS[1])))} more", b"x", now_s + 100):
        pass
    assert storage.store_subkey(KEYS[0], "who is there", b"x" * 700, now_s + 40), "it is renewed as ever"
    assert not storage.store_subkey(KEYS[1], "who is new", b"x" * 600, now_s + 40)
    answer = b"".join(MSGPackSerializer.dumps(item.value) for _, item in storage.items())
    assert len(answer) < 1.2 * MOST_BYTES


def test_places_of_those_who_have_left_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dht_answers, "_MOST_BYTES", MOST_BYTES)
    storage, now_s = BoundedStorage(), get_dht_time()
    while storage.store_subkey(KEYS[0], now_s, b"x" * MAX_RECORD_BYTES, now_s + 30):
        now_s += 0.001
    monkeypatch.setattr(timed_storage, "get_dht_time", lambda: now_s + 60)
    assert storage.store_subkey(KEYS[1], "who is new", b"x" * 600, now_s + 100)
