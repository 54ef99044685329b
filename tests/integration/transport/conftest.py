"""A short folder for sockets, and endpoints that are closed after the test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import pytest
from tests.integration.transport.samples import ALICE, BOB, KEY, RUN, HostOpener, over_tcp, step, take
from tests.integration.transport.strangers import Stranger

from shoal.identity import Identity
from shoal.ids import PeerId, RunId
from shoal.transport.base import PeerUp, Received
from shoal.transport.endpoint import open_endpoint
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages import Hop
from shoal.wire.messages.step import Opened


class Opener(Protocol):
    async def __call__(
        self, peer: PeerId, *, run: RunId = ..., limits: TransportLimits = ..., path: Path | None = ...
    ) -> StreamEndpoint: ...


@pytest.fixture
def folder() -> Iterator[Path]:
    # Not pytest's tmp_path: its names are too long for a socket's address.
    with tempfile.TemporaryDirectory(prefix="shoal") as name:
        yield Path(name)


@pytest.fixture
async def endpoint(folder: Path) -> AsyncIterator[Opener]:
    async with AsyncExitStack() as stack:

        async def open_one(
            peer: PeerId,
            *,
            run: RunId = RUN,
            limits: TransportLimits | None = None,
            path: Path | None = None,
        ) -> StreamEndpoint:
            limits = limits or TransportLimits()
            path = path or folder / f"{peer}.sock"
            opened = open_unix_endpoint(peer_id=peer, run_id=run, role="test", path=path, limits=limits)
            return await stack.enter_async_context(opened)

        yield open_one


@pytest.fixture
async def host(folder: Path) -> AsyncIterator[HostOpener]:
    async with AsyncExitStack() as stack:

        async def open_one(
            identity: Identity,
            *,
            key: bytes = KEY,
            limits: TransportLimits | None = None,
            tcp: tuple[str, int] | None = ("127.0.0.1", 0),
            path: Path | None = None,
            max_upload_mbit: float | None = None,
        ) -> StreamEndpoint:
            opened = open_endpoint(
                identity=identity,
                run_id=RUN,
                role="test",
                unix_path=path or folder / f"{identity.peer_id[-8:]}.sock",
                swarm_key=key,
                tcp=tcp,
                max_upload_mbit=max_upload_mbit,
                limits=limits or TransportLimits(),
            )
            return await stack.enter_async_context(opened)

        yield open_one


@pytest.fixture
def strangers() -> Iterator[list[Stranger]]:
    opened: list[Stranger] = []
    yield opened
    for one in opened:
        one.socket.close()


@pytest.fixture(params=["unix", "tcp"])
def seen(request: pytest.FixtureRequest) -> Callable[[StreamEndpoint], Hop]:
    """How an endpoint is seen: from its own host, or from another one."""
    return over_tcp if request.param == "tcp" else lambda endpoint: endpoint.hop


@pytest.fixture
async def ends(host: HostOpener, seen: Callable[[StreamEndpoint], Hop]) -> tuple[StreamEndpoint, StreamEndpoint]:
    """Return two endpoints with a connection between them; both PeerUp are taken."""
    a, b = await host(ALICE), await host(BOB)
    a.introduce(seen(b))
    a.post(b.peer_id, Opened(step()))
    assert await take(b, 2) == [PeerUp(a.peer_id), Received(a.peer_id, Opened(step()))]
    assert await take(a, 1) == [PeerUp(b.peer_id)]
    return a, b
