"""A short folder for sockets, and endpoints that are closed after the test."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

import pytest

from shoal.ids import PeerId, RunId
from shoal.transport.limits import TransportLimits
from shoal.transport.unix import UnixEndpoint, open_unix_endpoint

RUN = RunId("run")


class Opener(Protocol):
    async def __call__(
        self, peer: PeerId, *, run: RunId = ..., limits: TransportLimits = ..., path: Path | None = ...
    ) -> UnixEndpoint: ...


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
        ) -> UnixEndpoint:
            limits = limits or TransportLimits()
            path = path or folder / f"{peer}.sock"
            opened = open_unix_endpoint(peer_id=peer, run_id=run, role="test", path=path, limits=limits)
            return await stack.enter_async_context(opened)

        yield open_one
