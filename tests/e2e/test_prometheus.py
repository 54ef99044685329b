"""Prometheus reads the numbers of a run."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.launched import FEW, START_S, launched, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus"),
]

_CONFIGURATION = """
scrape_configs:
  - job_name: shoal
    scrape_interval: 1s
    authorization: {{type: Bearer, credentials_file: {token}}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


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


def test_a_real_prometheus_reads_a_run_by_its_token(tmp_path: Path) -> None:
    port, web_port = _free_port(), _free_port()
    with launched(tmp_path / "run", *FEW, f"--dashboard.port={port}") as run:
        run.saw("monitor_0", "dashboard.open")
        token = run.require_log_dir() / "metrics.token"
        configuration = tmp_path / "prometheus.yml"
        configuration.write_text(_CONFIGURATION.format(token=token, port=port))
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
