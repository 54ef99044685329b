"""What peers announce in the DHT: schema-checked structs, sealed with the swarm's key and the announcing peer's.

    sealed record = MAC of the envelope, 32 bytes | envelope = (version, topic, peer, sequence, expiry, body, signature)

The MAC's key is derived from the swarm's key, so nothing that a stranger makes is even decoded: without the MAC nobody
looks at the rest. It covers all that the DHT keeps beside a record as well (topic, peer, expiry), which has to be what
the envelope says. The signature then tells which peer of the swarm speaks. It also covers the namespace, which is never
sent: the DHT sees only a hash of `namespace/topic`. A record of one experiment cannot be replayed in another. The form
of a sealed record is the same in all versions of the protocol from 5 on, so a peer of another one can be named.
"""

from __future__ import annotations

import enum
import functools
import hmac
from dataclasses import dataclass
from typing import Annotated

import msgspec

from shoal.errors import MALFORMED, RecordRejected, SignatureError
from shoal.identity import Identity, derived_key, verify
from shoal.ids import MAX_STAGES, Ordinal, PeerId, Stage
from shoal.wire.handshake import PROTOCOL_VERSION
from shoal.wire.messages.base import Cap, HeldRound, Hop, HostName, Struct

MAX_RECORD_BYTES = 8 * 1024
"""Larger sealed records are refused; hivemind itself loses values above 4 MiB without a word."""

TTL_S = 30.0
"""For so long a record stands unless it is renewed."""

MAX_TTL_S = 120.0
"""A record that wants to live longer is refused, or a peer could leave records behind for ever."""

SIGNED_AS = b"shoal-record"
"""Stands before what is signed, so that nothing else that a peer signs can be taken for a record."""

_KEY_LABEL = b"shoal records 1"
_MAC_BYTES = 32
MAX_INDEX = 9999
"""Of a server on its host."""

# An infinite load or age would win every comparison.
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Moment = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
"""Of the wall clock, wherever it stands; but finite."""
FolderName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")]
# Shown on terminals: what it may hold is checked before anybody sees it.
UNNAMED = "unnamed"
"""The host of a peer that does not say what its host is called."""
Address = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Addresses = Annotated[tuple[Address, ...], msgspec.Meta(min_length=1, max_length=16)]
MAX_MADDRS = 4
"""Of one peer; each interface of its host has one."""
# Where others can join the DHT through the peer: the first one of a swarm may be gone for good.
Maddrs = Annotated[tuple[Address, ...], msgspec.Meta(max_length=MAX_MADDRS)]


class StageRecord(Struct, frozen=True, tag="stage"):
    """A server. `stage` is None while it waits for one; `base_round` is -1 while it holds no record's parameters.

    `host` and `index`, its number there, are for people (`swarm.view.SwarmView.name_of`); nothing is decided by them.
    The other fields are those of `swarm.view.Replica`.
    """

    addresses: Addresses
    join_unix_s: Amount
    stage: Stage | None = None
    free_memory_bytes: Ordinal = 0
    load: Amount = 0.0
    step: Ordinal = 0
    base_round: HeldRound = 0
    pinned: bool = False
    serving: bool = False
    max_microbatch_samples: Cap | None = None
    device_memory_bytes: Ordinal = 0
    free_disk_bytes: Ordinal = 0
    cap: Cap | None = None
    maddrs: Maddrs = ()
    host: HostName = UNNAMED
    index: Annotated[int, msgspec.Meta(ge=0, le=MAX_INDEX)] = 0


MAX_UNDIALLED = 16
"""Servers of which a client's record says that they cannot be dialled."""
MAX_REASON_CHARS = 160


class Undialled(Struct, frozen=True):
    """A server that cannot be dialled where it says, and why."""

    peer: PeerId
    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARS)]


class ClientRecord(Struct, frozen=True, tag="client"):
    """A client; one that `waits` does nothing as long as it can reach another one before it. `undialled` are servers
    that its host has dialled in vain: they may be unable to hear it over a connection. A run that is `resumed` goes
    on from a checkpoint, and needs no D_0."""

    addresses: Addresses
    join_unix_s: Amount
    maddrs: Maddrs = ()
    waits: bool = False
    resumed: bool = False
    undialled: Annotated[tuple[Undialled, ...], msgspec.Meta(max_length=MAX_UNDIALLED)] = ()
    host: HostName = UNNAMED


class RunRecord(Struct, frozen=True, tag="run"):
    """The training job, announced by a client. It says whom to ask (`control.run_question`); nobody acts on it alone.

    An `ended` run needs no servers any more. While no client announces the run, hosts of servers do (`kept`), so that
    the next client finds it.
    """

    run_id: FolderName
    num_stages: Annotated[int, msgspec.Meta(ge=1, le=MAX_STAGES)]
    join_unix_s: Amount
    ended: bool = False
    kept: bool = False


class MonitorRecord(Struct, frozen=True, tag="monitor"):
    """The monitor."""

    addresses: Addresses
    join_unix_s: Amount
    maddrs: Maddrs = ()


class MirrorRecord(Struct, frozen=True, tag="mirror"):
    """A mirror. Of every stage it holds the state of record `held_round`, or of a newer one; -1: not of all stages."""

    addresses: Addresses
    join_unix_s: Amount
    maddrs: Maddrs = ()
    host: HostName = UNNAMED
    held_round: HeldRound = -1


class GoneRecord(Struct, frozen=True, tag="gone"):
    """The peer has left; stands under the topic of the record that it takes back."""


Record = StageRecord | ClientRecord | RunRecord | MonitorRecord | MirrorRecord | GoneRecord
"""What a body may be."""


@dataclass(frozen=True)
class OtherVersion:
    """In place of the record of a peer that speaks another version of the protocol: what it says is not read."""

    version: int


class _Envelope(Struct, frozen=True):
    version: Ordinal
    topic: str
    peer: PeerId
    sequence: Ordinal
    expires_unix_s: Moment
    body: bytes
    signature: bytes


@dataclass(frozen=True)
class VerifiedRecord:
    """A record that verified.

    Attributes:
        sequence: grows with every record that the peer signs, over all topics and restarts.
        expires_unix_s: when it stops being true unless it is renewed.
    """

    topic: str
    peer: PeerId
    sequence: int
    expires_unix_s: float
    record: Record | OtherVersion


class Rejection(enum.StrEnum):
    """Why a record was dropped."""

    OVERSIZED = "oversized"
    BAD_MAC = "bad_mac"
    MALFORMED = "malformed"
    WRONG_TOPIC = "wrong_topic"
    WRONG_SIGNER = "wrong_signer"
    BAD_SIGNATURE = "bad_signature"
    BAD_EXPIRY = "bad_expiry"
    EXPIRED = "expired"
    OUTDATED = "outdated"


_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(_Envelope).decode
_decode_record = msgspec.msgpack.Decoder(Record).decode


def stage_topic(stage: int | None) -> str:
    """Return the topic of the servers of a stage, or of those that wait for one."""
    return "candidates" if stage is None else f"stage.{stage}"


def topic_of(record: Record | OtherVersion) -> str | None:
    """Return the only topic under which a record may stand; None where any will do."""
    match record:
        case StageRecord():
            return stage_topic(record.stage)
        case ClientRecord():
            return "client"
        case RunRecord():
            return "run"
        case MonitorRecord():
            return "monitor"
        case MirrorRecord():
            return "mirror"
        case GoneRecord() | OtherVersion():
            return None


def with_maddrs(record: Record, maddrs: tuple[str, ...]) -> Record:
    """Return a record that says where others can join through its peer, if it is of a kind that says so."""
    if isinstance(record, StageRecord | ClientRecord | MonitorRecord | MirrorRecord):
        return msgspec.structs.replace(record, maddrs=maddrs[:MAX_MADDRS])
    return record


def with_addresses(record: Record, addresses: tuple[str, ...]) -> Record:
    """Return a record that says where its peer can be dialled, if it is of a kind that says so."""
    if isinstance(record, StageRecord | ClientRecord | MonitorRecord | MirrorRecord):
        return msgspec.structs.replace(record, addresses=addresses)
    return record


def topics(num_stages: int) -> tuple[str, ...]:
    """Return every topic of a run."""
    return ("monitor", "run", "client", "mirror", stage_topic(None), *(stage_topic(s) for s in range(num_stages)))


def hop_of(opened: VerifiedRecord) -> Hop:
    """Return where the announcing peer can be dialled; a record without addresses gives a hop without."""
    return Hop(opened.peer, getattr(opened.record, "addresses", ()))


def seal(
    identity: Identity,
    namespace: str,
    topic: str,
    record: Record,
    *,
    sequence: int,
    expires_unix_s: float,
    version: int = PROTOCOL_VERSION,
) -> bytes:
    """Return the bytes to store under `topic` and the identity's peer id."""
    unsigned = _Envelope(version, topic, identity.peer_id, sequence, expires_unix_s, _encode(record), b"")
    envelope = msgspec.structs.replace(unsigned, signature=identity.sign(_signed(namespace, unsigned)))
    return with_mac(namespace, _encode(envelope))


def with_mac(namespace: str, envelope: bytes) -> bytes:
    """Return an envelope as it is stored, with the MAC that whoever has the swarm's key can make."""
    return hmac.digest(_mac_key(namespace), envelope, "sha3_256") + envelope


def require_small(topic: str, value: bytes) -> None:
    """Refuse a sealed record that no node would take.

    Raises:
        RecordRejected: it is too large.
    """
    if len(value) > MAX_RECORD_BYTES:
        raise RecordRejected(f"the record for {topic} has {len(value)} bytes, at most {MAX_RECORD_BYTES} are allowed")


def unseal(value: bytes, namespace: str, subkey: str) -> VerifiedRecord | Rejection:
    """Check everything about a sealed record that does not depend on the time or on other records.

    Args:
        value: the bytes that stand in the DHT.
        subkey: the peer id under which they stand.
    """
    if len(value) > MAX_RECORD_BYTES:
        return Rejection.OVERSIZED
    # Before a byte of it is understood: what strangers store costs a hash, and reaches no parser.
    if not hmac.compare_digest(with_mac(namespace, value[_MAC_BYTES:]), value):
        return Rejection.BAD_MAC
    try:
        envelope = _decode_envelope(value[_MAC_BYTES:])
        is_ours = envelope.version == PROTOCOL_VERSION
        record = _decode_record(envelope.body) if is_ours else OtherVersion(envelope.version)
    except MALFORMED:
        return Rejection.MALFORMED
    if topic_of(record) not in (envelope.topic, None):
        return Rejection.WRONG_TOPIC
    if envelope.peer != subkey:
        return Rejection.WRONG_SIGNER
    try:
        verify(envelope.peer, _signed(namespace, envelope), envelope.signature)
    except SignatureError:
        return Rejection.BAD_SIGNATURE
    return VerifiedRecord(envelope.topic, envelope.peer, envelope.sequence, envelope.expires_unix_s, record)


@functools.lru_cache(maxsize=8)
def _mac_key(namespace: str) -> bytes:
    # The namespace is a hash of the swarm's key, and as secret.
    return derived_key(namespace.encode(), _KEY_LABEL)


def _signed(namespace: str, envelope: _Envelope) -> bytes:
    """Return what the signature is over: the namespace, and all of the envelope but the signature."""
    return _encode((SIGNED_AS, namespace, msgspec.structs.replace(envelope, signature=b"")))
