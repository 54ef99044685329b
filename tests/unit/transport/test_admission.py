"""Places for strangers: who makes way when all are taken, for this host, and for a peer that has proven who it is."""

from __future__ import annotations

import random
from typing import Any, cast

import pytest

from shoal.errors import HandshakeError
from shoal.ids import PeerId
from shoal.transport.admission import Admission
from shoal.transport.connection import Connection
from shoal.transport.limits import TransportLimits

PEER = PeerId("peer")


def connection(source: str = "", dialled: PeerId | None = None, proven: PeerId | None = None) -> Connection:
    made = Connection(cast(Any, None), TransportLimits(), dialled)
    made.source, made.proven = source, proven
    return made


def admission(**limits: int) -> Admission:
    return Admission(TransportLimits(**cast(Any, limits)))


def among(gate: Admission, *sources: str) -> list[Connection]:
    """Let these in, for all of whom there is a place."""
    made = [connection(source) for source in sources]
    assert [gate.connected(one) for one in made] == [None] * len(made)
    return made


def test_whoever_has_most_places_makes_way_the_oldest_first() -> None:
    gate = admission(max_handshaking=6)
    first, _, second, *_ = among(gate, "1.1.1.1", "2.2.2.2", "1.1.1.1", "2.2.2.2", "1.1.1.1", "3.3.3.3")
    assert gate.connected(connection("4.4.4.4")) is first
    # The newcomer counts: two of 1.1.1.1 and of 2.2.2.2 are left, and this one would be its third.
    assert gate.connected(connection("1.1.1.1")) is second


def test_one_address_with_all_places_pushes_out_its_own() -> None:
    gate = admission(max_handshaking=3)
    flood = among(gate, *["1.1.1.1"] * 3)
    for one in flood:
        assert gate.connected(connection("1.1.1.1")) is one


def test_whoever_floods_from_many_addresses_pushes_out_no_peer() -> None:
    gate, choose = admission(max_handshaking=8), random.Random(0)
    flooders = [f"10.0.0.{number}" for number in range(1, 5)]
    among(gate, *flooders, *flooders)
    peer = connection("10.0.0.9")
    for newcomer in (peer, *(connection(choose.choice(flooders)) for _ in range(1000))):
        leaving = gate.connected(newcomer)
        assert leaving is not None
        assert leaving.source in flooders
    gate.introduced(peer)
    assert gate.connected(connection("10.0.0.9")) is None


@pytest.mark.parametrize(
    ("flood", "peer"),
    [
        (["10.0.0.1", "10.0.0.2", "10.0.0.3"], "10.0.1.1"),
        (["2001:db8::1", "2001:db8::2", "2001:db8::3:0:0:1"], "2001:db8:0:1::1"),
        (["2001:db8:0:1::1", "2001:db8:0:2::1", "2001:db8:0:3::1"], "2001:db8:1::1"),
        # Of IPv4, although all of them begin alike.
        (["::ffff:10.0.0.1", "::ffff:10.0.0.1", "10.0.0.1"], "::ffff:10.0.0.2"),
        (["fe80::1%lo", "fe80::2%lo", "fe80::3%lo"], "10.0.0.1"),
    ],
)
def test_addresses_of_one_network_are_one_flood(flood: list[str], peer: str) -> None:
    gate = admission(max_handshaking=4)
    _, oldest, *_ = among(gate, peer, *flood)
    assert gate.connected(connection("192.0.2.1")) is oldest


def test_a_peer_that_has_proven_its_identity_makes_way_for_nobody() -> None:
    gate = admission(max_handshaking=3)
    proven, waiting, other = among(gate, "1.1.1.1", "1.1.1.1", "1.1.1.1")
    proven.proven = PEER
    assert gate.connected(connection("2.2.2.2")) is waiting
    other.proven = PEER
    gate.connected(connection("1.1.1.1", proven=PEER))
    with pytest.raises(HandshakeError, match="3 connections are in their handshake"):
        gate.connected(connection("3.3.3.3"))


def test_strangers_from_outside_and_from_this_host_do_not_compete() -> None:
    gate = admission(max_handshaking=2)
    among(gate, "", "", "1.1.1.1", "2.2.2.2")
    with pytest.raises(HandshakeError, match="2 connections are in their handshake"):
        gate.connected(connection(""))
    leaving = gate.connected(connection("3.3.3.3"))
    assert leaving is not None
    assert leaving.source == "1.1.1.1"


def test_places_are_free_again_after_the_hello_or_the_end() -> None:
    gate = admission(max_handshaking=1)
    for free in (gate.introduced, gate.ended):
        one = connection("1.1.1.1")
        assert gate.connected(one) is None
        free(one)
    one = connection("2.2.2.2")
    assert gate.connected(one) is None
    assert gate.connected(connection("3.3.3.3")) is one
    gate.ended(one)
    assert gate.connected(connection("4.4.4.4")) is not None  # a place is freed once


def peers(gate: Admission, *sources: str) -> list[Connection]:
    """Let these in, who have all said hello."""
    made = among(gate, *sources)
    for one in made:
        one.proven = one.peer = PEER
        gate.introduced(one)
    return made


def test_whoever_comes_with_the_key_under_many_names_pushes_out_his_own() -> None:
    gate = admission(max_connections=6)
    member, other, _, _, _, newest = peers(gate, "1.1.1.1", "2.2.2.2", *["6.6.6.6"] * 4)
    assert gate.connected(connection("3.3.3.3")) is newest
    gate.ended(newest)
    for _ in range(100):
        with pytest.raises(HandshakeError, match="6 connections are open already"):
            gate.connected(refused := connection("6.6.6.6"))
        gate.ended(refused)
    assert {member, other} <= set(gate.connections)


def test_of_peers_from_everywhere_none_makes_way_and_from_one_network_the_newest_does() -> None:
    gate = admission(max_connections=3)
    peers(gate, "1.1.1.1", "2.2.2.2", "3.3.3.3")
    with pytest.raises(HandshakeError, match="3 connections are open already"):
        gate.connected(connection("4.4.4.4"))
    gate = admission(max_connections=3)
    *_, newest = peers(gate, "1.1.1.1", "6.6.6.1", "6.6.6.2")
    assert gate.connected(connection("4.4.4.4")) is newest


def test_processes_of_this_host_have_places_however_many_come_from_elsewhere_and_make_way_for_nobody() -> None:
    gate = admission(max_connections=4)
    *_, newest = peers(gate, "", "", "1.1.1.1", "2.2.2.2")
    assert gate.connected(connection("")) is newest
    gate.ended(newest)
    with pytest.raises(HandshakeError, match="4 connections are open"):
        gate.connected(connection("3.3.3.3"))


def test_what_this_side_dials_always_has_a_place_but_counts() -> None:
    gate = admission(max_connections=2)
    for _ in range(4):
        gate.connected(connection(dialled=PEER))
    with pytest.raises(HandshakeError, match="2 connections are open"):
        gate.connected(connection())
    assert len(gate.connections) == 5  # until it has ended


def test_a_proven_peer_has_a_few_connections_at_most() -> None:
    gate = admission(max_connections_per_peer=2)
    for _ in range(2):
        gate.connected(connection(proven=PEER))
        gate.proven(PEER)
    gate.connected(connection(proven=PEER))
    with pytest.raises(HandshakeError, match="peer has 2 connections"):
        gate.proven(PEER)
