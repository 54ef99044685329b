"""Who may look at a dashboard."""

from __future__ import annotations

import stat
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from shoal.monitor.exporters.base import Newest, PeerReport
from shoal.monitor.exporters.prometheus import CONTENT_TYPE
from shoal.monitor.http.access import HEADERS, KEY_FILE, TOKEN_FILE, URL_FILE, Access
from shoal.monitor.http.app import build_app, event_routes, number_routes, page_routes
from shoal.monitor.http.browsers import MAX_BROWSERS, Browsers
from shoal.wire.messages.control import MetricReport

pytestmark = pytest.mark.anyio

HOST = ("host", "127.0.0.1:8787")


def opened(folder: Path, run_id: str = "run") -> Access:
    access = Access(folder, run_id)
    access.serves(access.earlier_port or 8787)
    return access


def token_of(access: Access) -> str:
    return parse_qs(urlsplit(access.url).query)["token"][0]


def cookie_of(access: Access) -> tuple[str, str]:
    return ("cookie", f"{access.cookie_name}={access.cookie}")


class Answer:
    """What an application has answered."""

    def __init__(self, messages: list[Any]) -> None:
        self.status = messages[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in messages[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in messages[1:])


async def answer(
    access: Access, path: str, *headers: tuple[str, str], method: str = "GET", query: str = "", more: Any = ()
) -> Answer:
    """Ask the page of a run for a path once."""
    browsers = Browsers(lambda: b"{}", lambda: 0.0)
    app = build_app((*page_routes(access), *event_routes(access, browsers), *more))
    return await answered(app, path, *headers, method=method, query=query)


async def answered(app: Any, path: str, *headers: tuple[str, str], method: str = "GET", query: str = "") -> Answer:
    """Ask an application for a path once."""
    messages: list[Any] = []
    has_body = anyio.Event()

    async def send(message: Any) -> None:
        messages.append(message)
        if message.get("body"):
            has_body.set()

    async def receive() -> Any:
        await has_body.wait()
        return {"type": "http.disconnect"}

    given = [(name.encode(), value.encode()) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": given}
    scope |= {"query_string": query.encode(), "http_version": "1.1", "scheme": "http", "root_path": ""}
    await app({**scope, "server": ("127.0.0.1", 8787), "client": ("127.0.0.1", 1)}, receive, send)
    return Answer(messages)


async def test_the_token_lets_one_browser_in_and_the_next_one_needs_the_next_token(tmp_path: Path) -> None:
    access = opened(tmp_path)
    token = token_of(access)
    let_in = await answer(access, "/", HOST, query=f"token={token}")
    assert (let_in.status, let_in.headers["location"]) == (303, "/")
    cookie = let_in.headers["set-cookie"]
    assert cookie.startswith(f"{access.cookie_name}={access.cookie};")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert (await answer(access, "/", HOST, query=f"token={token}")).status == 401
    newest = (tmp_path / URL_FILE).read_text().strip()
    assert newest == access.url
    assert (await answer(access, "/", HOST, query=urlsplit(newest).query)).status == 303
    # Who is in already uses up none.
    url = access.url
    assert (await answer(access, "/", HOST, cookie_of(access), query="token=old")).status == 303
    assert access.url == url


@pytest.mark.parametrize("host", ["127.0.0.1:8787", "localhost:9000", "[::1]:8787", "localhost"])
async def test_a_browser_that_is_in_gets_page_and_files_under_every_name_of_loopback(tmp_path: Path, host: str) -> None:
    access = opened(tmp_path)
    page = await answer(access, "/", ("host", host), cookie_of(access), ("origin", f"http://{host}"))
    assert page.status == 200
    assert b'src="/static/main.js"' in page.body
    file = await answer(access, "/static/main.js", ("host", host), cookie_of(access))
    assert file.status == 200
    assert file.headers["content-type"].startswith("text/javascript")
    events = await answer(access, "/events", ("host", host), cookie_of(access))
    assert events.headers["content-type"].startswith("text/event-stream")


def _attacks(access: Access, other: Access) -> dict[str, tuple[int, dict[str, Any]]]:
    cookie, name = cookie_of(access), access.cookie_name
    local = ("origin", "http://127.0.0.1:8787")
    return {
        "no cookie": (401, {"headers": [HOST]}),
        "no cookie for the stream": (401, {"path": "/events", "headers": [HOST]}),
        "no cookie for a file": (401, {"path": "/static/main.js", "headers": [HOST]}),
        "a guessed token": (401, {"headers": [HOST], "query": "token=guessed"}),
        "an empty token": (401, {"headers": [HOST], "query": "token="}),
        "a guessed cookie": (401, {"headers": [HOST, ("cookie", f"{name}={'0' * 64}")]}),
        "another run's cookie": (401, {"headers": [HOST, ("cookie", f"{name}={other.cookie}")]}),
        "a name that leads here": (421, {"headers": [("host", "evil.example:8787"), cookie]}),
        "a name that begins like ours": (421, {"headers": [("host", "localhost.evil.example"), cookie]}),
        "a name with a port that is none": (421, {"headers": [("host", "localhost:80@evil.example"), cookie]}),
        "no name": (421, {"headers": [cookie]}),
        "a page of elsewhere": (403, {"headers": [HOST, cookie, ("origin", "https://evil.example")]}),
        "a page of another port": (403, {"headers": [HOST, cookie, ("origin", "http://127.0.0.1:9999")]}),
        "a page in a sandbox": (403, {"headers": [HOST, cookie, ("origin", "null")]}),
        "a file that is none of ours": (404, {"path": "/static/../../app.py", "headers": [HOST, cookie]}),
        "a path out of the folder": (404, {"path": "/static//etc/passwd", "headers": [HOST, cookie]}),
        "something to be done": (405, {"headers": [HOST, cookie, local], "method": "POST"}),
        "something to be removed": (405, {"path": "/events", "headers": [HOST, cookie], "method": "DELETE"}),
    }


@pytest.mark.parametrize("number", range(18))
async def test_attacks_are_refused_and_told_nothing(tmp_path: Path, number: int) -> None:
    access, other = opened(tmp_path), opened(_folder(tmp_path / "other"))
    what, (status, asked) = list(_attacks(access, other).items())[number]
    got = await answer(
        access,
        asked.get("path", "/"),
        *asked["headers"],
        method=asked.get("method", "GET"),
        query=asked.get("query", ""),
    )
    assert got.status == status, what
    assert "set-cookie" not in got.headers
    assert len(got.body) < 200
    assert access.cookie.encode() not in got.body
    assert token_of(access).encode() not in got.body
    assert "access-control-allow-origin" not in got.headers
    assert got.headers.items() >= {name.lower(): value for name, value in HEADERS.items()}.items()


def _folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_what_lets_browsers_in_is_for_the_owner_alone_and_outlives_the_process(tmp_path: Path) -> None:
    first = Access(tmp_path, "run")
    first.serves(1234)
    for name in (KEY_FILE, URL_FILE):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    again = Access(tmp_path, "run")
    assert again.earlier_port == 1234
    again.serves(1234)
    assert (again.url, again.cookie) == (first.url, first.cookie)
    assert first.redeem(token_of(first))
    assert not Access(tmp_path, "run").redeem(token_of(again))


@pytest.mark.parametrize("name", [KEY_FILE, URL_FILE])
def test_a_file_that_holds_nothing_of_use_is_written_anew(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("http://127.0.0.1:x/?token=1")
    access = opened(tmp_path)
    assert len(token_of(access)) > 40
    assert len(access.cookie) == 64
    assert Access(tmp_path, "run").cookie == access.cookie


def test_two_runs_of_a_host_do_not_take_each_other_s_cookies(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(_folder(tmp_path / "other"), "another run")
    assert one.cookie_name != other.cookie_name
    assert not one.admits({one.cookie_name: other.cookie})
    assert not one.admits({})


async def test_a_further_route_stands_behind_the_same_checks(tmp_path: Path) -> None:
    def numbers(request: Request) -> PlainTextResponse:
        return PlainTextResponse("1")

    more = (Route("/numbers", numbers),)
    access = opened(tmp_path)
    assert (await answer(access, "/numbers", HOST, more=more)).body == b"1"
    assert (await answer(access, "/numbers", ("host", "evil.example"), more=more)).status == 421


async def test_as_many_browsers_look_as_there_is_room_for(tmp_path: Path) -> None:
    browsers = Browsers(lambda: b"{}", lambda: 0.0)
    access = opened(tmp_path)
    app = build_app(event_routes(access, browsers))
    statuses: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    scope = {"type": "http", "method": "GET", "path": "/events", "query_string": b"", "root_path": "", "scheme": "http"}
    given = [(name.encode(), value.encode()) for name, value in (HOST, cookie_of(access))]
    async with AsyncExitStack() as joined:
        for _ in range(MAX_BROWSERS):
            assert await joined.enter_async_context(browsers.join("")) is not None
        await app({**scope, "headers": given}, anyio.Event().wait, send)
    assert statuses == [503]
    assert len(browsers) == 0


async def test_prometheus_reads_numbers_with_the_token_of_its_file_and_with_nothing_else(tmp_path: Path) -> None:
    access = opened(tmp_path)
    report = MetricReport("server", {"step.committed{stage=0}": 3}, {}, {})
    routes = number_routes(access, lambda: Newest({"step": 7.0}, (PeerReport("server 0", report),)))
    token = (tmp_path / TOKEN_FILE).read_text()
    assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600
    told = await answer(access, "/metrics", HOST, ("authorization", f"Bearer {token}"), more=routes)
    assert (told.status, told.headers["content-type"]) == (200, CONTENT_TYPE)
    assert b'shoal_run_step{of=""} 7.0' in told.body
    assert b'shoal_step_committed_total{role="server",stage="0",who="server 0"} 3.0' in told.body
    page_token = token_of(access)
    for headers in (
        (),
        (cookie_of(access),),
        (("authorization", "Bearer "),),
        (("authorization", f"Bearer {token}x"),),
        (("authorization", f"Basic {token}"),),
        (("authorization", f"Bearer {page_token}"),),
    ):
        refused = await answer(access, "/metrics", HOST, *headers, more=routes)
        assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
    bearer = ("authorization", f"Bearer {token}")
    assert (await answer(access, "/", HOST, bearer)).status == 401, "it opens no page"
    assert (await answer(access, "/metrics", ("host", "evil.example"), bearer, more=routes)).status == 421
    assert opened(tmp_path).reader_token == token, "also after another start of the monitor"
