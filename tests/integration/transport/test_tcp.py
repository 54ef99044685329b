"""Endpoints of different hosts over TCP and TLS: tensors both ways, addresses, order of dialling, back-pressure."""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import anyio
import pytest
from tests.integration.transport.samples import (
    ALICE,
    BOB,
    CAROL,
    CHILD,
    KEY,
    MIB,
    over_tcp,
    port_of,
    step,
    take,
    tensor,
)

from shoal.errors import ConfigError
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.runtime.linux_calls import LinuxCall, has
from shoal.transport import tcp
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.endpoint import open_endpoint
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.transport.tcp import TcpCarrier, own_hosts, split_host_port
from shoal.transport.tls import tls_contexts
from shoal.transport.unix import UnixCarrier
from shoal.transport.uplink import Uplink
from shoal.wire.messages import Hop
from shoal.wire.messages.step import Forward, Opened


async def linked(host: Any, **limits: float) -> tuple[StreamEndpoint, StreamEndpoint]:
    """Return two endpoints with a TCP connection between them; both PeerUp are taken."""
    a = await host(ALICE, limits=TransportLimits(**limits))
    b = await host(BOB, limits=TransportLimits(**limits))
    a.introduce(over_tcp(b))
    a.post(b.peer_id, Opened(step()))
    assert await take(b, 2) == [PeerUp(a.peer_id), Received(a.peer_id, Opened(step()))]
    assert await take(a, 1) == [PeerUp(b.peer_id)]
    return a, b


async def test_who_has_come_over_tcp_is_not_taken_for_one_of_this_host(host: Any) -> None:
    a, b = await linked(host)
    c = await host(CAROL)
    c.introduce(Hop(a.peer_id, a.addresses))
    c.post(a.peer_id, Opened(step()))
    assert await take(a, 1) == [PeerUp(c.peer_id)]
    assert (a.is_here(c.peer_id), a.is_here(b.peer_id), a.is_here(CHILD.peer_id)) == (True, False, False)


@pytest.mark.slow
async def test_a_peer_whose_consumer_is_slower_than_the_deadline_is_not_lost(host: Any) -> None:
    a, b = await linked(host, heartbeat_s=0.25, deadline_s=2.0, max_unread_bytes=MIB)
    for microbatch in range(3):
        a.post(b.peer_id, Forward(step(), microbatch), [tensor(16 * MIB)])
    # b has stopped reading: over TCP its window is closed, which only its heartbeats tell from a death.
    with anyio.move_on_after(5.0) as waiting:
        await a.flushed(b.peer_id)
    assert waiting.cancelled_caught
    assert [type(event) for event in await take(b, 3)] == [Received] * 3
    await a.flushed(b.peer_id)
    assert (a.counters["transport.lost"], b.counters["transport.lost"]) == (0, 0)


async def test_a_unix_socket_is_preferred_and_tcp_used_where_it_leads_nowhere_or_to_another(
    host: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []
    for carrier in (UnixCarrier, TcpCarrier):

        async def spy(self: Any, address: str, connection: Any, connect: Any = carrier.connect) -> None:
            used.append(address.partition(":")[0])
            await connect(self, address, connection)

        monkeypatch.setattr(carrier, "connect", spy)
    b, c = await host(BOB), await host(CAROL)
    unix, tcp = b.addresses
    assert (unix.partition(":")[0], tcp.partition(":")[0]) == ("unix", "tcp")
    for addresses, order in (
        ((tcp, unix), ["unix"]),
        ((f"unix:{folder}/absent", tcp), ["unix", "tcp"]),
        ((c.addresses[0], tcp), ["unix", "tcp"]),
        (("tcp:127.0.0.1:1", "carrier-pigeon:coop", tcp), ["tcp", "tcp"]),
    ):
        used.clear()
        a = await host(ALICE)  # which has not been there before: where it was it tries first
        a.introduce(Hop(b.peer_id, addresses))
        a.post(b.peer_id, Opened(step()))
        assert await take(b, 2) == [PeerUp(a.peer_id), Received(a.peer_id, Opened(step()))]
        assert await take(a, 1) == [PeerUp(b.peer_id)]
        assert used == order
        await a.aclose()
        assert isinstance((await take(b, 1))[0], PeerLost)


async def test_a_socket_of_another_machine_is_not_tried_although_there_is_one_at_its_path(host: Any) -> None:
    a, b = await host(ALICE), await host(BOB)
    path = b.addresses[0].rpartition(":")[2]
    assert path.startswith("/")
    a.introduce(Hop(BOB.peer_id, (f"unix:0123456789abcdef:{path}",)))
    a.post(BOB.peer_id, Opened(step()))
    (lost,) = await take(a, 1)
    assert isinstance(lost, PeerLost)
    assert "a socket of another machine" in lost.reason


async def test_a_socket_of_another_user_is_told_nothing(
    host: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = await host(ALICE)
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(folder / "foreign.sock"))
        foreign.listen()
        foreign.setblocking(False)
        monkeypatch.setattr("shoal.transport.unix.os.getuid", lambda: 12345)
        a.introduce(Hop(BOB.peer_id, (f"unix:{folder}/foreign.sock",)))
        a.post(BOB.peer_id, Opened(step()))
        (lost,) = await take(a, 1)
        assert isinstance(lost, PeerLost)
        assert "belongs to another user" in lost.reason
        with pytest.raises(BlockingIOError):
            foreign.accept()


async def test_every_address_that_fails_is_named(host: Any) -> None:
    a = await host(ALICE)
    a.introduce(
        Hop(
            BOB.peer_id,
            ("tcp:127.0.0.1:1", "tcp:nonsense", "tcp:::1:5", f"tcp:{64 * 'a'}.b:5", "unix:/a\0b", "other:x"),
        )
    )
    a.post(BOB.peer_id, Opened(step()))
    (lost,) = await take(a, 1)
    assert isinstance(lost, PeerLost)
    assert "tcp:127.0.0.1:1: " in lost.reason
    assert "'nonsense' is not host:port" in lost.reason
    assert "'::1:5' is not host:port" in lost.reason
    assert "label" in lost.reason
    assert "embedded null" in lost.reason
    assert "other:x: cannot be dialled from here" in lost.reason


async def test_a_host_that_listens_nowhere_can_dial_and_is_answered(host: Any) -> None:
    a, b = await host(ALICE, tcp=None), await host(BOB)
    assert over_tcp(a).addresses == ()
    a.introduce(over_tcp(b))
    a.post(b.peer_id, Opened(step(1)))
    assert len(await take(b, 2)) == 2
    b.post(a.peer_id, Opened(step(2)))
    assert await take(a, 2) == [PeerUp(b.peer_id), Received(b.peer_id, Opened(step(2)))]


@pytest.mark.parametrize("wanted", [b"reno", b"no such algorithm"])
async def test_both_ends_have_the_congestion_control_that_the_system_lets_them_have(
    host: Any, monkeypatch: pytest.MonkeyPatch, wanted: bytes
) -> None:
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        pytest.skip("this system has one for all connections")
    with socket.socket() as plain:
        usual = plain.getsockopt(socket.IPPROTO_TCP, option, 16)
    assert tcp._CONGESTION_CONTROL == b"bbr"
    # Which every Linux has, and every user may have.
    monkeypatch.setattr(tcp, "_CONGESTION_CONTROL", wanted)
    a, b = await linked(host)
    for end, other in ((a, b), (b, a)):
        connection = end._peers[other.peer_id].connection
        has = connection.socket.getsockopt(socket.IPPROTO_TCP, option, 16)
        assert has.rstrip(b"\0") == (b"reno" if wanted == b"reno" else usual.rstrip(b"\0"))


async def test_what_is_announced_and_what_cannot_be_listened_on(host: Any, folder: Path) -> None:
    b = await host(BOB)
    contexts = tls_contexts(ALICE, KEY)
    for announce, expected in (
        ((), tuple(f"tcp:{own}:{{port}}" for own in own_hosts())),
        (
            ("203.0.113.7", "example.org:7", "2001:db8::1"),
            ("tcp:203.0.113.7:{port}", "tcp:example.org:7", "tcp:[2001:db8::1]:{port}"),
        ),
    ):
        carrier = TcpCarrier(contexts, listen_on=("0.0.0.0", 0), announce=announce, uplink=Uplink())
        assert carrier.addresses == ()
        await carrier.listen(lambda: pytest.fail("nobody dials"))
        addresses = carrier.addresses
        port = split_host_port(addresses[0].removeprefix("tcp:"))[1]
        assert addresses == tuple(address.format(port=port) for address in expected)
        carrier.stop_listening()
    with pytest.raises(ConfigError, match="cannot listen on 127"):
        await host(ALICE, tcp=("127.0.0.1", port_of(b)))
    assert f"{ALICE.peer_id[-8:]}.sock" not in os.listdir(folder)
    with pytest.raises(ConfigError, match="shoal key new"):
        open_endpoint(identity=ALICE, run_id=RunId("run"), role="test", unix_path=folder / "x", tcp=("127.0.0.1", 0))


async def test_a_host_whose_network_gives_it_another_address_says_that_one_from_then_on(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def is_at(*addresses: str) -> None:
        monkeypatch.setattr(tcp, "own_hosts", lambda *, also_6: addresses)

    is_at("10.0.0.5")
    end = await host(ALICE, tcp=("0.0.0.0", 0))
    unix, there = end.addresses
    is_at("10.0.0.9", "10.1.0.2")
    port = split_host_port(there.removeprefix("tcp:"))[1]
    assert end.hop == Hop(ALICE.peer_id, (unix, f"tcp:10.0.0.9:{port}", f"tcp:10.1.0.2:{port}"))
    # Cut off for a moment it has none, and will most likely have the same again.
    is_at("127.0.0.1")
    assert end.addresses[1:] == (f"tcp:10.0.0.9:{port}", f"tcp:10.1.0.2:{port}")


async def test_a_host_with_many_networks_names_as_many_addresses_as_a_peer_takes(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "own_hosts", lambda *, also_6: tuple(f"172.{16 + number}.0.1" for number in range(12)))
    a, b = await host(ALICE, tcp=("0.0.0.0", 0)), await host(BOB, tcp=("0.0.0.0", 0))
    a.introduce(Hop(b.peer_id, (f"tcp:127.0.0.1:{port_of(b)}",)))
    a.post(b.peer_id, Opened(step()))
    assert await take(b, 2) == [PeerUp(a.peer_id), Received(a.peer_id, Opened(step()))]


def test_the_address_of_the_way_out_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_interface_addresses", lambda: ["127.0.0.1", "172.17.0.1", "172.18.0.1", "10.0.0.5"])
    monkeypatch.setattr(tcp, "_way_out", lambda *of: "10.0.0.5")
    assert own_hosts() == ("10.0.0.5", "172.17.0.1", "172.18.0.1")
    monkeypatch.setattr(tcp, "_way_out", lambda *of: "")
    assert own_hosts() == ("172.17.0.1", "172.18.0.1", "10.0.0.5")


def test_addresses_of_ipv6_are_told_where_there_are_no_others_or_both_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has(LinuxCall.INTERFACE_ADDRESS):
        pytest.skip("they are read from a file of Linux")
    lines = (
        "00000000000000000000000000000001 01 80 10 80       lo",
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0",
        "fd000000000000000000000000000002 04 40 00 82     eth0",
        "fd000000000000000000000000000003 04 40 00 a2     eth0",  # not to be used any more
        "20010db8000000000000000000000009 05 40 00 80     eth1",
    )
    (tmp_path / "addresses").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(tcp, "_ADDRESSES_6", tmp_path / "addresses")
    monkeypatch.setattr(tcp, "_way_out", lambda *of: "2001:db8::9")
    monkeypatch.setattr(tcp, "_interface_addresses", lambda: ["127.0.0.1", "10.0.0.5", "172.17.0.1"])
    assert own_hosts() == ("10.0.0.5", "172.17.0.1")
    assert own_hosts(also_6=True) == ("10.0.0.5", "2001:db8::9", "172.17.0.1", "fd00::2")
    monkeypatch.setattr(tcp, "_interface_addresses", lambda: ["127.0.0.1"])
    assert own_hosts() == ("2001:db8::9", "fd00::2")
    monkeypatch.setattr(tcp, "_ADDRESSES_6", tmp_path / "none")
    assert own_hosts(also_6=True) == ("127.0.0.1",)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="needs IPv6")
async def test_who_listens_on_all_addresses_is_dialled_by_either_kind_and_knows_where_from(host: Any) -> None:
    b = await host(BOB, tcp=("::", 0))
    for identity, at in ((ALICE, "127.0.0.1"), (CAROL, "[::1]")):
        a = await host(identity)
        a.introduce(Hop(b.peer_id, (f"tcp:{at}:{port_of(b)}",)))
        a.post(b.peer_id, Opened(step()))
        assert await take(b, 2) == [PeerUp(a.peer_id), Received(a.peer_id, Opened(step()))]
        source = b._peers[a.peer_id].connection.source
        assert ip_address(source).ipv4_mapped is not None if identity is ALICE else source == "::1"
    with pytest.raises(ConfigError, match=r"cannot listen on \[::\]"):
        await host(Identity.generate(), tcp=("::", port_of(b)))


async def test_where_a_peer_is_is_known_also_if_this_side_has_dialled_it(host: Any) -> None:
    a, b = await host(ALICE), await host(BOB)
    a.introduce(over_tcp(b))
    a.post(b.peer_id, Opened(step()))
    assert await take(a, 1) == [PeerUp(b.peer_id)]
    # Who floods and was dialled would else be of the same source as all others that were.
    assert a._peers[b.peer_id].source == "127.0.0.1"
