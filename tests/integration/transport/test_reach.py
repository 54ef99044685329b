"""Whether a peer can be dialled where it says, with real endpoints."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from tests.integration.transport.samples import ALICE, BOB, CAROL, KEY, over_tcp, take

from shoal.runtime.hardware import machine_name
from shoal.transport import reach
from shoal.transport.base import PeerLost
from shoal.transport.reach import DialFailure, why_unreachable
from shoal.transport.tls import tls_contexts
from shoal.wire.messages import Hop
from shoal.wire.messages.control import Heartbeat


async def test_one_address_at_which_the_peer_itself_answers_is_enough(host: Any) -> None:
    b = await host(BOB)
    [address] = over_tcp(b).addresses
    contexts = tls_contexts(ALICE, KEY)
    assert await why_unreachable(over_tcp(b), contexts) == ""
    assert await why_unreachable(Hop(BOB.peer_id, ("tcp:127.0.0.1:1", address)), contexts) == ""
    # The socket of this machine will do, whatever is said of the network.
    assert await why_unreachable(Hop(BOB.peer_id, (b.addresses[0], "tcp:127.0.0.1:1")), contexts) == ""
    assert b.counters["transport.refused"] == 0


async def test_each_address_has_its_reason(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    b = await host(BOB)
    [address] = over_tcp(b).addresses
    contexts = tls_contexts(ALICE, KEY)
    reason = await why_unreachable(Hop(CAROL.peer_id, ("tcp:127.0.0.1:1", address)), contexts)
    port = address.rpartition(":")[2]
    assert reason == f"127.0.0.1:1: {DialFailure.REFUSED}; 127.0.0.1:{port}: another peer is there, {BOB.peer_id}"
    elsewhere = f"unix:0123456789abcdef:{b.addresses[0].rpartition(':')[2]}"
    assert await why_unreachable(Hop(BOB.peer_id, (elsewhere,)), contexts) == "it names no address for other hosts"
    odd = Hop(BOB.peer_id, (f"unix:{machine_name()}:/a\0b", "tcp:\ud800:5"))
    assert "U+D800 not allowed" in await why_unreachable(odd, contexts)
    assert "another swarm key" in await why_unreachable(over_tcp(b), tls_contexts(ALICE, b"o" * 32))
    monkeypatch.setattr(reach, "DIAL_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        assert await why_unreachable(Hop(BOB.peer_id, (f"tcp:{where}",)), contexts) == f"{where}: {DialFailure.SILENT}"


async def test_what_is_no_address_at_all_is_a_reason_too(host: Any) -> None:
    contexts, machine = tls_contexts(ALICE, KEY), machine_name()
    no_name = f"{'ä' * 64}:1"
    reason = await why_unreachable(Hop(BOB.peer_id, (f"unix:{machine}:/a\0b", f"tcp:{no_name}")), contexts)
    assert reason.startswith(f"{no_name}: it is no address: ")
    # An endpoint that dials it loses that peer, and nobody else.
    a = await host(ALICE)
    a.introduce(Hop(CAROL.peer_id, (f"tcp:{no_name}",)))
    a.post(CAROL.peer_id, Heartbeat())
    [lost] = await take(a, 1)
    assert isinstance(lost, PeerLost)
    assert "it is no address" in lost.reason
