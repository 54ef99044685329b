"""The routes of an operator's page, which has more than that of a run: what the hosts do, and orders to them.

/events              as the run's own dashboard sends them, handed on
/hosts               GET   what is known of each host, and the token that an order has to bring along
/hosts/NAME/logs     GET   the newest lines that a host has said
/hosts/NAME/ORDER    POST  one of `Operator.orders`, with `X-Shoal-Order: TOKEN`

Only the operator's own process serves them. What carries orders out is in a layer above the monitor, which cannot
import it: no page of a swarm can have anything done.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from shoal.monitor.http.access import Access
from shoal.monitor.http.app import ServerSentEvents, build_app, page_routes, with_cookie
from shoal.monitor.page.files import OF_OPERATORS, PAGE

_NO_RUN = "the client's host has no dashboard, or not yet\n"
_STRANGE_PAGE = "an order is taken from a page that was served here\n"
_NOBODY = "there is no such host, or no such order\n"


class Operator(Protocol):
    """Who has the hosts.

    Attributes:
        orders: that can be given to each.
    """

    @property
    def names(self) -> Collection[str]: ...

    @property
    def orders(self) -> Collection[str]: ...

    def board(self) -> dict[str, Any]:
        """Return what is known of the hosts, and have those looked at of which it is old."""
        ...

    async def logs(self, name: str) -> list[dict[str, Any]]:
        """Return the newest lines that the units of a host have said."""
        ...

    def order(self, name: str, order: str) -> str:
        """Have something done on a host; return why that is not possible now, or nothing."""
        ...

    def run_news(self, last_id: str) -> AbstractAsyncContextManager[AsyncIterable[bytes] | None]:
        """Give what the run's own dashboard sends, while the context is open; None: there is none."""
        ...


def operator_app(access: Access, operator: Operator) -> ASGIApp:
    """Return the application of an operator's page."""
    more = {path.name: path for path in OF_OPERATORS}
    routes = (*page_routes(access, operator_page(), more), *_host_routes(access, operator))
    # What the run's own dashboard sends.
    events = Route("/events", ServerSentEvents(access, operator.run_news, _NO_RUN), methods=["GET"])
    return build_app((*routes, events), takes_orders=True)


def operator_page() -> str:
    """Return the page of a run with one part more."""
    html = PAGE.read_text(encoding="utf-8")
    for before, more in (
        ("</head>", '<link rel="stylesheet" href="/static/hosts.css">\n'),
        ("</head>", '<script type="module" src="/static/hosts.js"></script>\n'),
        ("  </nav>", '    <a href="#hosts">Hosts</a>\n'),
        ("</main>", '  <section id="hosts" aria-label="Hosts" hidden></section>\n'),
    ):
        head, found, tail = html.partition(before)
        if not found:
            raise ValueError(f"the page has no {before}")
        html = head + more + found + tail
    return html


def _host_routes(access: Access, operator: Operator) -> list[Route]:
    async def board(request: Request) -> Response:
        return _json({**operator.board(), "token": access.order_token})

    async def logs(request: Request) -> Response:
        name = request.path_params["name"]
        return _json(await operator.logs(name)) if name in operator.names else PlainTextResponse(_NOBODY, 404)

    async def order(request: Request) -> Response:
        if not access.lets_order(request.headers.get("x-shoal-order", "")):
            return PlainTextResponse(_STRANGE_PAGE, 403)
        name, what = request.path_params["name"], request.path_params["order"]
        if name not in operator.names or what not in operator.orders:
            return PlainTextResponse(_NOBODY, 404)
        why_not = operator.order(name, what)
        return PlainTextResponse(f"{why_not}\n", 409) if why_not else Response(status_code=202)

    return [
        Route("/hosts", with_cookie(access, board)),
        Route("/hosts/{name}/logs", with_cookie(access, logs)),
        Route("/hosts/{name}/{order}", with_cookie(access, order), methods=["POST"]),
    ]


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
