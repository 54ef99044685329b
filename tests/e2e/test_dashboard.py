"""The dashboard of a real run: from its first step on, also after its monitor's death; and the report it leaves."""

from __future__ import annotations

import http.cookiejar
import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launched import FEW, SMALLEST, START_S, Launched, completed, launched, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Browser:
    """Keeps cookies, as browsers do."""

    def __init__(self) -> None:
        cookies = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), cookies)

    def page(self, url: str) -> str:
        """The page at an address."""
        with self._opener.open(url, timeout=START_S) as answer:
            return answer.read().decode()

    def message(self, url: str) -> tuple[str, Any]:
        """The first message of the stream: its kind and its data."""
        with self._opener.open(url, timeout=START_S) as answer:
            fields = dict(answer.readline().decode().rstrip("\n").split(": ", 1) for _ in range(3))
        return fields["event"], json.loads(fields["data"])


def address(run: Launched) -> str | None:
    """Where the next browser is let in, once it is known."""
    path = run.require_log_dir() / "dashboard.url"
    return path.read_text().strip() if path.exists() else None


def test_a_run_is_seen_from_its_first_step_on_and_after_its_monitor_s_death(tmp_path: Path) -> None:
    with launched(tmp_path, *FEW, "--dashboard.port=0") as run:
        run.saw("client_0", "round.begun")
        url = until(lambda: address(run), START_S, "the dashboard's address")
        until(lambda: f"dashboard: {url}" in run.output or None, START_S, "the address on the terminal")
        base = url.partition("?")[0]
        browser = Browser()
        assert "main.js" in browser.page(url)
        kind, past = browser.message(f"{base}events")
        assert kind == "past"
        assert past["info"]["run"] == run.require_log_dir().name
        begun = past["begun"]
        assert past["run"]["step"][0] >= 1
        os.kill(run.living_pid_of("monitor:0"), signal.SIGKILL)
        until(lambda: len(run.events("monitor_0", "dashboard.open")) == 2 or None, START_S, "the dashboard again")
        # The same address and cookie, and what was seen before is there.
        kind, past = browser.message(f"{base}events")
        assert (kind, past["begun"]) == ("past", begun)
        assert run.output.count("dashboard: http://127.0.0.1:") == 1
        run.interrupt()
        run.ends(START_S)
        log_dir = run.require_log_dir()
        assert f"report: {log_dir / 'report.html'}" in run.output
        assert url.partition("token=")[2] not in (log_dir / "monitor_0.log").read_text()
        run.leaves_nothing()


def test_a_run_that_is_to_have_none_has_none_and_leaves_its_report_all_the_same(tmp_path: Path) -> None:
    run = completed(tmp_path, *SMALLEST, "--no-dashboard.enable")
    log_dir = run.require_log_dir()
    assert not (log_dir / "dashboard.url").exists()
    assert "dashboard:" not in run.output
    assert "dashboard.enable" not in run.output
    assert (log_dir / "report.html").is_file()
