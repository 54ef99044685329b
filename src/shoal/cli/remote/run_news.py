"""What the dashboard on the client's host sends, fetched by the operator's own process for the operator's page.

    browser <-- /events -- this process -- ssh -W --> dashboard of the run, at that host's loopback

The dashboard lets this process in as it does a browser: by the token that only the user of that host can read, for a
cookie. The cookie stays in this process, and nothing but the stream of events is taken from there: the page's own files
are of this machine.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

import anyio
from anyio.abc import Process

from shoal.cli.remote.operate import dashboard_address
from shoal.cli.remote.ssh import Ssh
from shoal.errors import HostFailed

_MAX_HEAD_BYTES: Final = 16 * 1024
_ANSWER_S: Final = 30.0
_COOKIE: Final = re.compile(r"^set-cookie: *(shoal-\w+=\w+)", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True)
class _LetIn:
    """A dashboard that has let this process in."""

    port: int
    cookie: str


class RunNews:
    """The stream of events of the newest run, for any number of browsers."""

    def __init__(self, ssh: Ssh, client: str, prefix: str) -> None:
        """Ask nobody yet.

        Args:
            ssh: to the client's host.
        """
        self._ssh = ssh
        self._client = client
        self._prefix = prefix
        self._entry: _LetIn | None = None
        self._entering = anyio.Lock()

    @asynccontextmanager
    async def opened(self, last_id: str) -> AsyncGenerator[AsyncIterable[bytes] | None]:
        """Give what comes after this message, while the context is open; None: there is no dashboard (yet)."""
        async with AsyncExitStack() as stack:
            yield await self._events(last_id, stack)

    async def _events(self, last_id: str, stack: AsyncExitStack) -> AsyncIterable[bytes] | None:
        path = f"/events?after={quote(last_id)}"
        for is_known in (True, False):
            try:
                async with self._entering:
                    # One that was let in by the run before is not by the next.
                    if self._entry is None or not is_known:
                        self._entry = await self._entered()
                process = await stack.enter_async_context(self._ssh.connected(self._entry.port))
                status, _, begun = await _asked(process, path, self._entry)
            except HostFailed:
                self._entry = None
                continue
            if status == 200:
                return _rest(process, begun)
        return None

    async def _entered(self) -> _LetIn:
        port, query = await dashboard_address(self._ssh, self._client, self._prefix)
        async with self._ssh.connected(port) as process:
            status, head, _ = await _asked(process, f"/{query}", _LetIn(port, ""))
        cookie = _COOKIE.search(head)
        if status != 303 or cookie is None:
            raise HostFailed(f"the dashboard on {self._client} lets nobody in")
        return _LetIn(port, cookie[1])


async def _asked(process: Process, path: str, entry: _LetIn) -> tuple[int, str, bytes]:
    """Return status and head of an answer, and what has come of its body.

    Raises:
        HostFailed: it is none.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    cookie = f"Cookie: {entry.cookie}\r\n" if entry.cookie else ""
    # In version 1.0 a body is what comes until the end, as it is.
    request = f"GET {path} HTTP/1.0\r\nHost: 127.0.0.1:{entry.port}\r\n{cookie}\r\n"
    said = b""
    try:
        with anyio.fail_after(_ANSWER_S):
            await process.stdin.send(request.encode())
            while b"\r\n\r\n" not in said and len(said) < _MAX_HEAD_BYTES:
                said += await process.stdout.receive()
    except (TimeoutError, OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream):
        raise HostFailed("the dashboard does not answer") from None
    head, _, begun = said.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1\.[01] (\d{3}) ", head)
    if status is None:
        raise HostFailed("what answers there is no dashboard")
    return int(status[1]), head.decode("latin-1").replace("\r\n", "\n"), begun


async def _rest(process: Process, begun: bytes) -> AsyncGenerator[bytes]:
    assert process.stdout is not None
    if begun:
        yield begun
    async for part in process.stdout:
        yield part
