"""A node of the DHT whose user has no swarm key, and what such a user can make of all that the node sees.

Nobody speaks with it. If it could show the proofs of a member, it would see what every node may: the binary keys for
which it is asked or is told something, and the records that it and others hold there. What it stores, it stores at
every node that it knows, and it answers with it itself.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import msgspec
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from tests.unowned_keys import SIGNATURE, SMALL_ORDER, peer_id

from shoal.clock import SystemClock
from shoal.control.dht import DhtNode
from shoal.control.keyed_protocol import KeyedProtocol
from shoal.control.records import (
    SIGNED_AS,
    ClientRecord,
    GoneRecord,
    MirrorRecord,
    MonitorRecord,
    Record,
    RunRecord,
    StageRecord,
)
from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.wire.handshake import PROTOCOL_VERSION

MAC_BYTES = 32
KEY = b"\7" * 20
"""Of no topic."""
EVIL = ("tcp:127.0.0.1:9",)
_encode = msgspec.msgpack.encode


@dataclass(frozen=True)
class Held:
    """A true record as a node holds it."""

    key: DHTID
    subkey: str
    value: bytes
    expires_unix_s: float

    @property
    def mac(self) -> bytes:
        return self.value[:MAC_BYTES]

    @property
    def envelope(self) -> list[Any]:
        return msgspec.msgpack.decode(self.value[MAC_BYTES:])

    @property
    def topic(self) -> str:
        return self.envelope[1]


@dataclass(frozen=True)
class Forgery:
    """Something to store, and which kind of attack it is."""

    kind: str
    key: DHTID
    subkey: str
    value: bytes
    expires_unix_s: float


def records_of(topic: str) -> list[Record]:
    """Records of every kind that may stand under a topic, with the most harm in them."""
    match topic:
        case "run":
            run = RunRecord("evil", 2, 0.0)
            return [
                run,
                msgspec.structs.replace(run, ended=True),
                msgspec.structs.replace(run, kept=True),
                GoneRecord(),
            ]
        case "client":
            return [ClientRecord(EVIL, 0.0), ClientRecord(EVIL, 0.0, waits=True), GoneRecord()]
        case "mirror":
            return [MirrorRecord(EVIL, 0.0, held_round=9999), GoneRecord()]
        case "monitor":
            return [MonitorRecord(EVIL, 0.0), GoneRecord()]
        case _:
            stage = None if topic == "candidates" else int(topic.removeprefix("stage."))
            return [StageRecord(EVIL, 0.0, stage=stage), GoneRecord()]


def forgeries(held: Sequence[Held], now_unix_s: float, me: Identity) -> Iterator[Forgery]:
    """Yield all that a stranger can make of the records that it holds."""
    later = now_unix_s + 60.0
    keys = {each.topic: each.key for each in held}
    macs = {each.topic: each.mac for each in held}
    for topic, key in keys.items():
        for record in records_of(topic):
            for signer, sign in _signers(me):
                for sequence in (1 << 50, (1 << 50) + 1):
                    envelope = [PROTOCOL_VERSION, topic, signer, sequence, later, _encode(record)]
                    signature = sign(_encode([SIGNED_AS, secrets.token_hex(32), [*envelope, b""]]))
                    raw = _encode([*envelope, signature])
                    kind = "foreign_key" if signer == me.peer_id else "unowned_key"
                    for mac in (b"", bytes(MAC_BYTES), macs[topic]):
                        yield Forgery(kind, key, signer, mac + raw, later)
    for each in held:
        envelope = each.envelope
        for name, changed in {
            "prolonged": [*envelope[:4], later, *envelope[5:]],
            "newer": [*envelope[:3], envelope[3] + 1, *envelope[4:]],
            "other_body": [*envelope[:5], _encode(records_of(each.topic)[0]), envelope[6]],
            "signed_again": [*envelope[:6], me.sign(each.value)],
            "other_owner": [*envelope[:2], me.peer_id, *envelope[3:]],
        }.items():
            yield Forgery(name, each.key, str(changed[2]), each.mac + _encode(changed), later)
        yield Forgery("kept_longer", each.key, each.subkey, each.value, later)
        yield Forgery("cut", each.key, each.subkey, each.value[:-1], later)
        yield Forgery("cut", each.key, each.subkey, each.value[MAC_BYTES:], later)
        yield Forgery("under_another_name", each.key, me.peer_id, each.value, each.expires_unix_s)
        for topic, key in keys.items():
            if topic != each.topic:
                yield Forgery("under_another_topic", key, each.subkey, each.value, each.expires_unix_s)
    for each in held:
        yield Forgery("replayed", each.key, each.subkey, each.value, each.expires_unix_s)


def _signers(me: Identity) -> Iterator[tuple[str, Any]]:
    yield me.peer_id, me.sign
    for key in SMALL_ORDER:
        yield peer_id(key), lambda _: SIGNATURE


class Stranger:
    """A node without our checks.

    Attributes:
        keys: binary keys of topics that it has been asked for or told of.
        identity: of the node.
    """

    def __init__(self, node: DhtNode, identity: Identity) -> None:
        self.node, self.identity = node, identity
        self.keys: set[DHTID] = set()
        raw: Any = node._node
        self._protocol = raw.protocol
        self._protocol.record_validator = None
        storage = self._protocol.storage
        for name in ("store", "get"):
            setattr(storage, name, self._noting(getattr(storage, name)))

    def _noting(self, method: Any) -> Any:
        def noted(key: DHTID, *arguments: Any, **more: Any) -> Any:
            self.keys.add(key)
            return method(key, *arguments, **more)

        return noted

    async def look(self) -> list[Held]:
        """Return the records that the nodes hold under the keys that it has heard of."""
        found: dict[tuple[DHTID, str], Held] = {}
        for peer in tuple(self._protocol.routing_table.peer_id_to_uid):
            answer = await self._protocol.call_find(peer, list(self.keys)) if self.keys else None
            for key, (item, _) in (answer or {}).items():
                if item is None or not isinstance(item.value, DictionaryDHTValue):
                    continue
                for subkey, each in item.value.items():
                    value = MSGPackSerializer.loads(each.value)
                    if isinstance(value, bytes) and isinstance(subkey, str):
                        held = Held(key, subkey, value, each.expiration_time)
                        if _is_true(held):
                            found[key, subkey] = held
        return list(found.values())

    async def tell(self, forged: Sequence[Forgery]) -> None:
        """Store these everywhere, and hold them."""
        keys, subkeys = [each.key for each in forged], [each.subkey for each in forged]
        values = [MSGPackSerializer.dumps(each.value) for each in forged]
        expires = [each.expires_unix_s for each in forged]
        for key, subkey, value, until in zip(keys, subkeys, values, expires, strict=True):
            self._protocol.storage.store(key, value, until, subkey=subkey)
        for peer in tuple(self._protocol.routing_table.peer_id_to_uid):
            await self._protocol.call_store(peer, keys, values, expires, subkeys)

    def call_itself(self, node_id: bytes) -> None:
        """Say that this is its id."""
        self._protocol.node_info = dht_pb2.NodeInfo(node_id=node_id)

    async def overwhelm(self, peers: Sequence[PeerId]) -> set[str]:
        """Do with each of these what would end its process, or fill its memory; return what they say to that."""
        deep = dht_pb2.StoreRequest(
            keys=[KEY], subkeys=[b""], values=[_nested(400)], expiration_time=[9e9], in_cache=[False]
        )
        wide = dht_pb2.FindRequest(keys=[b""] * 20_000)
        said: set[str] = set()
        for who in map(PeerID.from_base58, peers):
            stub: Any = super(KeyedProtocol, self._protocol).get_stub(who)
            for call, request in (("rpc_store", deep), ("rpc_find", wide)):
                for proof in (b"", self._protocol.members.proof(b"asks", self._protocol.me, who)):
                    request.auth.signature = proof
                    try:
                        said.add(repr(await getattr(stub, call)(request, timeout=10.0)))
                    except P2PHandlerError as error:
                        said |= set(re.findall(r"\('(.*)'\)", str(error)))
        return said


def _nested(levels: int) -> bytes:
    """A value that hivemind unpacks level by level."""
    value = msgpack.packb(0)
    for _ in range(levels):
        value = msgpack.packb(msgpack.ExtType(0x40, value))
    return value


def _is_true(held: Held) -> bool:
    """Whether it has the form of a record of the swarm: what others have let pass of its own lies has not."""
    try:
        envelope = held.envelope
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return isinstance(envelope, list) and len(envelope) == 7 and envelope[2] == held.subkey


@asynccontextmanager
async def stranger(state_dir: Path, initial_peers: Sequence[str], shows: str = "") -> AsyncGenerator[Stranger]:
    """Ping the nodes of a swarm's DHT without its key.

    Args:
        shows: the namespace whose proofs it can show all the same, so that others speak with it; empty: of none.
    """
    me = Identity.generate()
    async with await DhtNode.create(
        me,
        namespace=shows or secrets.token_hex(32),
        state_dir=state_dir,
        clock=SystemClock(),
        initial_peers=initial_peers,
    ) as node:
        yield Stranger(node, me)
