"""Real DHT nodes among whom one lies: what it stores reaches nobody's view, is counted and named, and disturbs nobody.

Two honest peers watch each other by their registries all the while. The liar checks nothing that it stores, and knows
the binary keys of the topics, as everybody does who keeps records for others.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from tests.dht_stranger import KEY, MAC_BYTES, forgeries, stranger
from tests.unowned_keys import SIGNATURE, SMALL_ORDER, peer_id

from shoal.clock import SystemClock
from shoal.control.dht import DhtNode, _key
from shoal.control.dht_launcher import SignedRecords
from shoal.control.keyed_protocol import Members
from shoal.control.record_checker import RecordChecker
from shoal.control.records import MAX_RECORD_BYTES, GoneRecord, Rejection, RunRecord, StageRecord, seal, with_mac
from shoal.control.registry import Registry
from shoal.identity import Identity, namespace
from shoal.ids import PeerId
from shoal.telemetry.registry import MetricRegistry
from shoal.wire.handshake import PROTOCOL_VERSION

SWARM = namespace(b"k" * 32, "test")
OTHER_SWARM = namespace(b"x" * 32, "test")
OTHER_EXPERIMENT = namespace(b"k" * 32, "test-2")
CLOCK = SystemClock()
ALICE, BOB, MALLORY = Identity(b"a" * 32), Identity(b"b" * 32), Identity(b"m" * 32)
EVIL = ("unix:/evil",)


def _stage(stage: int, step: int = 0, addresses: tuple[str, ...] = ("unix:/good",)) -> StageRecord:
    return StageRecord(addresses, 1.0, stage=stage, step=step)


@dataclass
class Honest:
    node: DhtNode
    registry: Registry
    metrics: MetricRegistry

    def rejected(self, reason: Rejection) -> int:
        return self.metrics.counter("records.dropped", reason=reason.value).value


class Liar:
    """A node of the DHT without our checks, which says what a test wants."""

    def __init__(self, node: DhtNode) -> None:
        assert node._node is not None
        self.node = node
        self.raw: Any = node._node
        self.raw.protocol.record_validator = None

    async def store(self, topic: str, value: object, subkey: object, expires_unix_s: float) -> None:
        await self.raw.store(f"{SWARM}/{topic}", value, expires_unix_s, subkey=subkey)

    async def store_plain(self, topic: str, value: object, expires_unix_s: float) -> None:
        await self.raw.store(f"{SWARM}/{topic}", value, expires_unix_s)


@asynccontextmanager
async def _swarm(tmp_path: Path) -> AsyncGenerator[tuple[Honest, Honest, Liar]]:
    """Yield two honest peers that see each other, and a liar; at the end they have to see each other's news at once."""
    seen: set[tuple[PeerId, tuple[str, ...]]] = set()

    async def node(identity: Identity, swarm: str, peers: tuple[str, ...], metrics: MetricRegistry) -> DhtNode:
        return await DhtNode.create(
            identity, namespace=swarm, state_dir=tmp_path, clock=CLOCK, initial_peers=peers, metrics=metrics
        )

    async def note(registry: Registry) -> None:
        while True:
            view = await registry.membership.changed()
            hops = [r.hop for r in view.replicas] + [c.hop for c in (*view.candidates, *view.clients)]
            seen.update((hop.peer, hop.addresses) for hop in hops)
            assert view.run is None
            assert view.monitor is None

    mine, yours = MetricRegistry(), MetricRegistry()
    async with await node(ALICE, SWARM, (), mine) as first:
        peers = await first.visible_maddrs()
        async with (
            await node(BOB, SWARM, peers, yours) as second,
            await node(MALLORY, SWARM, peers, MetricRegistry()) as third,
            anyio.create_task_group() as tasks,
        ):
            alice = Honest(first, Registry(first, ALICE, SWARM, 2, CLOCK), mine)
            bob = Honest(second, Registry(second, BOB, SWARM, 2, CLOCK), yours)
            for stage, each in enumerate((alice, bob)):
                tasks.start_soon(note, each.registry)
                tasks.start_soon(each.registry.run)
                each.registry.advertise(_stage(stage))
            for each in (alice, bob):
                await each.registry.membership.wait_for(lambda view: view.num_replicas(2) == (1, 1))
            yield alice, bob, Liar(third)
            for each in (alice, bob):
                await each.node.get(("stage.0", "stage.1"))
            alice.registry.advertise(_stage(0, step=7))
            bob.registry.advertise(_stage(1, step=8))
            for each in (alice, bob):
                await each.registry.membership.wait_for(lambda view: {r.step for r in view.replicas} == {7, 8})
            tasks.cancel_scope.cancel()
    assert seen == {(ALICE.peer_id, ("unix:/good",)), (BOB.peer_id, ("unix:/good",))}


def _warned(caplog: pytest.LogCaptureFixture, reason: Rejection) -> list[str]:
    fields = [vars(r) for r in caplog.records if r.getMessage() == "record.rejected" and r.levelno == logging.WARNING]
    return [line["subkey"] for line in fields if line["reason"] == reason.value]


def _sealed(
    by: Identity, record: Any = None, *, swarm: str = SWARM, life_s: float = 30.0, topic: str = "stage.0"
) -> Any:
    expires = CLOCK.unix_s() + life_s
    value = seal(by, swarm, topic, record or _stage(0, 99, EVIL), sequence=1 << 50, expires_unix_s=expires)
    return value, expires


def _forged_signature() -> tuple[bytes, float]:
    """A record of Bob's, with another address, and signed by Mallory."""
    value, expires = _sealed(MALLORY)
    parts = msgspec.msgpack.decode(value[MAC_BYTES:])
    parts[2] = BOB.peer_id
    return with_mac(SWARM, msgspec.msgpack.encode(parts)), expires


def _sealed_again(swarm: str) -> tuple[bytes, float]:
    """A record of Bob's from elsewhere, under this swarm's MAC."""
    value, expires = _sealed(BOB, swarm=swarm)
    return with_mac(SWARM, value[MAC_BYTES:]), expires


async def test_what_is_sealed_without_the_key_nobody_believes_though_a_member_stores_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with _swarm(tmp_path) as (alice, bob, liar):
        later = CLOCK.unix_s() + 60
        value, expires = _sealed(MALLORY, swarm=OTHER_SWARM)
        await liar.store("stage.0", value, MALLORY.peer_id, expires)
        run, expires = _sealed(MALLORY, RunRecord("evil", 2, 0.0), swarm=OTHER_SWARM, topic="run")
        await liar.store("candidates", run, MALLORY.peer_id, expires)
        for junk in (5, b"", b"junk", "text", [1, 2], b"\x91" * 5000):
            await liar.store("stage.1", junk, BOB.peer_id, later)
        for topic, subkey in (("run", 5), ("monitor", b"\xff\xfe"), ("stage.1", ""), ("stage.1", "x" * 5000)):
            await liar.store(topic, b"junk", subkey, later)
        await liar.store_plain("client", b"a value where names of peers should be", later)
        for each in (alice, bob):
            await each.node.get(("stage.0", "stage.1", "run", "client", "monitor", "candidates"))
            assert each.rejected(Rejection.BAD_MAC) >= 5
            assert each.rejected(Rejection.MALFORMED) >= 5
        assert MALLORY.peer_id in _warned(caplog, Rejection.BAD_MAC)
        assert BOB.peer_id in _warned(caplog, Rejection.BAD_MAC)
        assert _warned(caplog, Rejection.MALFORMED)


async def test_nobody_speaks_with_a_stranger(tmp_path: Path) -> None:
    """It is answered that it is heard, and no more: what it asks or says is not looked at, and it is not noted."""
    async with _swarm(tmp_path) as (alice, bob, _), stranger(tmp_path, await alice.node.visible_maddrs()) as outsider:
        before = [each.metrics.counts() for each in (alice, bob)]
        refused = await outsider.overwhelm([each.node.peer_id for each in (alice, bob)])
        assert refused == {"the peer has no key of this swarm"}
        assert [each.metrics.counts() for each in (alice, bob)] == before, "not one record was looked at"
        for each in (alice, bob):
            raw: Any = each.node._node
            known = {peer.to_base58() for peer in raw.protocol.routing_table.peer_id_to_uid}
            assert outsider.identity.peer_id not in known
            assert all(key.to_bytes() != KEY for key, _ in raw.protocol.storage.items())
            await each.node.get(("stage.0",))
            assert not any(outsider.identity.peer_id in maddr for maddr in each.node._neighbours)
        outsider.call_itself(b"1" * 21)
        raw = alice.node._node
        assert await raw.protocol.call_ping(PeerID.from_base58(outsider.identity.peer_id)) is None, "no node's id"


async def test_who_holds_every_record_and_cannot_seal_any_makes_nobody_believe_anything(tmp_path: Path) -> None:
    """All keys that nobody owns, forged records of every kind, true ones replayed, cut, prolonged and signed again."""
    async with (
        _swarm(tmp_path) as (alice, bob, liar),
        stranger(tmp_path, await liar.node.visible_maddrs(), SWARM) as outsider,
    ):
        held = await outsider.look()
        while {each.topic for each in held} != {"stage.0", "stage.1"}:
            # They ask everybody, so it hears of the keys.
            for each in (alice, bob):
                await each.node.get(("stage.0", "stage.1"))
            held = await outsider.look()
        told = list(forgeries(held, CLOCK.unix_s(), outsider.identity))
        assert {forgery.kind for forgery in told} >= {"unowned_key", "foreign_key", "replayed", "cut", "prolonged"}
        for start in range(0, len(told), 32):
            await outsider.tell(told[start : start + 32])
        for each in (alice, bob):
            found = await each.node.get(("stage.0", "stage.1", "run", "client"))
            assert {opened.peer for opened in found} == {ALICE.peer_id, BOB.peer_id}
            assert all(opened.record.addresses == ("unix:/good",) for opened in found)
            assert each.rejected(Rejection.BAD_MAC) >= 8
            for reason in (Rejection.WRONG_SIGNER, Rejection.WRONG_TOPIC, Rejection.BAD_EXPIRY):
                assert each.rejected(reason) >= 1, each.metrics.counts()


@pytest.mark.parametrize("key", SMALL_ORDER, ids=bytes.hex)
async def test_also_with_the_swarms_key_nobody_speaks_under_a_key_that_anybody_could_use(
    tmp_path: Path, key: bytes
) -> None:
    async with _swarm(tmp_path) as (alice, bob, liar):
        expires = CLOCK.unix_s() + 30
        body = msgspec.msgpack.encode(_stage(0, 99, EVIL))
        for sequence in range(16):
            envelope = [PROTOCOL_VERSION, "stage.0", peer_id(key), sequence, expires + sequence, body, SIGNATURE]
            value = with_mac(SWARM, msgspec.msgpack.encode(envelope))
            await liar.store("stage.0", value, peer_id(key), expires + sequence)
        for each in (alice, bob):
            await each.node.get(("stage.0",))
            assert each.rejected(Rejection.BAD_SIGNATURE) >= 16


INSIDER: dict[str, tuple[Rejection, Any]] = {
    "a record of another peer, signed by itself": (Rejection.WRONG_SIGNER, lambda: _sealed(MALLORY)),
    "a record of another peer with a signature of its own": (Rejection.BAD_SIGNATURE, _forged_signature),
    "a record of the peer in another experiment": (
        Rejection.BAD_MAC,
        lambda: _sealed(BOB, swarm=OTHER_EXPERIMENT),
    ),
    "a record of the peer in another experiment, sealed again": (
        Rejection.BAD_SIGNATURE,
        lambda: _sealed_again(OTHER_EXPERIMENT),
    ),
    "a record of the peer under another topic": (
        Rejection.WRONG_TOPIC,
        lambda: _sealed(BOB, _stage(1), topic="stage.1"),
    ),
    "a record of the peer kept longer than it was signed for": (
        Rejection.BAD_EXPIRY,
        lambda: (_sealed(BOB, life_s=-5.0)[0], CLOCK.unix_s() + 60),
    ),
    "one that wants to live too long": (Rejection.BAD_EXPIRY, lambda: _sealed(BOB, life_s=900.0)),
    "one that is too large": (
        Rejection.OVERSIZED,
        lambda: _sealed(BOB, _stage(0, 99, ("unix:/" + "x" * MAX_RECORD_BYTES,))),
    ),
}


@pytest.mark.parametrize("name", sorted(INSIDER))
async def test_an_insider_with_the_key_cannot_speak_for_another_peer_nor_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Also what Bob himself may not say: then he is the insider."""
    reason, make = INSIDER[name]
    async with _swarm(tmp_path) as (alice, bob, liar):
        value, expires = make()
        await liar.store("stage.0", value, BOB.peer_id, expires)
        for each in (alice, bob):
            await each.node.get(("stage.0",))
            assert each.rejected(reason) >= 1, each.metrics.counts()
        assert BOB.peer_id in _warned(caplog, reason)


async def test_a_member_who_has_others_take_his_record_for_their_cache_hides_none_of_theirs(tmp_path: Path) -> None:
    """What hivemind has in its cache, and lives longer, it answers with in place of all that stands under a key."""
    async with _swarm(tmp_path) as (alice, bob, liar):
        value, expires = _sealed(MALLORY, GoneRecord(), life_s=100.0, topic="stage.1")
        protocol: Any = liar.raw.protocol
        key, raw = _key(SWARM, "stage.1"), protocol.serializer.dumps(value)
        for each in (alice, bob):
            peer = PeerID.from_base58(each.node.peer_id)
            told = None
            while told is None:
                told = await protocol.call_store(peer, [key], [raw], expires, [MALLORY.peer_id], in_cache=True)
            answer = None
            while answer is None:
                answer = await protocol.call_find(peer, [key])
            assert set(answer[key][0].value.data) == {BOB.peer_id, MALLORY.peer_id}


async def test_a_question_that_names_a_key_again_and_again_is_not_answered(tmp_path: Path) -> None:
    """All that stands under it would be in the answer as many times."""
    async with _swarm(tmp_path) as (alice, _, liar):
        protocol, peer = liar.raw.protocol, PeerID.from_base58(alice.node.peer_id)
        key = _key(SWARM, "stage.1").to_bytes()
        for keys in ([key, key], [number.to_bytes(20, "big") for number in range(10_000)]):
            request: Any = dht_pb2.FindRequest(keys=keys, peer=protocol.node_info)  # pyright: ignore
            with pytest.raises(P2PHandlerError, match=f"{len(keys)} keys in one "):
                await protocol.get_stub(peer).rpc_find(request)


async def test_several_records_of_one_topic_are_stored_by_one_message(tmp_path: Path) -> None:
    """As those of the roles of a host, for which it stores."""
    async with _swarm(tmp_path) as (alice, _, liar):
        owners = (MALLORY, Identity.generate())
        sealed = [_sealed(owner, GoneRecord()) for owner in owners]
        protocol: Any = liar.raw.protocol
        peer, keys = PeerID.from_base58(alice.node.peer_id), [_key(SWARM, "stage.0")] * len(owners)
        values = [protocol.serializer.dumps(value) for value, _ in sealed]
        names = [owner.peer_id for owner in owners]
        told = None
        while told is None:
            told = await protocol.call_store(peer, keys, values, [expires for _, expires in sealed], names)
        assert told == [True, True]


async def test_an_older_record_does_not_come_back_when_only_a_liar_still_has_one(tmp_path: Path) -> None:
    async with _swarm(tmp_path) as (alice, bob, liar):
        old = [r for r in await alice.node.get(("stage.1",)) if r.peer == BOB.peer_id]
        assert old
        now = CLOCK.unix_s()
        stale = seal(BOB, SWARM, "stage.1", _stage(1, 0, EVIL), sequence=old[0].sequence - 1, expires_unix_s=now + 60)
        for each in (alice, bob):
            raw: Any = each.node._node
            raw.protocol.storage = type(raw.protocol.storage)()  # they lose all that they keep for others
        liar.raw.protocol.storage = type(liar.raw.protocol.storage)()
        await liar.store("stage.1", stale, BOB.peer_id, now + 60)
        assert [r for r in await alice.node.get(("stage.1",)) if r.peer == BOB.peer_id] == []
        assert alice.rejected(Rejection.OUTDATED) >= 1
        # Until it expires it is in the way of nobody: what Bob says next lives longer in every storage.
        bob.registry._last_expiry_unix_s["stage.1"] = now + 60


async def test_a_server_of_another_version_is_seen_and_named_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with _swarm(tmp_path) as (alice, bob, liar):
        for number, version in enumerate((PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1)):
            identity = Identity(bytes([number]) * 32)
            expires = CLOCK.unix_s() + 30
            value = seal(identity, SWARM, "stage.0", _stage(0), sequence=5, expires_unix_s=expires, version=version)
            await liar.store("stage.0", value, identity.peer_id, expires)
        for each in (alice, bob):
            found: set[int] = set()
            while found != {PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1}:
                await each.registry.membership.wait_for(lambda _: True)
                each.registry.membership.update(await each.node.get(("stage.0",)))
                found = set(each.registry.membership.other_versions.values())
            assert each.registry.membership.view.num_replicas(2) == (1, 1)
        reasons = [vars(r)["reason"] for r in caplog.records if r.getMessage() == "peer.other_version"]
        assert any(reason.endswith("upgrade this side") for reason in reasons)
        assert any(reason.endswith("upgrade the other side") for reason in reasons)


def test_a_subkey_whose_text_is_no_text_is_counted() -> None:
    metrics = MetricRegistry()
    checker = RecordChecker(SWARM, str.encode, CLOCK, metrics)
    assert not SignedRecords(checker, Members(SWARM)).validate(
        DHTRecord(b"key", b"\xa2\xff\xfe", b"\xc4\x01x", CLOCK.unix_s() + 30)
    )
    assert metrics.counts() == {"records.dropped{reason=malformed}": 1}


@pytest.mark.parametrize(
    "lie",
    [["x", 0.0, None], [None, "x", None], [None, 0.0, ["x"]], [None, 0.0, [[1, 2, 3]]], ["x", 0.0, []], None, []],
    ids=repr,
)
async def test_true_records_in_an_untrue_frame_end_no_search(tmp_path: Path, lie: list[Any] | None) -> None:
    # A dictionary's limit of entries, the last expiry in it, and its records: None stands for the true ones.
    async with _swarm(tmp_path) as (alice, bob, liar):
        kept_by_liar = liar.raw.protocol.storage.data
        for stage, each in enumerate((alice, bob)):
            each.registry.advertise(_stage(stage, step=1))
        while len(kept_by_liar) < 2:
            await CLOCK.sleep_s(0.01)
        for item in kept_by_liar.values():
            kept: Any = item.value
            records = [[subkey, each.value, each.expiration_time] for subkey, each in kept.data.items()]
            said = [*lie[:2], records] if lie and lie[2] is None else lie
            kept.packb = lambda said=said: MSGPackSerializer.dumps(said)
        for each in (alice, bob):
            found = await each.node.get(("stage.0", "stage.1"))
            assert {opened.peer for opened in found} == {ALICE.peer_id, BOB.peer_id}
