"""Peers of a run are asked over TLS: who has the swarm's key and is the peer that was meant is believed, no other."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from shoal.config import config_to_json
from shoal.config.load import load_config
from shoal.config.shared import shared_configuration
from shoal.control.role_start import RoleStart, open_role_endpoint
from shoal.control.run_question import RunTeller, ask_run, unpack_configuration
from shoal.errors import ConnectionLost
from shoal.identity import Identity
from shoal.ids import PeerId
from shoal.transport.dispatch import dispatch
from shoal.transport.peers import StreamEndpoint
from shoal.wire.messages.base import Hop

KEY, OTHER_KEY = b"k" * 32, b"x" * 32
CONFIG = load_config(None, ["--diloco.inner-steps=7"])
SCOUT, CLIENT, MALLORY = Identity(b"s" * 32), Identity(b"c" * 32), Identity(b"m" * 32)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Paths of sockets are short."""
    with tempfile.TemporaryDirectory(prefix="sh", dir="/tmp") as path:
        yield Path(path)


def _start(folder: Path, role: str, identity: Identity, *, key: bytes = KEY, run_id: str = "run-1") -> RoleStart:
    return RoleStart(
        run_id=run_id,
        role=role,
        index=0,
        config_json=config_to_json(CONFIG),
        identity_key=identity.private_bytes,
        swarm_key=key,
        socket_path=str(folder / f"{role}.sock"),
        log_dir=str(folder),
        between_hosts=True,
        listen_tcp=None if role == "scout" else ("127.0.0.1", 0),
    )


@asynccontextmanager
async def _told_by(start: RoleStart, client: PeerId | None) -> AsyncGenerator[tuple[StreamEndpoint, RunTeller]]:
    async with open_role_endpoint(start) as endpoint, anyio.create_task_group() as tasks:
        teller = RunTeller(endpoint, shared_configuration(CONFIG), lambda: client)
        tasks.start_soon(dispatch, endpoint, (teller,))
        yield endpoint, teller
        tasks.cancel_scope.cancel()


def _over_tcp(endpoint: StreamEndpoint, peer: PeerId) -> Hop:
    return Hop(peer, tuple(address for address in endpoint.addresses if address.startswith("tcp:")))


async def test_a_client_tells_its_run_over_tls(folder: Path) -> None:
    async with _told_by(_start(folder, "client", CLIENT), CLIENT.peer_id) as (endpoint, _):
        hop = _over_tcp(endpoint, CLIENT.peer_id)
        peer, told = await ask_run(_start(folder, "scout", SCOUT, run_id=""), "run-1", [hop])
    assert (peer, told.client) == (CLIENT.peer_id, CLIENT.peer_id)
    assert unpack_configuration(told.config) == shared_configuration(CONFIG)


STRANGERS = {
    "no swarm key": (MALLORY, {"key": OTHER_KEY}),
    "no swarm key, under the client's name": (CLIENT, {"key": OTHER_KEY}),
    "the swarm's key, and another peer than the one meant": (MALLORY, {}),
    "another run": (CLIENT, {"run_id": "run-2"}),
}


@pytest.mark.parametrize("name", sorted(STRANGERS))
async def test_nobody_else_is_believed_wherever_the_registry_says_that_the_client_is(name: str, folder: Path) -> None:
    identity, more = STRANGERS[name]
    async with _told_by(_start(folder, "client", identity, **more), CLIENT.peer_id) as (endpoint, teller):
        hop = _over_tcp(endpoint, CLIENT.peer_id)
        with pytest.raises(ConnectionLost, match=CLIENT.peer_id):
            await ask_run(_start(folder, "scout", SCOUT), "run-1", [hop])
        assert not teller.askers


async def test_one_that_answers_is_enough_and_silent_ones_are_named(folder: Path) -> None:
    gone = Hop(MALLORY.peer_id, ("tcp:127.0.0.1:9",))
    scout = _start(folder, "scout", SCOUT)
    async with _told_by(_start(folder, "server", CLIENT), None) as (endpoint, _):
        peer, told = await ask_run(scout, "run-1", [gone, _over_tcp(endpoint, CLIENT.peer_id)])
    assert (peer, told.client) == (CLIENT.peer_id, None)
    with pytest.raises(ConnectionLost, match=rf"{MALLORY.peer_id}: tcp:127\.0\.0\.1:9"):
        await ask_run(scout, "run-1", [gone])
