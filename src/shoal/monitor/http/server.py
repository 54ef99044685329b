"""HTTP for the dashboard: uvicorn's protocol on a socket of this process's event loop.

Not uvicorn's own server: that handles signals, which are the role's, and looks ten times a second whether it is to end.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from shoal.monitor.exporters.base import Newest
from shoal.monitor.http.access import Access
from shoal.monitor.http.app import build_app, event_routes, number_routes, page_routes
from shoal.monitor.http.browsers import Browsers

MAX_CONNECTIONS: Final = 64
_REQUEST_S: Final = 10.0
_LAST_WORDS_S: Final = 1.0


@asynccontextmanager
async def serving(
    listener: socket.socket, access: Access, browsers: Browsers, newest: Callable[[], Newest]
) -> AsyncGenerator[None]:
    """Answer browsers and Prometheus at this socket while the context is open."""
    app = build_app((*page_routes(access), *event_routes(access, browsers), *number_routes(access, newest)))
    async with answering(listener, app):
        yield


@asynccontextmanager
async def answering(listener: socket.socket, app: ASGIApp) -> AsyncGenerator[None]:
    """Have an application answer at this socket while the context is open.

    Who still reads then has a moment to read the last.
    """
    config = Config(
        app, http=_Connection, ws="none", lifespan="off", log_config=None, access_log=False, proxy_headers=False
    )
    config.load()
    logging.getLogger("uvicorn.error").addFilter(_is_no_drop)
    state = ServerState()
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(config, state, {}), sock=listener)
    try:
        yield
    finally:
        server.close()
        with anyio.move_on_after(_LAST_WORDS_S, shield=True):
            await asyncio.gather(*state.tasks)
        for connection in list(state.connections):
            connection.transport.abort()


def _is_no_drop(record: logging.LogRecord) -> bool:
    """Whoever does not read is dropped in the middle of an answer, which uvicorn takes for a mistake of ours."""
    return not record.getMessage().startswith("ASGI callable returned without completing response")


class _Connection(H11Protocol):
    """A connection. There are so many at most, and each has to ask for something soon: any user may open them."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any]) -> None:
        super().__init__(config, server_state, app_state)
        self._is_late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._is_late = self.loop.call_later(_REQUEST_S, self._require_request)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._is_late is not None:
            self._is_late.cancel()

    def _require_request(self) -> None:
        if self.scope is None:  # pyright: ignore[reportUnnecessaryComparison]
            self.transport.abort()
