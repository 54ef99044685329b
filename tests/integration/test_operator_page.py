"""`shoal up --ui`: what the operator's page shows of hosts, and that its orders do what the commands do."""

from __future__ import annotations

import http.client
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
from tests.browser.made_runs import going_on
from tests.stand_in_hosts import PREFIX, StandInHosts

from shoal.cli import main
from shoal.cli.remote.host_board import serve_page
from shoal.cli.remote.operate import ask_all
from shoal.cli.remote.orders import take_down
from shoal.cli.remote.probe import INSTALLED
from shoal.cli.remote.unit_messages import LookAtUnits, Units
from shoal.clock import SystemClock
from shoal.monitor.http.access import URL_FILE
from shoal.runtime.process_info import read_stat

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]


@dataclass
class Page:
    """An operator's page, as a browser that was let in knows it.

    Attributes:
        said: what its terminal says.
    """

    port: int
    said: list[str]
    headers: dict[str, str] = field(default_factory=dict[str, str])

    async def asked(self, method: str, path: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        """Ask once; return status, body and headers."""

        def ask() -> tuple[int, bytes, dict[str, str]]:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
            connection.request(method, path, headers={**self.headers, **headers})
            got = connection.getresponse()
            found = got.status, got.read(), dict(got.getheaders())
            connection.close()
            return found

        return await anyio.to_thread.run_sync(ask)

    async def enter(self, query: str) -> None:
        """Be let in."""
        status, _, headers = await self.asked("GET", f"/{query}")
        assert status == 303
        self.headers["Cookie"] = headers["set-cookie"].partition(";")[0]

    async def next_address(self) -> str:
        """Return the address that lets the next browser in."""
        path = re.search(r"the next one is in (\S+)", self.said[1])
        assert path is not None
        return (await anyio.Path(path[1]).read_text()).strip()

    async def board(self) -> dict[str, Any]:
        """Return what is known of the hosts."""
        status, body, _ = await self.asked("GET", "/hosts")
        assert status == 200
        return msgspec.json.decode(body)

    async def until(self, holds: Callable[[dict[str, dict[str, Any]]], object]) -> dict[str, Any]:
        """Ask again and again, as the page does, until that holds of the hosts by their names; return them."""
        while True:
            hosts = {host["name"]: host for host in (await self.board())["hosts"]}
            if holds(hosts):
                return hosts
            await SystemClock().sleep_s(0.1)

    async def order(self, host: str, order: str) -> tuple[int, bytes]:
        """Give an order as the page does."""
        token = (await self.board())["token"]
        origin = f"http://127.0.0.1:{self.port}"
        status, body, _ = await self.asked("POST", f"/hosts/{host}/{order}", Origin=origin, **{"X-Shoal-Order": token})
        return status, body


@asynccontextmanager
async def served(hosts: StandInHosts) -> AsyncGenerator[Page]:
    """The page of these hosts, with a browser that was let in; everything is taken down at the end."""
    said: list[str] = []
    async with anyio.create_task_group() as tasks:
        call = partial(serve_page, hosts.read(), hosts.read, 0, lambda host, text: said.append(f"{host} {text}"))
        tasks.start_soon(partial(call, clock=SystemClock()))
        while len(said) < 2:
            await SystemClock().sleep_s(0.01)
        address = re.search(r"http://127\.0\.0\.1:(\d+)/(\?token=\S+)", said[0])
        assert address is not None
        page = Page(int(address[1]), said)
        await page.enter(address[2])
        try:
            yield page
        finally:
            with anyio.CancelScope(shield=True):
                for name in hosts.names:
                    await page.until(lambda found, name=name: not found[name]["busy"])
                    await page.order(name, "down")
                await page.until(lambda found: not any(host["busy"] for host in found.values()))
        tasks.cancel_scope.cancel()


def _runs(host: dict[str, Any]) -> list[bool]:
    return [unit["isRunning"] for unit in host["units"]]


async def test_hosts_are_brought_up_restarted_and_taken_down_from_the_page(tmp_path: Path) -> None:
    hosts = StandInHosts(tmp_path)
    async with served(hosts) as page:
        found = await page.until(lambda found: all(host["isReached"] for host in found.values()))
        assert (found["desk"]["isClient"], found["box"]["isClient"]) == (True, False)
        assert [unit["state"] for unit in found["box"]["units"]] == ["was not started here"]
        assert await page.order("desk", "up") == (202, b"")
        await page.until(lambda found: _runs(found["desk"]) == [True, True])
        assert await page.order("box", "up") == (202, b"")
        found = await page.until(lambda found: _runs(found["box"]) == [True])
        [unit] = found["box"]["units"]
        assert unit["name"] == f"{PREFIX}-servers"
        assert unit["state"].startswith("runs since 20")
        found = await page.until(lambda found: found["box"]["units"][0]["said"])
        assert found["box"]["units"][0]["said"] == "server 0 serves stage 0"
        assert found["box"]["version"]
        assert (tmp_path / "box" / "invitation").read_text() == "shoal1:invitation"
        _, logs, _ = await page.asked("GET", "/hosts/box/logs")
        assert msgspec.json.decode(logs) == [{"unit": f"{PREFIX}-servers", "lines": ["server 0 serves stage 0"]}]

        # With its client the run ends everywhere: what is restarted there is all of it.
        await page.until(lambda found: not any(host["busy"] for host in found.values()))
        since = {host["name"]: host["units"][0]["since"] for host in (await page.board())["hosts"]}
        assert await page.order("desk", "restart") == (202, b"")
        assert await page.order("box", "down") == (409, b"box: `restart` is under way there\n")
        await page.until(
            lambda found: all(
                host["units"] and all(_runs(host)) and host["units"][0]["since"] > since[host["name"]]
                for host in found.values()
            )
        )
        await page.until(lambda found: not any(host["busy"] for host in found.values()))
        assert await page.order("box", "down") == (202, b"")
        found = await page.until(lambda found: found["box"]["units"] and not any(_runs(found["box"])))
        assert _runs(found["desk"]) == [True, True], "the others stay"
        course = [(line["host"], line["says"]) for line in (await page.board())["course"]]
        assert ("box", f"{PREFIX}-servers has ended") in course
        assert f"box {PREFIX}-servers has ended" in page.said, "the terminal tells it too"


async def test_what_cannot_be_reached_or_done_is_said_where_it_belongs(tmp_path: Path) -> None:
    hosts = StandInHosts(tmp_path)
    async with served(hosts) as page:
        await page.until(lambda found: found["box"]["isReached"])
        hosts.leaves("box")
        found = await page.until(lambda found: found["box"]["isReached"] is False)
        assert found["box"]["problem"].startswith("nothing listens there")
        assert found["desk"]["isReached"]
        # An order is of the file as it is now, and a mistake in it ends nothing.
        hosts.file.write_text(hosts.file.read_text().replace("hosts:", "hostz:"))
        assert await page.order("desk", "restart") == (202, b"")
        await page.until(lambda found: not found["desk"]["busy"])
        [*_, last] = (await page.board())["course"]
        assert last["host"] == "desk"
        assert "did you mean hosts?" in last["says"]
        hosts.write()
        (tmp_path / "box.away").unlink()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("client: desk", "client: box"),
        ("box: {", "box: {ssh: other, "),
        ("ssh.py", "ssh.py -v"),
        ("config: own.yaml", "config: own.yaml, flags: [--experiment-prefix=flock]"),
    ],
)
async def test_an_order_whose_file_means_another_thing_by_now_than_the_page_shows_is_not_carried_out(
    tmp_path: Path, before: str, after: str
) -> None:
    hosts = StandInHosts(tmp_path)
    async with served(hosts) as page:
        hosts.file.write_text(hosts.file.read_text().replace(before, after))
        assert await page.order("box", "restart") == (202, b"")
        await page.until(lambda found: not found["box"]["busy"])
        course = [line["says"] for line in (await page.board())["course"]]
        assert course[0] == "shoal hosts restart box"
        assert course[1:] == ["error: the file names another run, client or way to box by now: start this page again"]
        hosts.write()


async def test_what_is_said_of_a_host_is_asked_anew_and_one_that_has_nothing_to_run_may_leave_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.cli.remote.host_board.PROBE_S", 0.0)
    hosts = StandInHosts(tmp_path)
    hosts.write(box="servers: 0")
    async with served(hosts) as page:
        for free_kb in (5_000_000, 4_000_000):
            hosts.put_program("desk", "df", f"echo; echo a b c {free_kb}")
            await page.until(lambda found, free_kb=free_kb: found["desk"]["freeKb"] == free_kb)
        monkeypatch.setattr("shoal.cli.remote.host_board.PROBE_S", 1e9)
        found = await page.until(lambda found: found["box"]["isReached"])
        assert (found["box"]["units"], found["box"]["servers"]) == ([], 0)
        hosts.leaves("box")
        await page.until(lambda found: found["box"]["isReached"] is False)
        (tmp_path / "box.away").unlink()


async def test_who_was_taken_down_is_well_and_an_answer_that_nobody_could_show_is_none(tmp_path: Path) -> None:
    hosts = StandInHosts(tmp_path)
    async with served(hosts) as page:
        await page.order("desk", "up")
        await page.until(lambda found: _runs(found["desk"]) == [True, True] and not found["desk"]["busy"])
        await page.order("desk", "down")
        found = await page.until(lambda found: found["desk"]["units"] and not any(_runs(found["desk"])))
        seen = [(unit["state"], unit["isWell"]) for unit in found["desk"]["units"]]
        assert seen == [("has ended with 130", True)] * 2
        unit = '{"name": "x", "is_running": true, "code": null, "since_unix_s": 1e300, "pid": 1}'
        [python] = (tmp_path / "box" / INSTALLED).glob("*/bin/python")
        whole = python.read_text()
        python.write_text(f"#!/bin/sh\ncat > /dev/null; echo '{{\"units\": [{unit}]}}'\n")
        found = await page.until(lambda found: found["box"]["problem"])
        assert found["box"]["problem"].startswith("its units answer in another version")
        assert found["box"]["isReached"]
        python.write_text(whole)


async def test_the_run_s_own_news_are_handed_on_and_nothing_else_of_its_dashboard(tmp_path: Path) -> None:
    hosts = StandInHosts(tmp_path)
    async with served(hosts) as page:
        status, _, _ = await page.asked("GET", "/events")
        assert status == 503, "there is no run yet"
        async with going_on(hosts.client_logs() / "made-run", 20, 4) as run:
            address = run.url
            got = await _first_event(page)
            assert b'"run":"made-run"' in got
            assert run.url != address, "its token let this process in"
            address = run.url
            await _first_event(page)
            assert run.url == address, "which stays in"


async def _first_event(page: Page) -> bytes:
    """Return the first message of the stream."""

    def read() -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=60)
        connection.request("GET", "/events", headers=page.headers)
        got = connection.getresponse()
        assert got.status == 200
        said = b""
        while not said.endswith(b"\n\n"):
            said += got.read1()
        connection.close()
        return said

    return await anyio.to_thread.run_sync(read)


async def test_the_next_address_is_in_a_folder_of_the_operator_alone_that_goes_with_the_page(tmp_path: Path) -> None:
    async with served(StandInHosts(tmp_path)) as page:
        path = re.search(r"the next one is in (\S+)", page.said[1])
        assert path is not None
        file = Path(path[1])
        assert file.name == URL_FILE
        assert file.parent.stat().st_mode & 0o777 == 0o700
        other = Page(page.port, [])
        await other.enter(f"?{(await page.next_address()).partition('/?')[2]}")
        assert (await other.asked("GET", "/hosts"))[0] == 200
    assert not file.parent.exists()


_AS_IN_A_TERMINAL = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from shoal.cli import main
sys.exit(main(sys.argv[1:]))
"""


async def test_ctrl_c_in_the_middle_of_an_order_ends_the_page_and_nothing_that_runs(tmp_path: Path) -> None:
    hosts = StandInHosts(tmp_path)
    command = [sys.executable, "-c", _AS_IN_A_TERMINAL, "up", str(hosts.file), "--ui"]
    async with await anyio.open_process(command, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        said = ""
        while URL_FILE not in said:
            said += (await process.stdout.receive()).decode()
        address = re.search(r"^page: http://127\.0\.0\.1:(\d+)/(\?token=\S+)$", said, re.MULTILINE)
        folder = re.search(rf"the next one is in (\S+)/{URL_FILE}", said)
        assert address is not None
        assert folder is not None
        page = Page(int(address[1]), [])
        await page.enter(address[2])
        [python] = (tmp_path / "box" / INSTALLED).glob("*/bin/python")
        whole = python.read_text()
        python.write_text("#!/bin/sh\nexec sleep 60\n")
        assert await page.order("box", "restart") == (202, b"")
        assert (await page.board())["hosts"][1]["busy"] == "restart"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    assert not await anyio.Path(folder[1]).exists()
    python.write_text(whole)
    answers = await ask_all(hosts.read().hosts, {"desk": (), "box": (f"{PREFIX}-servers",)}, LookAtUnits, SystemClock())
    box = answers["box"]
    assert isinstance(box, Units)
    assert [unit.is_running for unit in box.units] == [True]
    for name in hosts.names:
        assert await take_down(hosts.read(), (name,), lambda host, text: None, clock=SystemClock()) == 0


def test_hosts_of_a_file_that_have_nothing_to_run_are_not_asked_to_end_what_others_have_there(tmp_path: Path) -> None:
    hosts = StandInHosts(tmp_path)
    hosts.write(box="servers: 0")
    # Of another swarm of the same user.
    unit = tmp_path / "box/.local/share/shoal/units/other-servers"
    unit.mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as process:
        stat = read_stat(process.pid)
        assert stat is not None
        note = {
            "unit": {"name": "other-servers", "argv": ["sleep"], "files": {}, "is_lasting": False},
            "since_unix_s": 1.0,
            "pid": process.pid,
            "started_s": stat.started_s,
        }
        (unit / "unit.json").write_bytes(msgspec.json.encode(note))
        try:
            assert main(["hosts", "down", "box", f"--file={hosts.file}"]) == 0
            assert process.poll() is None
        finally:
            process.kill()


def test_without_the_packages_of_the_page_it_is_said_which_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = StandInHosts(tmp_path)
    for name in [name for name in sys.modules if name.startswith(("starlette", "uvicorn", "shoal.monitor.http."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)
    monkeypatch.setattr("shoal.cli.remote.orders.BringUp.run", _done)
    assert main(["up", str(hosts.file), "--ui"]) == 2
    assert "pip install 'shoal[dashboard]'" in capsys.readouterr().err


async def _done(_: object) -> int:
    return 0
