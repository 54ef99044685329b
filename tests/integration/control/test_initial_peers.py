"""What is said of addresses at which the swarm cannot be joined, with real sockets and a real peer of the DHT."""

from __future__ import annotations

import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from shoal.clock import SystemClock
from shoal.control import initial_peers
from shoal.control.dht import DhtNode
from shoal.control.greeting import Greeter
from shoal.control.initial_peers import Obstacle, listed, look, parse, require_reachable
from shoal.control.join import require_same_swarm
from shoal.errors import BootstrapError
from shoal.identity import Identity, namespace

KEY = b"k" * 32
# In names of tests, which have to be the same for all workers.
STRANGER = Identity(b"s" * 32).peer_id


async def _node(state_dir: Path, key: bytes = KEY, prefix: str = "ours", peers: tuple[str, ...] = ()) -> DhtNode:
    return await DhtNode.create(
        Identity.generate(),
        namespace=namespace(key, prefix),
        state_dir=state_dir,
        clock=SystemClock(),
        initial_peers=peers,
        greeter=Greeter(key, prefix),
    )


@asynccontextmanager
async def _program(says: bytes | None) -> AsyncGenerator[str]:
    """Give the address of a program that says something to whoever connects, or (None) closes at once."""

    async def serve(stream: SocketStream) -> None:
        async with stream:
            if says is not None:
                await stream.send(says)
                await anyio.sleep_forever()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"/ip4/127.0.0.1/tcp/{listener.extra(SocketAttribute.local_port)}/p2p/{STRANGER}"
        tasks.cancel_scope.cancel()


async def _cause(maddr: str) -> str:
    [obstacle] = await look([maddr])
    assert obstacle is not None
    assert obstacle.maddr == maddr
    assert obstacle.remedy
    return obstacle.cause


async def test_a_peer_of_the_swarm_passes_and_another_one_at_its_address_is_named(tmp_path: Path) -> None:
    async with await _node(tmp_path) as node:
        [maddr] = node.maddrs
        assert await look([maddr, maddr.partition("/p2p/")[0]]) == (None, None)
        cause = await _cause(maddr.replace(node.peer_id, STRANGER))
        assert f"another peer is there, {node.peer_id}" in cause


async def test_a_closed_port_is_refused() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        assert f"127.0.0.1 port {port}: refused" in await _cause(f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER}")


async def test_another_program_is_shown_by_what_it_says() -> None:
    async with _program(b"SSH-2.0-OpenSSH_9.2\r\n") as maddr:
        assert "another program than shoal listens there; it said b'SSH-2.0-OpenSSH_9." in await _cause(maddr)


async def test_a_program_that_closes_and_one_that_says_nothing_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _program(None) as maddr:
        assert "closes the connection" in await _cause(maddr)
    monkeypatch.setattr(initial_peers, "_ANSWER_TIMEOUT_S", 0.2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        maddr = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{STRANGER}"
        assert "something listens there and says nothing" in await _cause(maddr)


async def test_a_name_that_nobody_knows_is_named() -> None:
    assert "is not known on this host" in await _cause(f"/dns4/{70 * 'ü'}/tcp/1/p2p/{STRANGER}")
    cause = await _cause(f"/dns4/no-such-host.invalid/tcp/50000/p2p/{STRANGER}")
    assert cause == "the name no-such-host.invalid is not known on this host"


@pytest.mark.parametrize("maddr", ["/ip4/127.0.0.1/udp/1/quic", "/onion3/x:1", "/ip4/127.0.0.1/tcp/0", "/unix/x"])
async def test_an_address_of_a_form_that_is_not_known_is_left_to_libp2p(maddr: str) -> None:
    assert parse(maddr) is None
    assert await look([maddr]) == (None,)


@pytest.mark.parametrize(
    ("maddr", "cause"),
    [
        (f"/ipv4/127.0.0.1/tcp/50000/p2p/{STRANGER}", "no address begins with /ipv4"),
        (f"/ip4/300.0.0.1/tcp/50000/p2p/{STRANGER}", "300.0.0.1 is no IPv4 address"),
        (f"/ip4/::1/tcp/50000/p2p/{STRANGER}", "::1 is no IPv4 address"),
        (f"/ip4/127.0.0.1/tcp/50000/p2p/{STRANGER[:-9]}", f"{STRANGER[:-9]} is no peer id"),
    ],
)
async def test_an_address_that_is_written_wrong_says_where_and_is_not_tried_again(maddr: str, cause: str) -> None:
    assert await _cause(maddr) == cause
    said: list[str] = []
    with pytest.raises(BootstrapError, match=r"take it as a whole, as the client's host has printed it"):
        await require_reachable([maddr], SystemClock(), said.append)
    assert said == []


async def test_one_peer_that_answers_is_enough_and_the_others_are_said(tmp_path: Path) -> None:
    said: list[str] = []
    async with await _node(tmp_path) as node, _program(b"SSH-2.0-x\r\n") as other:
        await require_reachable([other, node.maddrs[0]], SystemClock(), said.append)
    assert len(said) == 2
    assert said[0].startswith(f"{other}: ")


async def test_of_many_that_do_not_answer_it_is_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = [initial_peers.Obstacle(f"m{number}", "refused", "wait") for number in range(5)]

    async def looked(_maddrs: object) -> tuple[initial_peers.Obstacle | None, ...]:
        return (*gone, None)

    monkeypatch.setattr(initial_peers, "look", looked)
    said: list[str] = []
    await require_reachable(["m"] * 6, SystemClock(), said.append)
    assert said == [
        "5 of 6 addresses do not answer: one that does is enough",
        "the swarm answers; starting what joins it",
    ]


async def test_without_any_the_error_has_each_with_its_remedy() -> None:
    said: list[str] = []
    async with _program(b"SSH-2.0-x\r\n") as one, _program(None) as two:
        with pytest.raises(BootstrapError) as error:
            await require_reachable([one, two], SystemClock(), said.append, patience_s=0.0)
    for maddr, cause in ((one, "another program than shoal"), (two, "closes the connection")):
        assert f"\n{maddr}\n  127.0.0.1 port {maddr.split('/')[4]}: " in str(error.value)
        assert cause in str(error.value)
    assert said == []


async def test_a_peer_that_comes_meanwhile_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0
    refused = initial_peers.Obstacle("m", "refused", "wait")

    async def looked(_maddrs: object) -> tuple[initial_peers.Obstacle | None, ...]:
        nonlocal num_looks
        num_looks += 1
        return (refused,) if num_looks < 3 else (None,)

    monkeypatch.setattr(initial_peers, "look", looked)
    said: list[str] = []
    await require_reachable(["m"], SystemClock(), said.append, patience_s=1000.0)
    assert said == ["refused; trying again for 1000 s", "the swarm answers; starting what joins it"]


@pytest.mark.parametrize(
    ("key", "prefix", "problem"),
    [
        (KEY, "ours", None),
        (KEY, "theirs", "experiment_prefix = ours, not theirs"),
        (b"o" * 32, "ours", "another swarm key than this host"),
    ],
)
async def test_a_newcomer_learns_at_once_that_it_has_another_key_or_prefix(
    tmp_path: Path, key: bytes, prefix: str, problem: str | None
) -> None:
    async with await _node(tmp_path) as first, await _node(tmp_path, key, prefix, first.maddrs) as newcomer:
        if problem is None:
            await require_same_swarm(newcomer, Greeter(key, prefix), first.maddrs)
            return
        with pytest.raises(BootstrapError, match=problem):
            await require_same_swarm(newcomer, Greeter(key, prefix), first.maddrs)


async def test_a_peer_that_does_not_greet_keeps_nobody_out(tmp_path: Path) -> None:
    silent = await DhtNode.create(
        Identity.generate(), namespace=namespace(KEY, "x"), state_dir=tmp_path, clock=SystemClock()
    )
    async with silent, await _node(tmp_path, peers=silent.maddrs) as newcomer:
        nobody = "/ip4/1.2.3.4/tcp/5/p2p/nonsense"
        await require_same_swarm(newcomer, Greeter(KEY, "ours"), (*silent.maddrs, nobody))


def test_what_is_to_be_done_at_several_addresses_is_said_once_below_them() -> None:
    obstacles = [
        Obstacle("a", "refused", "start it"),
        Obstacle("b", "no answer", "open it"),
        Obstacle("c", "off", "start it"),
    ]
    assert listed(obstacles).splitlines() == [
        *("a", "  refused", "c", "  off", "  start it"),
        *("b", "  no answer", "  open it"),
    ]
