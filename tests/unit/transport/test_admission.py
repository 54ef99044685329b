"""Places for strangers: in all, for one address, for this host; and for a peer that has proven who it is."""

from __future__ import annotations

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


def test_one_address_cannot_take_the_places_of_others() -> None:
    gate = admission(max_handshaking=5, max_handshaking_per_host=2)
    for source in ("1.1.1.1", "1.1.1.1", "2.2.2.2"):
        gate.connected(connection(source))
    with pytest.raises(HandshakeError, match=r"from 1\.1\.1\.1"):
        gate.connected(connection("1.1.1.1"))
    gate.connected(connection("2.2.2.2"))
    gate.connected(connection("3.3.3.3"))
    with pytest.raises(HandshakeError, match="5 connections are in their handshake"):
        gate.connected(connection("4.4.4.4"))


def test_strangers_from_outside_and_from_this_host_do_not_compete() -> None:
    gate = admission(max_handshaking=2)
    for source in ("", "", "1.1.1.1", "2.2.2.2"):
        gate.connected(connection(source))
    for source in ("", "3.3.3.3"):
        with pytest.raises(HandshakeError):
            gate.connected(connection(source))


def test_places_are_free_again_after_the_hello_or_the_end() -> None:
    gate = admission(max_handshaking=1)
    for free in (gate.introduced, gate.ended):
        one = connection("1.1.1.1")
        gate.connected(one)
        with pytest.raises(HandshakeError):
            gate.connected(connection("2.2.2.2"))
        free(one)
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
