"""The parsers of what peers sign: records of the DHT, and of rounds. An insider signs what he likes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any, Final, cast, get_args

import msgspec
import msgspec.inspect as schema

from shoal.clock import Clock
from shoal.control import records
from shoal.control.record_checker import RecordChecker
from shoal.errors import MALFORMED, RemoteProtocolError, SignatureError
from shoal.identity import Identity, verify
from shoal.swarm.records import seal, unseal
from shoal.telemetry.registry import MetricRegistry
from shoal.wire.handshake import PROTOCOL_VERSION
from shoal.wire.messages.round import QuorumTag, Record, SignedRecord
from shoal_lab.fuzz.frame_parsers import RUN, SAMPLES_EACH
from shoal_lab.fuzz.grammar import tree_of
from shoal_lab.fuzz.mutation import changed_bytes, changed_tree
from shoal_lab.fuzz.parser import Parser

_NAMESPACE: Final = "fuzzed"
_TTL_S: Final = 60.0
_STAGE: Final = 3
"""Where a server's record has its stage: behind tag, addresses and join time."""
_MAC_BYTES: Final = 32
_UNOWNED: Final = "12D3KooW9tGaPdJo5jmCpadQ971nfiq4kLcQjeBPYTfutBTtckPH"
"""The peer id of the point `0100..00`, for which anybody can sign."""
_HOLDS_FOR_ALL: Final = (1).to_bytes(32, "little") + bytes(32)
"""The signature that holds for every message, if such keys are let pass."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class RecordParser(Parser):
    """Records of the DHT, as the DHT checks them and as their reader does.

    Most inputs carry the swarm's MAC, and many a signature that holds: what an insider can make. Without it no input
    would come further than the MAC.
    """

    name = "record"

    def __init__(self, seed: int, clock: Clock) -> None:
        super().__init__(seed)
        self._clock = clock
        self._identity = Identity(self._random.randbytes(32))
        self._checker = self._new_checker()
        self._infos = [schema.type_info(kind) for kind in get_args(records.Record)]
        self._bodies = [tree_of(info, self._random) for info in self._infos for _ in range(4 * SAMPLES_EACH)]
        self._reached = Counter[str]()

    @property
    def reached(self) -> Mapping[str, int]:
        """How many inputs came how far: the reason for which they were refused, or `taken`."""
        return self._reached

    def make(self, random: Random) -> bytes:
        body = random.choice(self._bodies)
        match random.randrange(8):
            case 0:
                return changed_bytes(self._sealed(self._envelope(body, random)), random)
            case 1:
                sealed = self._sealed(self._envelope(body, random))
                return records.with_mac(_NAMESPACE, changed_bytes(sealed[_MAC_BYTES:], random))
            case 2:
                envelope = self._envelope(body, random)
                if random.random() < 0.5:
                    # Of the right form, and elsewhere or at another time than it may be.
                    envelope[1] = random.choice(records.topics(2))
                    envelope[4] += random.choice((-_TTL_S, 0.0, 1e3))
                    return self._sealed(envelope)
                changed = changed_tree(envelope, random)
                return self._sealed(cast("list[Any]", changed) if isinstance(changed, list) else [changed])
            case 3:
                envelope = self._envelope(body, random)
                envelope[2] = _UNOWNED
                return records.with_mac(_NAMESPACE, _encode([*envelope, _HOLDS_FOR_ALL]))
            case 4 | 5:
                return self._sealed(self._envelope(body, random, changed_tree(body, random)))
            case _:
                # What fits the schema, with values that the schema leaves open.
                return self._sealed(self._envelope(tree_of(random.choice(self._infos), random), random))

    def feed(self, data: bytes, random: Random) -> bool:
        # Where it stands in the DHT is up to who puts it there.
        topic, peer = _place_in(data, self._identity.peer_id)
        expires_unix_s = self._clock.unix_s() + _TTL_S
        # One has seen all that came before; to the other each input is the first.
        fresh = self._new_checker()
        for checker in (self._checker, fresh):
            checker.check(topic.encode(errors="replace"), peer, data, expires_unix_s)
        self._checker.accept(topic, peer, data)
        before = fresh.rejected
        is_taken = fresh.accept(topic, peer, data) is not None
        reasons = [reason for reason, count in fresh.rejected.items() if count > before.get(reason, 0)]
        self._reached["taken" if is_taken else reasons[0].value] += 1
        return is_taken

    def _new_checker(self) -> RecordChecker:
        return RecordChecker(_NAMESPACE, str.encode, self._clock, MetricRegistry())

    def _envelope(self, body: Any, random: Random, said: Any = None) -> list[Any]:
        topic = records.stage_topic(body[_STAGE]) if body[0] == "stage" else str(body[0])
        raw = _encode(body if said is None else said)
        expires_unix_s = self._clock.unix_s() + _TTL_S
        return [PROTOCOL_VERSION, topic, self._identity.peer_id, random.randrange(1 << 40), expires_unix_s, raw]

    def _sealed(self, envelope: list[Any]) -> bytes:
        """An insider signs what he likes; the signature is over the tree as it is."""
        signed = _encode([records.SIGNED_AS, _NAMESPACE, [*envelope, b""]])
        return records.with_mac(_NAMESPACE, _encode([*envelope, self._identity.sign(signed)]))


def _place_in(data: bytes, owner: str) -> tuple[str, str]:
    """Return the topic and the peer that a record names, or usual ones."""
    try:
        envelope = _decode(data[_MAC_BYTES:])
    except MALFORMED:
        return "client", owner
    fields = cast("list[object]", envelope) if isinstance(envelope, list) else []
    topic, peer = fields[1:3] if len(fields) > 2 else ("client", owner)
    return topic if isinstance(topic, str) else "client", peer if isinstance(peer, str) else owner


class _TreeParser(Parser):
    """Encoded structures that are changed as bytes or as trees."""

    _trees: list[Any]

    def make(self, random: Random) -> bytes:
        tree = random.choice(self._trees)
        if random.random() < 0.3:
            return changed_bytes(_encode(tree), random)
        return _encode(changed_tree(tree, random, random.choice(self._trees)))


class RoundParser(_TreeParser):
    """Round records, signed by an insider."""

    name = "round"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._identity = Identity(self._random.randbytes(32))
        info = schema.type_info(Record)
        self._trees = [tree_of(info, self._random) for _ in range(8 * SAMPLES_EACH)]
        for tree in self._trees:
            tree[0], tree[2][1] = RUN, self._identity.peer_id

    def feed(self, data: bytes, random: Random) -> bool:
        peer = self._identity.peer_id
        try:
            record = unseal(SignedRecord(data, peer, self._identity.sign(data)), RUN, verify)
            seal(record, peer, self._identity.sign)
        except (RemoteProtocolError, SignatureError):
            return False
        return True


class TagParser(_TreeParser):
    """Tags of quorums, which the frame decoder passes on as bytes."""

    name = "tag"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        info = schema.type_info(QuorumTag)
        self._trees = [tree_of(info, self._random) for _ in range(SAMPLES_EACH)]

    def feed(self, data: bytes, random: Random) -> bool:
        try:
            QuorumTag.decoded(data).encoded()
        except RemoteProtocolError:
            return False
        return True
