"""The routes of an operator's page: whoever it did not serve can have nothing done, and learns nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.unit.monitor.test_access import HOST, Answer, answer, answered, cookie_of, opened, token_of

from shoal.monitor.http.access import HEADERS, Access
from shoal.monitor.http.hosts import operator_app, operator_page
from shoal.monitor.page.files import OF_OPERATORS, static_files

pytestmark = pytest.mark.anyio

HERE = ("origin", "http://127.0.0.1:8787")


class _Operator:
    """Who has two hosts, and a run with a word of news."""

    names = ("desk", "box")
    orders = ("up", "restart", "down")

    def __init__(self) -> None:
        self.given: list[tuple[str, str]] = []
        self.asked: list[str] = []
        self.why_not = ""
        self.has_run = True

    def board(self) -> dict[str, Any]:
        return {"hosts": [{"name": name} for name in self.names]}

    async def logs(self, name: str) -> list[dict[str, Any]]:
        return [{"unit": f"{name}-servers", "lines": ["said"]}]

    def order(self, name: str, order: str) -> str:
        self.given.append((name, order))
        return self.why_not

    @asynccontextmanager
    async def run_news(self, last_id: str) -> AsyncGenerator[AsyncGenerator[bytes] | None]:
        self.asked.append(last_id)
        yield self._news() if self.has_run else None

    async def _news(self) -> AsyncGenerator[bytes]:
        yield b"event: tick\ndata: 1.0\n\n"


def _token(access: Access) -> tuple[str, str]:
    return ("x-shoal-order", access.order_token)


async def _ordered(access: Access, operator: _Operator, path: str = "/hosts/box/down", **options: Any) -> Answer:
    headers = options.pop("headers", (HOST, HERE, cookie_of(access), _token(access)))
    return await answered(operator_app(access, operator), path, *headers, **{"method": "POST", **options})


async def test_an_order_of_the_page_is_given_once_and_one_that_cannot_be_is_told_why(tmp_path: Path) -> None:
    access, operator = opened(tmp_path), _Operator()
    assert (await _ordered(access, operator)).status == 202
    assert operator.given == [("box", "down")]
    operator.why_not = "box: `down` is under way there"
    refused = await _ordered(access, operator, "/hosts/box/restart")
    assert (refused.status, refused.body) == (409, b"box: `down` is under way there\n")


def _attacks(access: Access, other: Access) -> dict[str, tuple[int, dict[str, Any]]]:
    cookie, token = cookie_of(access), _token(access)
    theirs = (access.cookie_name, other.cookie)
    return {
        "no cookie": (401, {"headers": (HOST, HERE, token)}),
        "the cookie of another page": (401, {"headers": (HOST, HERE, ("cookie", "=".join(theirs)), token)}),
        "no token": (403, {"headers": (HOST, HERE, cookie)}),
        "an empty token": (403, {"headers": (HOST, HERE, cookie, ("x-shoal-order", ""))}),
        "the token of another page": (403, {"headers": (HOST, HERE, cookie, _token(other))}),
        "the token that lets a browser in": (
            403,
            {"headers": (HOST, HERE, cookie, ("x-shoal-order", token_of(access)))},
        ),
        "the token of who reads numbers": (
            403,
            {"headers": (HOST, HERE, cookie, ("x-shoal-order", access.reader_token))},
        ),
        "a token that is no text": (403, {"headers": (HOST, HERE, cookie, ("x-shoal-order", "\xff"))}),
        "no origin": (403, {"headers": (HOST, cookie, token)}),
        "a page of elsewhere": (403, {"headers": (HOST, ("origin", "https://evil.example"), cookie, token)}),
        "a page of another port": (403, {"headers": (HOST, ("origin", "http://127.0.0.1:9999"), cookie, token)}),
        "a page of another scheme": (403, {"headers": (HOST, ("origin", "https://127.0.0.1:8787"), cookie, token)}),
        "a page in a sandbox": (403, {"headers": (HOST, ("origin", "null"), cookie, token)}),
        "a name that leads here": (
            421,
            {"headers": (("host", "evil.example"), ("origin", "http://evil.example"), cookie, token)},
        ),
        "no name": (421, {"headers": (HERE, cookie, token)}),
        "a link": (405, {"method": "GET"}),
        "another method": (405, {"method": "PUT"}),
        "a question before an order": (405, {"method": "OPTIONS"}),
        "a host that is none": (404, {"path": "/hosts/evil/down"}),
        "an order that is none": (404, {"path": "/hosts/box/erase"}),
        "a host above": (404, {"path": "/hosts/../box/down"}),
        "an order to the board": (405, {"path": "/hosts"}),
        "an order to the news": (405, {"path": "/events"}),
        "an order to the page": (405, {"path": "/"}),
    }


@pytest.mark.parametrize("number", range(24))
async def test_attacks_have_nothing_done_and_are_told_nothing(tmp_path: Path, number: int) -> None:
    (tmp_path / "other").mkdir()
    access, other, operator = opened(tmp_path), opened(tmp_path / "other"), _Operator()
    attacks = _attacks(access, other)
    assert len(attacks) == 24
    what, (status, options) = list(attacks.items())[number]
    got = await _ordered(access, operator, **options)
    assert got.status == status, what
    assert (operator.given, operator.asked) == ([], [])
    assert len(got.body) < 200
    for secret in (access.cookie, access.order_token, token_of(access)):
        assert secret.encode() not in got.body
    assert "access-control-allow-origin" not in got.headers
    assert got.headers.items() >= {name.lower(): value for name, value in HEADERS.items()}.items()


@pytest.mark.parametrize("path", ["/hosts", "/hosts/box/logs", "/events", "/static/hosts.js"])
async def test_who_was_not_let_in_is_told_nothing_of_hosts(tmp_path: Path, path: str) -> None:
    access, operator = opened(tmp_path), _Operator()
    app = operator_app(access, operator)
    assert (await answered(app, path, HOST)).status == 401
    assert (await answered(app, path, ("host", "evil.example"), cookie_of(access))).status == 421
    assert (await answered(app, path, HOST, ("origin", "http://evil.example"), cookie_of(access))).status == 403
    assert operator.asked == []
    assert (await answered(app, path, HOST, cookie_of(access))).status == 200


async def test_a_page_that_is_let_in_reads_hosts_logs_and_news(tmp_path: Path) -> None:
    access, operator = opened(tmp_path), _Operator()
    app = operator_app(access, operator)
    board = msgspec.json.decode((await answered(app, "/hosts", HOST, cookie_of(access))).body)
    assert board == {"hosts": [{"name": "desk"}, {"name": "box"}], "token": access.order_token}
    logs = msgspec.json.decode((await answered(app, "/hosts/box/logs", HOST, cookie_of(access))).body)
    assert logs == [{"unit": "box-servers", "lines": ["said"]}]
    assert (await answered(app, "/hosts/evil/logs", HOST, cookie_of(access))).status == 404
    news = await answered(app, "/events", HOST, cookie_of(access), query="after=a-7")
    assert (news.body, news.headers["content-type"][:17]) == (b"event: tick\ndata: 1.0\n\n", "text/event-stream")
    assert operator.asked == ["a-7"]
    operator.has_run = False
    assert (await answered(app, "/events", HOST, cookie_of(access))).status == 503


async def test_the_page_of_a_run_has_no_hosts_takes_no_order_and_serves_no_file_that_gives_one(tmp_path: Path) -> None:
    access = opened(tmp_path)
    for path in ("/hosts", "/hosts/box/logs", "/static/hosts.js", "/static/hosts.css"):
        assert (await answer(access, path, HOST, cookie_of(access))).status == 404
    given = (HOST, HERE, cookie_of(access), _token(access))
    assert (await answer(access, "/hosts/box/down", *given, method="POST")).status == 405
    assert not {*OF_OPERATORS} & {*static_files()}
    page = await answer(access, "/", HOST, cookie_of(access))
    assert b"hosts" not in page.body


def test_an_operator_s_page_is_that_of_a_run_with_a_part_more() -> None:
    page = operator_page()
    assert page.count('href="#hosts"') == page.count('id="hosts"') == page.count("/static/hosts.js") == 1
    assert page.index("/static/main.js") < page.index("/static/hosts.js")
