"""The dashboard of a real run, which Prometheus reads as well: from its first step on, also after its monitor's death;
and the report that it leaves."""

from __future__ import annotations

import http.cookiejar
import json
import os
import shutil
import signal
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launched import FEW, START_S, Launched, launched, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_PROMETHEUS = """
scrape_configs:
  - job_name: shoal
    scrape_interval: 1s
    authorization: {{type: Bearer, credentials_file: {token}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


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


def _address(run: Launched) -> str | None:
    """Where the next browser is let in, once it is known."""
    path = run.require_log_dir() / "dashboard.url"
    return path.read_text().strip() if path.exists() else None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _asked(port: int, expression: str) -> list[dict[str, Any]]:
    """What Prometheus answers; nothing while it is not there."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=10) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    except OSError:
        return []
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    with launched(tmp_path_factory.mktemp("seen"), *FEW, "--dashboard.port=0") as run:
        run.saw("client_0", "round.begun")
        yield run


@pytest.fixture(scope="module")
def url(run: Launched) -> str:
    """Where the first browser is let in."""
    return until(lambda: _address(run), START_S, "the dashboard's address")


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_a_real_prometheus_reads_a_run_by_its_token(run: Launched, url: str, tmp_path: Path) -> None:
    web_port, token = _free_port(), run.require_log_dir() / "metrics.token"
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(_PROMETHEUS.format(token=token, port=urllib.parse.urlsplit(url).port))
    checked = subprocess.run(["promtool", "check", "config", str(configuration)], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stderr
    flags = (
        f"--config.file={configuration}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{web_port}",
    )
    with subprocess.Popen(["prometheus", *flags], stderr=subprocess.DEVNULL) as server:
        try:
            [step] = until(lambda: _asked(web_port, "shoal_run_step > 10"), START_S, "a number of the run")
            servers = until(
                lambda: _asked(web_port, "sum by (who) (shoal_step_committed_total)"), START_S, "those of servers"
            )
            [up] = _asked(web_port, 'up{job="shoal"}')
        finally:
            server.terminate()
    assert float(step["value"][1]) > 10
    assert up["value"][1] == "1"
    assert {each["metric"]["who"].partition("@")[0] for each in servers} >= {"server 0"}


def test_a_run_is_seen_from_its_first_step_on_and_after_its_monitor_s_death(run: Launched, url: str) -> None:
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
