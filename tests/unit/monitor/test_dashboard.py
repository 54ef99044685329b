"""The dashboard in the monitor's event loop: when it begins, where it is, and how it goes on after its process."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import pytest
from anyio.abc import SocketStream
from tests.alongside import alongside
from tests.hung_disk import far_disk
from tests.set_clock import FewSleeps

from shoal.clock import SystemClock
from shoal.config import Config
from shoal.events.base import EVENTS_FILE
from shoal.monitor.exporters.base import noted_event
from shoal.monitor.exporters.metrics_file import MetricsFile
from shoal.monitor.http.access import URL_FILE, Access
from shoal.monitor.http.dashboard import Dashboard, DashboardSettings
from shoal.monitor.page.chronicle import info_of
from shoal.telemetry.rows import MetricRow

pytestmark = pytest.mark.anyio

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)
LINE = (
    b'{"time": "2026-01-01T00:00:0%d.000+00:00", "level": "INFO", "event": "run.stopped", "by": "x", "says": "it %d"}'
)


def row(second: int, run: dict[str, float] | None = None, **peers: dict[str, float]) -> MetricRow:
    return MetricRow(BEGAN + timedelta(seconds=second), {"step": float(second)} if run is None else run, peers)


def event(number: int) -> bytes:
    return LINE % (number, number)


def prepared(folder: Path, notices: list[str], port: int = 0) -> Dashboard:
    info = info_of(Config(), "run")
    return Dashboard(DashboardSettings(folder, "run", port, info), SystemClock(), notices.append)


@asynccontextmanager
async def served(dashboard: Dashboard, folder: Path) -> AsyncGenerator[Access]:
    """The dashboard from its first step on; it is told that nothing follows when this is left, as the gatherer does."""
    (folder / URL_FILE).exists() or dashboard.row(row(1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dashboard.run)
        await dashboard.opened.wait()
        yield Access(folder, "run")
        tasks.start_soon(anyio.to_thread.run_sync, dashboard.close, 1.0)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()


class Stream:
    """A browser that reads the stream of events."""

    def __init__(self, socket: SocketStream) -> None:
        self._socket = socket
        self._read = b""

    async def message(self) -> tuple[str, Any]:
        """The next message: its kind and its data."""
        while True:
            head, found, self._read = self._read.partition(b"\n\n")
            if not found:
                self._read = head + await self._socket.receive()
                continue
            fields = dict(line.split(": ", 1) for line in head.decode().splitlines() if ": " in line)
            if "event" in fields and fields["event"] != "tick":
                return fields["event"], json.loads(fields["data"])


@asynccontextmanager
async def reading(access: Access) -> AsyncGenerator[Stream]:
    async with await anyio.connect_tcp("127.0.0.1", access.earlier_port) as stream:
        asked = f"GET /events HTTP/1.1\r\nHost: 127.0.0.1\r\nCookie: {access.cookie_name}={access.cookie}\r\n\r\n"
        await stream.send(asked.encode())
        yield Stream(stream)


@pytest.mark.parametrize("asked", ["exists", "read_text"])
async def test_a_disk_that_does_not_answer_keeps_no_loop_that_serves_the_dht(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    (tmp_path / URL_FILE).touch()
    begun, answers = threading.Event(), threading.Event()
    own = getattr(Path, asked)

    def hang(path: Path, *args: Any, **more: Any) -> Any:
        if path.parent == tmp_path:
            begun.set()
            answers.wait()
        return own(path, *args, **more)

    monkeypatch.setattr(Path, asked, hang)
    dashboard = prepared(tmp_path, [])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dashboard.run)
        await anyio.to_thread.run_sync(begun.wait)
        tasks.cancel_scope.cancel()
    answers.set()


async def test_an_address_that_cannot_be_written_down_now_lets_nobody_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far_disk(monkeypatch)
    access = Access(tmp_path, "run")
    access.serves(1234)
    before, answers = access.url, threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr("shoal.monitor.http.access.put_whole", lambda *_, **__: answers.wait())
        with pytest.raises(OSError, match=r"does not answer.*dashboard\.url"):
            access.redeem(before.rpartition("=")[2])
        answers.set()
        access._disk.end()
    assert access.url == before


async def test_it_begins_with_the_first_step_and_shows_what_came_before(tmp_path: Path) -> None:
    notices: list[str] = []
    dashboard = prepared(tmp_path, notices)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dashboard.run)
        dashboard.row(row(0, {"alive_peers": 3.0}, one={"busy": 0.5}))
        dashboard.event(noted_event(event(0)))
        await anyio.wait_all_tasks_blocked()
        assert os.listdir(tmp_path) == []
        tasks.cancel_scope.cancel()
    assert notices == []
    async with served(dashboard, tmp_path) as access, reading(access) as browser:
        kind, past = await browser.message()
        assert kind == "past"
        assert past["run"].keys() == {"alive_peers", "step"}
        assert past["peers"]["one"]["values"] == {"busy": 0.5}
        assert [each["says"] for each in past["events"]] == ["it 0"]
        dashboard.row(row(2))
        assert (await browser.message())[1]["run"] == {"step": 2.0}
        dashboard.event(noted_event(event(1)))
        assert (await browser.message())[1]["event"]["says"] == "it 1"
    assert notices == [f"dashboard: {(tmp_path / URL_FILE).read_text().strip()}"]


async def test_after_its_process_it_goes_on_at_the_same_address_and_knows_all_of_it_once(tmp_path: Path) -> None:
    notices: list[str] = []
    files = MetricsFile(tmp_path)
    events = (tmp_path / EVENTS_FILE).open("wb", buffering=0)
    first, second = prepared(tmp_path, notices), prepared(tmp_path, notices)
    async with served(first, tmp_path) as access:
        for number in (1, 2):
            files.row(row(number))
            events.write(event(number) + b"\n")
    # What came with the first step is in the files as well, but for the peers.
    for number in (2, 3):
        second.row(row(number, one={"busy": number / 10}))
        second.event(noted_event(event(number)))
    files.row(row(3))
    events.write(event(3) + b"\n")
    events.close()
    async with served(second, tmp_path) as again, reading(again) as browser:
        _, past = await browser.message()
    files.close(1.0)
    assert [each["says"] for each in past["events"]] == ["it 1", "it 2", "it 3"]
    assert past["run"] == {"step": [3.0, (BEGAN + timedelta(seconds=3)).timestamp()]}
    assert len(past["peers"]["one"]["curves"]["busy"]["buckets"]) == 2
    assert again.url == access.url
    assert (again.earlier_port, again.cookie) == (access.earlier_port, access.cookie)
    assert len(notices) == 1


async def test_where_its_port_is_taken_it_takes_another_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notices: list[str] = []
    caplog.set_level("INFO", "shoal")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with served(prepared(tmp_path, notices, port), tmp_path) as access:
            assert access.earlier_port not in (0, port)
    [notice] = notices
    assert urlsplit(notice.removeprefix("dashboard: ")).port == access.earlier_port
    said = [record.getMessage() for record in caplog.records if record.name.startswith("shoal.monitor")]
    assert said == ["dashboard.away", "dashboard.open"]
    assert access.url.partition("token=")[2] not in str([vars(record) for record in caplog.records])


async def test_at_the_end_a_browser_gets_the_last_numbers_and_is_told(tmp_path: Path) -> None:
    dashboard = prepared(tmp_path, [])
    told: list[str] = []

    async def read() -> None:
        async with reading(access) as browser:
            for _ in range(3):
                told.append((await browser.message())[0])
                is_there.set()

    is_there = anyio.Event()
    async with anyio.create_task_group() as tasks, served(dashboard, tmp_path) as access:
        tasks.start_soon(read)
        await is_there.wait()
        dashboard.row(row(9))
    assert told == ["past", "row", "end"]


async def test_without_the_package_one_line_says_so_and_nothing_else_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setitem(sys.modules, "uvicorn.config", None)
    monkeypatch.delitem(sys.modules, "shoal.monitor.http.server", raising=False)
    notices: list[str] = []
    dashboard = prepared(tmp_path, notices)
    dashboard.row(row(1))
    await dashboard.run()
    assert notices == [
        "dashboard: not installed, so there is none",
        "  install it with `pip install 'shoal[dashboard]'`, or say --no-dashboard.enable",
    ]
    dashboard.row(row(2))
    assert await anyio.to_thread.run_sync(dashboard.close, 1.0)


async def test_a_folder_that_cannot_be_written_costs_the_dashboard_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "dashboard.key").mkdir()
    notices: list[str] = []
    dashboard = prepared(tmp_path, notices)
    dashboard.row(row(1))
    await dashboard.run()
    [notice, *_] = notices
    assert "dashboard: there is none" in notice
    assert "dashboard.key" in notice


async def test_who_only_connects_or_talks_nonsense_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.monitor.http import server

    monkeypatch.setattr(server, "_REQUEST_S", 0.0)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    async with served(prepared(tmp_path, []), tmp_path) as access:
        for said in (b"", b"\x16\x03\x01 nonsense\r\n\r\n"):
            async with await anyio.connect_tcp("127.0.0.1", access.earlier_port) as stream:
                if said:
                    await stream.send(said)
                with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                    while True:
                        await stream.receive()


async def test_browsers_are_told_the_time_at_ticks(tmp_path: Path) -> None:
    clock, told_s = FewSleeps(3), list[float]()
    browsers: Any = SimpleNamespace(tick=lambda: told_s.append(clock.now))
    dashboard = prepared(tmp_path, [])
    dashboard.clock = clock
    async with alongside(lambda: dashboard._tick(browsers)):
        await clock.over.wait()
    assert told_s == pytest.approx([102.0, 104.0, 106.0])
