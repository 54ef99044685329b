"""The parsers of what peers sign: records of the DHT, and of rounds. An insider signs what he likes."""

from __future__ import annotations

from random import Random
from typing import Any, Final, cast, get_args

import msgspec
import msgspec.inspect as schema

from shoal.clock import Clock
from shoal.control import records
from shoal.control.record_checker import RecordChecker
from shoal.errors import RemoteProtocolError, SignatureError
from shoal.identity import Identity, verify
from shoal.swarm.records import seal, unseal
from shoal.telemetry import Registry
from shoal.testing.fuzz.frame_parsers import RUN, SAMPLES_EACH
from shoal.testing.fuzz.grammar import tree_of
from shoal.testing.fuzz.mutation import changed_bytes, changed_tree
from shoal.testing.fuzz.parser import Parser
from shoal.wire.handshake import (
    PROTOCOL_VERSION,
)
from shoal.wire.messages.round import Record, SignedRecord

_NAMESPACE: Final = "fuzzed"
_TTL_S: Final = 60.0
_STAGE: Final = 3
"""Where a server's record has its stage: behind tag, addresses and join time."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class RecordParser(Parser):
    """Records of the DHT, as the DHT checks them and as their reader does."""

    name = "record"

    def __init__(self, seed: int, clock: Clock) -> None:
        super().__init__(seed)
        self._clock = clock
        self._identity = Identity(self._random.randbytes(32))
        self._checker = RecordChecker(_NAMESPACE, str.encode, clock, Registry())
        infos = [schema.type_info(kind) for kind in get_args(records.Record)]
        self._bodies = [tree_of(info, self._random) for info in infos for _ in range(4 * SAMPLES_EACH)]

    def make(self, random: Random) -> bytes:
        body = random.choice(self._bodies)
        topic = records.stage_topic(body[_STAGE]) if body[0] == "stage" else str(body[0])
        wrong = random.randrange(4)
        raw = _encode(changed_tree(body, random) if wrong == 0 else body)
        expires_unix_s = self._clock.unix_s() + _TTL_S
        envelope: list[Any] = [
            PROTOCOL_VERSION,
            topic,
            self._identity.peer_id,
            random.randrange(4),
            expires_unix_s,
            raw,
        ]
        if wrong == 1:
            changed = changed_tree(envelope, random)
            envelope = cast("list[Any]", changed) if isinstance(changed, list) else [changed]
        # An insider signs what he likes; the signature is over the tree as it is.
        signed = _encode([records.SIGNED_AS, _NAMESPACE, [*envelope, b""]])
        value = _encode([*envelope, self._identity.sign(signed)])
        return changed_bytes(value, random) if wrong == 2 else value

    def feed(self, data: bytes, random: Random) -> bool:
        peer = self._identity.peer_id
        # Where it stands in the DHT is up to who puts it there.
        topic = _topic_in(data)
        self._checker.check(topic.encode(errors="replace"), peer, data, self._clock.unix_s() + _TTL_S)
        return self._checker.accept(topic, peer, data) is not None


def _topic_in(data: bytes) -> str:
    try:
        envelope = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "client"
    fields = cast("list[object]", envelope) if isinstance(envelope, list) else []
    return fields[1] if len(fields) > 1 and isinstance(fields[1], str) else "client"


class RoundParser(Parser):
    """Round records, signed by an insider."""

    name = "round"

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._identity = Identity(self._random.randbytes(32))
        info = schema.type_info(Record)
        self._trees = [tree_of(info, self._random) for _ in range(8 * SAMPLES_EACH)]
        for tree in self._trees:
            tree[0], tree[2][1] = RUN, self._identity.peer_id

    def make(self, random: Random) -> bytes:
        tree = random.choice(self._trees)
        if random.random() < 0.3:
            return changed_bytes(_encode(tree), random)
        return _encode(changed_tree(tree, random, random.choice(self._trees)))

    def feed(self, data: bytes, random: Random) -> bool:
        peer = self._identity.peer_id
        try:
            record = unseal(SignedRecord(data, peer, self._identity.sign(data)), RUN, verify)
            seal(record, peer, self._identity.sign)
        except (RemoteProtocolError, SignatureError):
            return False
        return True
