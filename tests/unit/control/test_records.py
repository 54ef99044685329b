"""Sealed records: what verifies, and each reason for which one does not."""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.set_clock import SetClock
from tests.unowned_keys import NON_CANONICAL, SIGNATURE, SMALL_ORDER, peer_id

from shoal.control.record_checker import RecordChecker
from shoal.control.records import (
    MAX_RECORD_BYTES,
    ClientRecord,
    GoneRecord,
    MirrorRecord,
    MonitorRecord,
    OtherVersion,
    Record,
    Rejection,
    RunRecord,
    StageRecord,
    VerifiedRecord,
    hop_of,
    seal,
    topic_of,
    topics,
    unseal,
    with_mac,
    with_maddrs,
)
from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.telemetry.registry import MetricRegistry
from shoal.wire.handshake import PROTOCOL_VERSION

ALICE, MALLORY = Identity.generate(), Identity.generate()
NAMESPACE = "n" * 64
ADDRESSES = ("unix:/run/a.sock",)
STAGE = StageRecord(ADDRESSES, 12.5, stage=1, load=3.5, base_round=-1, pinned=True)


def _seal(
    record: Record = STAGE, topic: str = "stage.1", *, by: Identity = ALICE, sequence: int = 7, expires: float = 1030.0
) -> bytes:
    return seal(by, NAMESPACE, topic, record, sequence=sequence, expires_unix_s=expires)


def _checker(clock: SetClock | None = None) -> RecordChecker:
    return RecordChecker(NAMESPACE, str.encode, clock or SetClock(), MetricRegistry())


@pytest.mark.parametrize(
    "record",
    [
        STAGE,
        StageRecord(ADDRESSES, 0.0),
        StageRecord(ADDRESSES, 0.0, host="B" * 32, index=7),
        ClientRecord(ADDRESSES, 1.0, waits=True, host="box-2.lan_3"),
        RunRecord("sandbox-1", 2, 1.0, ended=True),
        MonitorRecord(ADDRESSES, 1.0),
        MirrorRecord(ADDRESSES, 1.0, host="box2", held_round=3),
        GoneRecord(),
    ],
)
def test_a_record_comes_out_as_it_went_in(record: Record) -> None:
    topic = topic_of(record) or "client"
    opened = unseal(_seal(record, topic), NAMESPACE, ALICE.peer_id)
    assert opened == VerifiedRecord(topic, ALICE.peer_id, 7, 1030.0, record)
    assert topic in topics(2)


@pytest.mark.parametrize("run_id", ["../up", "a/b", "", ".hidden", "x" * 200, "line\n"])
def test_a_run_whose_name_is_no_folder_name_is_dropped(run_id: str) -> None:
    assert unseal(_seal(RunRecord(run_id, 2, 1.0), "run"), NAMESPACE, ALICE.peer_id) is Rejection.MALFORMED


def test_a_hop_has_the_signer_as_its_peer() -> None:
    opened = unseal(_seal(), NAMESPACE, ALICE.peer_id)
    assert isinstance(opened, VerifiedRecord)
    assert hop_of(opened).peer == ALICE.peer_id
    assert hop_of(opened).addresses == ADDRESSES


def _changed(**changes: object) -> bytes:
    """Return the envelope of Alice's record with parts of it replaced and the signature kept."""
    names = ("version", "topic", "peer", "sequence", "expires", "body", "signature")
    parts = dict(zip(names, msgspec.msgpack.decode(_seal()[32:]), strict=True))
    return msgspec.msgpack.encode(list((parts | changes).values()))


def _envelope(**changes: object) -> bytes:
    """The same as an insider stores it."""
    return with_mac(NAMESPACE, _changed(**changes))


def _kept_mac(**changes: object) -> bytes:
    """The same as a stranger stores it who holds Alice's record."""
    return _seal()[:32] + _changed(**changes)


BODY = msgspec.msgpack.Encoder().encode
NO_HOST_NAMES = (
    "",
    "x" * 33,
    "two words",
    "\x1b[31mred",
    "box\n",
    "\u202exob",
    "b\u00f6x",
    "-box",
    "a@b",
    "a#b",
    "a/b",
)


def _host(name: str) -> bytes:
    """A record of a server whose host is called so."""
    return _envelope(body=BODY(msgspec.structs.replace(STAGE, host=name)))


REJECTED = [
    ("larger than allowed", Rejection.OVERSIZED, b"x" * (MAX_RECORD_BYTES + 1)),
    ("no msgpack", Rejection.MALFORMED, with_mac(NAMESPACE, b"\xc1garbage")),
    ("cut off by an insider", Rejection.MALFORMED, with_mac(NAMESPACE, _seal()[32:-5])),
    ("another struct", Rejection.MALFORMED, with_mac(NAMESPACE, msgspec.msgpack.encode(["stage.1", 5]))),
    ("body of no known kind", Rejection.MALFORMED, _envelope(body=BODY(["nonsense", 1]))),
    ("body with a field too many", Rejection.MALFORMED, _envelope(body=BODY([*msgspec.to_builtins(STAGE), 1]))),
    ("no address", Rejection.MALFORMED, _envelope(body=BODY(["stage", [], 1.0]))),
    (
        "text that is no text",
        Rejection.MALFORMED,
        with_mac(NAMESPACE, _seal()[32:].replace(b"stage.1", b"stage\xff\xfe")),
    ),
    (
        "a body whose text is none",
        Rejection.MALFORMED,
        _envelope(body=BODY(STAGE).replace(b"unix", b"\xff\xfe\xff\xfe")),
    ),
    ("an endless nest", Rejection.MALFORMED, _envelope(body=b"\x91" * 5000)),
    ("infinite load", Rejection.MALFORMED, _envelope(body=BODY(["stage", ["unix:/a"], 1.0, 0, 0, float("inf")]))),
    ("load that is no number", Rejection.MALFORMED, _envelope(body=BODY(["stage", ["u:a"], 1.0, 0, 0, float("nan")]))),
    ("negative memory", Rejection.MALFORMED, _envelope(body=BODY(["stage", ["unix:/a"], 1.0, 0, -1]))),
    *[(f"a host called {host!a}", Rejection.MALFORMED, _host(host)) for host in NO_HOST_NAMES],
    ("a server's number below 0", Rejection.MALFORMED, _envelope(body=BODY(msgspec.structs.replace(STAGE, index=-1)))),
    ("never to expire", Rejection.MALFORMED, _seal(expires=math.inf)),
    ("to expire at no time", Rejection.MALFORMED, _seal(expires=math.nan)),
    ("a stage under another stage's topic", Rejection.WRONG_TOPIC, _seal(topic="stage.0")),
    ("the monitor's record as a client", Rejection.WRONG_TOPIC, _seal(MonitorRecord(ADDRESSES, 1.0), "client")),
    ("signed by somebody else", Rejection.WRONG_SIGNER, _seal(by=MALLORY)),
    ("claims to be the owner", Rejection.BAD_SIGNATURE, _envelope(signature=MALLORY.sign(b"anything"))),
    ("body exchanged", Rejection.BAD_SIGNATURE, _envelope(body=BODY(StageRecord(("unix:/evil",), 1.0, stage=1)))),
    ("version changed", Rejection.BAD_SIGNATURE, _envelope(version=PROTOCOL_VERSION + 1)),
    ("sequence raised", Rejection.BAD_SIGNATURE, _envelope(sequence=8)),
    ("life prolonged", Rejection.BAD_SIGNATURE, _envelope(expires=9999.0)),
    (
        "another swarm's",
        Rejection.BAD_MAC,
        seal(ALICE, "o" * 64, "stage.1", STAGE, sequence=7, expires_unix_s=1030.0),
    ),
    (
        "another swarm's, sealed again by an insider",
        Rejection.BAD_SIGNATURE,
        with_mac(NAMESPACE, seal(ALICE, "o" * 64, "stage.1", STAGE, sequence=7, expires_unix_s=1030.0)[32:]),
    ),
    ("nothing", Rejection.BAD_MAC, b""),
    ("less than a MAC", Rejection.BAD_MAC, b"x" * 31),
    ("a MAC of nothing", Rejection.BAD_MAC, b"x" * 32),
    ("cut off", Rejection.BAD_MAC, _seal()[:-5]),
    ("without its MAC, as version 4 had it", Rejection.BAD_MAC, _seal()[32:]),
    ("another MAC", Rejection.BAD_MAC, bytes([_seal()[0] ^ 1]) + _seal()[1:]),
    ("a MAC by the namespace itself", Rejection.BAD_MAC, hmac.digest(NAMESPACE.encode(), _seal()[32:], "sha3_256")),
]
HELD: dict[str, Callable[[], dict[str, Any]]] = {
    "its version": lambda: {"version": PROTOCOL_VERSION + 1},
    "its topic": lambda: {"topic": "stage.0"},
    "its owner": lambda: {"peer": MALLORY.peer_id},
    "its age": lambda: {"sequence": 8},
    "its life": lambda: {"expires": 1060.0},
    "what it says": lambda: {"body": BODY(RunRecord("evil", 2, 0.0))},
    "its signature": lambda: {"signature": MALLORY.sign(b"anything")},
}


@pytest.mark.parametrize("name", sorted(HELD))
def test_who_holds_a_record_can_exchange_nothing_of_it(name: str) -> None:
    """Also with a signature that holds: only the swarm's key makes the MAC."""
    checker, changes = _checker(), HELD[name]()
    value = _kept_mac(**changes)
    topic, peer = changes.get("topic", "stage.1"), changes.get("peer", ALICE.peer_id)
    assert not checker.check(topic.encode(), peer, value, changes.get("expires", 1030.0))
    assert checker.accept(topic, peer, value) is None
    assert checker.rejected == {Rejection.BAD_MAC: 2}


@pytest.mark.parametrize("key", SMALL_ORDER + NON_CANONICAL, ids=bytes.hex)
def test_a_key_that_nobody_owns_signs_no_record_with_or_without_the_swarms_key(key: bytes) -> None:
    """Shown live once: one such record made a host of servers leave."""
    checker, peer = _checker(), peer_id(key)
    for sequence in range(32):
        said = {"topic": "run", "body": BODY(RunRecord("evil", 2, 0.0)), "signature": SIGNATURE}
        value = _changed(peer=peer, sequence=sequence, **said)
        for each in (value, _seal()[:32] + value, bytes(32) + value, with_mac(NAMESPACE, value)):
            assert not checker.check(b"run", peer, each, 1030.0)
            assert checker.accept("run", peer, each) is None
    assert checker.rejected == {Rejection.BAD_MAC: 3 * 2 * 32, Rejection.BAD_SIGNATURE: 2 * 32}


@pytest.mark.parametrize(("reason", "value"), [(r, v) for _, r, v in REJECTED], ids=[name for name, _, _ in REJECTED])
def test_what_does_not_verify_is_dropped_and_counted(reason: Rejection, value: bytes) -> None:
    checker = _checker()
    assert unseal(value, NAMESPACE, ALICE.peer_id) is reason
    assert not checker.check(b"stage.1", ALICE.peer_id, value, 1030.0)
    assert checker.accept("stage.1", ALICE.peer_id, value) is None
    assert checker.rejected == {reason: 2}


def test_a_record_of_its_owner_is_stored_and_believed() -> None:
    checker = _checker()
    assert checker.check(b"stage.1", ALICE.peer_id, _seal(), 1030.0)
    opened = checker.accept("stage.1", ALICE.peer_id, _seal())
    assert opened is not None
    assert opened.record == STAGE
    assert not checker.rejected


def test_a_record_under_the_key_of_another_topic_is_dropped() -> None:
    checker = _checker()
    gone = _seal(GoneRecord(), "client")
    assert not checker.check(b"stage.1", ALICE.peer_id, gone, 1030.0)
    assert checker.accept("stage.1", ALICE.peer_id, gone) is None
    assert checker.rejected == {Rejection.WRONG_TOPIC: 2}


def test_the_dht_may_not_keep_a_record_longer_than_it_was_signed_for() -> None:
    checker = _checker()
    assert not checker.check(b"stage.1", ALICE.peer_id, _seal(), 1031.0)
    for_ever = _seal(expires=9e9)
    assert not checker.check(b"stage.1", ALICE.peer_id, for_ever, 9e9)
    assert checker.rejected == {Rejection.BAD_EXPIRY: 2}


def test_an_expired_record_is_not_believed_but_does_not_spoil_an_answer() -> None:
    clock = SetClock()
    checker = _checker(clock)
    clock.now = 1030.0
    assert checker.accept("stage.1", ALICE.peer_id, _seal()) is None
    assert checker.rejected == {Rejection.EXPIRED: 1}
    assert checker.check(b"stage.1", ALICE.peer_id, _seal(), 1030.0)


def test_an_older_record_is_not_believed_after_a_newer_one() -> None:
    checker = _checker()
    newer = _seal(sequence=8, expires=1031.0)
    assert checker.accept("stage.1", ALICE.peer_id, newer)
    assert checker.accept("stage.1", ALICE.peer_id, _seal(sequence=7)) is None
    assert checker.accept("stage.1", ALICE.peer_id, newer), "the same again is no news, but true"
    assert checker.rejected == {Rejection.OUTDATED: 1}


def test_sequence_numbers_of_topics_and_peers_are_compared_apart() -> None:
    checker = _checker()
    assert checker.accept("stage.1", ALICE.peer_id, _seal(sequence=8))
    assert checker.accept("client", ALICE.peer_id, _seal(ClientRecord(ADDRESSES, 1.0), "client", sequence=2))
    assert checker.accept("stage.1", MALLORY.peer_id, _seal(by=MALLORY, sequence=1))


def test_a_subkey_that_is_no_peer_id_is_dropped() -> None:
    assert unseal(_seal(), NAMESPACE, PeerId("")) is Rejection.WRONG_SIGNER


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_record_of_another_version_is_verified_and_kept_but_not_read(version: int) -> None:
    checker = _checker()
    value = seal(ALICE, NAMESPACE, "stage.1", STAGE, sequence=7, expires_unix_s=1030.0, version=version)
    assert checker.check(b"stage.1", ALICE.peer_id, value, 1030.0)
    opened = checker.accept("stage.1", ALICE.peer_id, value)
    assert opened is not None
    assert opened.record == OtherVersion(version)
    assert not checker.rejected


def test_a_warning_names_the_offender_and_a_flood_is_cut_short(caplog: pytest.LogCaptureFixture) -> None:
    clock = SetClock()
    checker = _checker(clock)
    for _ in range(1000):
        checker.check(b"stage.1", ALICE.peer_id, _seal(by=MALLORY), 1030.0)
    warnings = [r for r in caplog.records if r.getMessage() == "record.rejected"]
    assert 1 <= len(warnings) <= 5
    assert vars(warnings[0])["subkey"] == ALICE.peer_id
    assert vars(warnings[0])["reason"] == "wrong_signer"
    assert checker.rejected == {Rejection.WRONG_SIGNER: 1000}


def test_a_far_expiry_is_not_believed_even_if_the_dht_has_let_it_pass() -> None:
    checker = _checker()
    assert checker.accept("stage.1", ALICE.peer_id, _seal(expires=1000.0 + 200)) is None
    assert checker.rejected == {Rejection.BAD_EXPIRY: 1}


def test_peers_that_have_gone_are_forgotten_once_no_old_record_of_theirs_can_be_alive() -> None:
    clock = SetClock()
    checker = _checker(clock)
    for i in range(50):
        stranger = Identity.generate()
        clock.now = 1000.0 + 10 * i
        assert checker.accept("stage.1", stranger.peer_id, _seal(by=stranger, expires=clock.now + 30))
    assert len(checker._newest) <= 15
    assert checker.accept("stage.1", stranger.peer_id, _seal(by=stranger, sequence=6, expires=clock.now + 30)) is None


@pytest.mark.parametrize("difference_s", [3600, -3600, -95])
def test_a_peer_whose_clock_differs_by_too_much_is_named_with_the_difference(
    difference_s: int, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SetClock()
    checker = _checker(clock)
    assert checker.clock_difference_s is None
    value = _seal(expires=clock.now + difference_s + 30.0)
    assert checker.accept("stage.1", ALICE.peer_id, value) is None
    assert checker.clock_difference_s == difference_s
    [warning] = [vars(record) for record in caplog.records if record.getMessage() == "clock.differs"]
    assert (warning["peer"], warning["ahead_s"]) == (ALICE.peer_id, difference_s)
    # Once it is set right, nothing more is said of it.
    assert checker.accept("stage.1", ALICE.peer_id, _seal(expires=clock.now + 30.0, sequence=8)) is not None
    assert checker.clock_difference_s is None


def test_a_copy_that_lags_behind_says_nothing_about_clocks() -> None:
    clock = SetClock()
    checker = _checker(clock)
    clock.now = 1030.0 + 20.0
    assert checker.accept("stage.1", ALICE.peer_id, _seal()) is None
    assert not checker.check(b"stage.1", ALICE.peer_id, _seal(), 1031.0)
    assert checker.clock_difference_s is None


def test_most_clocks_decide_what_the_difference_is_and_few_are_remembered() -> None:
    clock = SetClock()
    checker = _checker(clock)
    for number in range(100):
        stranger = Identity.generate()
        ahead_s = 600.0 if number % 10 else 86400.0
        value = _seal(by=stranger, expires=clock.now + 30.0 + ahead_s)
        assert not checker.check(b"stage.1", stranger.peer_id, value, clock.now + 30.0 + ahead_s)
    assert checker.clock_difference_s == 600.0
    assert len(checker.clock_differences) == 64


def test_a_peer_says_where_the_dht_can_be_joined_through_it() -> None:
    many = tuple(f"/ip4/10.0.0.{number}/tcp/1" for number in range(9))
    for record in (STAGE, ClientRecord(ADDRESSES, 1.0), MonitorRecord(ADDRESSES, 1.0), MirrorRecord(ADDRESSES, 1.0)):
        assert with_maddrs(record, many).maddrs == many[:4]
    assert with_maddrs(GoneRecord(), many) == GoneRecord()
