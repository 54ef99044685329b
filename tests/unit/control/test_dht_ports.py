"""The ports of a DHT node."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import cast

import anyio
import anyio.lowlevel
import pytest

from shoal.control.dht_daemon import _Handlers, _note_end
from shoal.control.dht_launcher import DhtLauncher
from shoal.control.maddrs import check_port_free, pinned
from shoal.control.record_checker import RecordChecker
from shoal.errors import ConfigError

_VISIBLE = ("/ip4/127.0.0.1/tcp/4001/p2p/12D3", "/ip6/::1/tcp/4002/p2p/12D3")


@pytest.mark.parametrize(
    ("host_maddr", "expected"),
    [
        ("/ip4/0.0.0.0/tcp/0", "/ip4/0.0.0.0/tcp/4001"),
        ("/ip6/::/tcp/0", "/ip6/::/tcp/4002"),
        ("/ip4/0.0.0.0/tcp/50000", "/ip4/0.0.0.0/tcp/50000"),
        ("/ip4/0.0.0.0/udp/0/quic", "/ip4/0.0.0.0/udp/0/quic"),
        ("/dns4/example.org/tcp/0", "/dns4/example.org/tcp/0"),
    ],
)
def test_any_free_port_becomes_the_one_that_was_found(host_maddr: str, expected: str) -> None:
    assert pinned((host_maddr,), _VISIBLE) == (expected,)


def test_a_port_that_somebody_listens_on_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            check_port_free(f"/ip4/127.0.0.1/tcp/{port}")
    check_port_free("/ip4/127.0.0.1/tcp/0")
    check_port_free("/ip4/127.0.0.1/tcp/²")


def test_a_node_that_comes_back_to_a_taken_port_listens_on_any_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        launcher = DhtLauncher(
            namespace="swarm",
            state_dir=Path(),
            key_file=Path(),
            checker=cast(RecordChecker, None),
            initial_peers=(),
            host_maddrs=(before,),
            any_maddrs=("/ip4/127.0.0.1/tcp/0",),
            announce_maddrs=(),
            startup_timeout_s=1.0,
        )
        assert launcher._free_maddrs() == ("/ip4/127.0.0.1/tcp/0",)
    assert launcher._free_maddrs() == (before,)


async def test_a_question_whose_asker_has_gone_before_it_was_looked_at_is_forgotten() -> None:
    handlers = _Handlers()

    async def answer() -> None:
        handlers.pop("call")  # as hivemind does at the end of each

    for number in range(3):
        task = handlers["call" if number else number] = asyncio.create_task(answer())
        if number < 2:
            task.cancel()  # before it has begun
    for _ in range(5):
        await anyio.lowlevel.checkpoint()
    assert handlers == {}


async def test_that_the_connection_to_p2pd_has_ended_is_logged_and_its_cancellation_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", logger="shoal")

    async def end(error: type[BaseException]) -> None:
        raise error

    for error in (ConnectionResetError, asyncio.CancelledError):
        task = asyncio.ensure_future(end(error))
        task.add_done_callback(_note_end)
        await asyncio.wait([task])
    assert caplog.messages == ["dht.disconnected"]
