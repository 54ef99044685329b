"""The routes of the dashboard, and what stands before all of them.

request --> Guard: method, Host, Origin; headers of every answer --> a route --> needs the cookie

/                page, and with `?token=` the way in
/static/...      its files
/events          server-sent events, see `browsers`
/metrics         for Prometheus, which sends a token of its own in place of the cookie
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio.to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.monitor.exporters.base import Newest
from shoal.monitor.exporters.prometheus import CONTENT_TYPE, exposition
from shoal.monitor.http.access import HEADERS, TOKEN_FILE, URL_FILE, Access, problem_of
from shoal.monitor.http.browsers import MAX_BROWSERS, Browsers
from shoal.monitor.page.files import PAGE, STATIC, static_files

_STRANGE_READER = f"numbers are told to who sends the token in {TOKEN_FILE} in the run's folder\n"
_CROWDED = f"{MAX_BROWSERS} browsers look at this run already\n"
_AGAIN_S = 5

Join = Callable[[str], AbstractAsyncContextManager[AsyncIterable[bytes] | None]]
"""Gives the messages behind the one of this id while the context is open; None: there are none to be had."""


def build_app(routes: Sequence[Route], *, takes_orders: bool = False) -> ASGIApp:
    """Return the application with these routes; only with `takes_orders` is there anything but GET."""
    return Guard(Starlette(routes=list(routes)), takes_orders=takes_orders)


class Guard:
    """Refuses what no browser of ours asks, and says with every answer what a page may do with it."""

    def __init__(self, app: ASGIApp, *, takes_orders: bool) -> None:
        """Stand before an application."""
        self._app = app
        self._takes_orders = takes_orders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        problem = problem_of(scope["method"], Headers(scope=scope), takes_orders=self._takes_orders)
        if problem is None:
            await self._app(scope, receive, send_guarded)
        else:
            status, reason = problem
            await PlainTextResponse(f"{reason}\n", status)(scope, receive, send_guarded)


def with_cookie(
    access: Access, answer: Callable[[Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that answers only browsers that were let in."""

    async def guarded(request: Request) -> Response:
        return await answer(request) if access.admits(request.cookies) else refused(access)

    return guarded


def page_routes(access: Access, html: str | None = None, more: Mapping[str, Path] | None = None) -> list[Route]:
    """Return the page, the way to it, and its files.

    Args:
        html: in place of the page of a run.
        more: files that this one has beside those of a run's, by their names below /static/.
    """
    files = {path.relative_to(STATIC).as_posix(): path for path in static_files()} | dict(more or {})

    async def page(request: Request) -> Response:
        return FileResponse(PAGE) if html is None else HTMLResponse(html)

    async def file(request: Request) -> Response:
        path = files.get(request.path_params["name"])
        return PlainTextResponse("there is no such file\n", 404) if path is None else FileResponse(path)

    async def enter(request: Request) -> Response:
        token = request.query_params.get("token")
        if token is None:
            return await with_cookie(access, page)(request)
        if not (access.admits(request.cookies) or access.redeem(token)):
            return refused(access)
        # The token is not to stay in the address.
        answer = RedirectResponse("/", 303)
        answer.set_cookie(access.cookie_name, access.cookie, httponly=True, samesite="strict")
        return answer

    return [Route("/", enter), Route("/static/{name:path}", with_cookie(access, file))]


def event_routes(access: Access, browsers: Browsers) -> list[Route]:
    """Return the stream of rows and events."""
    return [Route("/events", ServerSentEvents(access, browsers.join, _CROWDED))]


def number_routes(access: Access, newest: Callable[[], Newest]) -> list[Route]:
    """Return what Prometheus reads."""

    async def metrics(request: Request) -> Response:
        if not access.lets_read(request.headers.get("authorization", "")):
            return PlainTextResponse(_STRANGE_READER, 401, {"WWW-Authenticate": "Bearer"})
        # Of hundreds of peers that takes a part of a second.
        text = await anyio.to_thread.run_sync(exposition, newest())
        return Response(text, media_type=CONTENT_TYPE)

    return [Route("/metrics", metrics)]


class ServerSentEvents:
    """Tells a browser what comes, until either leaves."""

    def __init__(self, access: Access, join: Join, reason: str) -> None:
        """Tell nobody yet.

        Args:
            reason: what a browser is told for which there are no messages.
        """
        self._access = access
        self._join = join
        self._reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        if not self._access.admits(request.cookies):
            await refused(self._access)(scope, receive, send)
            return
        async with self._join(_last_id(request)) as messages:
            answer: Response = PlainTextResponse(self._reason, 503, {"Retry-After": str(_AGAIN_S)})
            if messages is not None:
                answer = StreamingResponse(messages, media_type="text/event-stream")
            await answer(scope, receive, send)


def _last_id(request: Request) -> str:
    """Return what a browser has got last; a page that opens the stream anew can say it only in the address."""
    return request.headers.get("last-event-id") or request.query_params.get("after", "")


def refused(access: Access) -> Response:
    """Return what a browser is told that was not let in."""
    return PlainTextResponse(
        f"a browser is let in by an address with a token: the newest is in {URL_FILE} in {access.told_in}\n", 401
    )
