"""`shoal up` brings a swarm up from an image, with a program in place of podman (tests/fake_podman.py).

No image is built, pulled or entered here. A container of that program has processes' numbers and a runtime directory of
its own, and an environment that holds nothing but what the image and the flags say.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import fake_podman
from tests.e2e.launched import END_S, ROOT, until
from tests.e2e.needs import needs_ssh_hosts
from tests.e2e.operators import MACHINES, Operator, operator_of

IMAGE = "registry.example/shoal:1.2"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_ssh_hosts]


@contextlib.contextmanager
def _operator(directory: Path) -> Iterator[Operator]:
    with operator_of(directory, {}, more=f"image: {IMAGE}\n") as operator:
        operator.write(**{f", python: {sys.executable}": ""})
        yield operator


def _put_podman(operator: Operator, host: str) -> Path:
    """Let a host have podman; return where that is."""
    inside = operator.hosts.directory / "image"
    inside.mkdir(exist_ok=True)
    shoal = inside / "shoal"
    shoal.write_text(f'#!/bin/sh\nexec {sys.executable} -m shoal "$@"\n')
    shoal.chmod(0o755)
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    environment = {"PATH": f"{inside}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT / 'src'}:{packages}"}
    # By the last one the test finds what has to end with it.
    environment |= {"OMP_NUM_THREADS": "1", **operator.hosts.tag}
    programs = operator.hosts.home(host) / "bin"
    fake_podman.put(programs, "podman", {"names": [IMAGE], "environment": environment, "apart": True})
    return programs


def _state(programs: Path, unit: str) -> dict[str, Any]:
    return json.loads((programs / "containers" / f"shoal-{unit}" / "state.json").read_text())


def _said(programs: Path, unit: str) -> str:
    return (programs / "containers" / f"shoal-{unit}" / "log").read_text()


def test_one_file_with_an_image_brings_up_three_machines_that_have_nothing_but_podman(tmp_path: Path) -> None:
    with _operator(tmp_path) as operator:
        programs = {host: _put_podman(operator, host) for host in MACHINES}
        (programs["two"] / "broken").write_text("no subuid ranges found for user ada")
        code, said = operator.shoal("up", "--dry-run")
        assert code == 1
        assert "two    error: podman does not work there: Error: no subuid ranges found for user ada" in said
        assert f"three  would install: {programs['three']}/podman pull --quiet {IMAGE}; " in said
        assert (
            f"three  would start sandbox-servers, in ~/.local/share/shoal/units/sandbox-servers: {programs['three']}"
            in said
        )
        assert not (programs["three"] / "pulled").exists()
        (programs["two"] / "broken").unlink()

        code, said = operator.shoal("up")
        assert code == 0, said
        assert re.search(r"^run \S+ trains, \d+ s after the beginning: 2 stages, 3 servers$", said, re.MULTILINE), said
        assert f"two    pulls {IMAGE} with {programs['two']}/podman (Linux" in said
        assert "two    sandbox-servers started\n" in said
        assert "two    it runs until this host restarts: `shoal up` starts it again then" in said

        # The key came by standard input, and is where it is with an installation.
        key = operator.hosts.home("three") / ".config/shoal/swarm.key"
        assert key.stat().st_mode & 0o777 == 0o600
        secrets = ("shoal1:", key.read_bytes().hex(), base64.b64encode(key.read_bytes()).decode().rstrip("="))
        for each in programs.values():
            kept = [
                (each / "calls.jsonl").read_text(),
                *(path.read_text() for path in each.glob("containers/*/state.json")),
            ]
            assert not any(secret in text for secret in secrets for text in kept)

        code, said = operator.shoal("up")
        assert (code, said) == (0, "all hosts are as the file says: nothing was changed\n")
        code, said = operator.shoal("hosts", "status")
        assert code == 0, said
        assert said.count("runs since") == 4, said
        code, said = operator.shoal("hosts", "logs", "one")
        assert code == 0, said
        assert "==> sandbox-client <==" in said
        assert "serves stage" in said
        with operator.started("hosts", "dashboard", "--port=0") as spoken:
            address = until(
                lambda: re.search(r"^dashboard: (http://127\.0\.0\.1:\d+/\?token=\S+)$", spoken(), re.M), END_S, "it"
            )
            assert "<title>" in operator.fetched(address[1])

        # A container that fails is started again, and joins again.
        before = _said(programs["two"], "sandbox-servers").count("serves stage")
        os.kill(fake_podman.first_process(_state(programs["two"], "sandbox-servers")), 9)
        until(lambda: _state(programs["two"], "sandbox-servers")["restarts"] == 1, END_S, "a new start")
        # Asked over ssh again and again, it would take longer than what is waited for.
        until(lambda: _said(programs["two"], "sandbox-servers").count("serves stage") > before, END_S, "its servers")
        code, said = operator.shoal("hosts", "logs", "two", "-n", "50")
        assert code == 0, said
        assert "serves stage" in said

        code, said = operator.shoal("hosts", "restart", "two")
        assert code == 0, said
        assert re.search(r"^two  sandbox-servers started$", said, re.MULTILINE), said
        code, said = operator.shoal("hosts", "down", "three")
        assert code == 0, said
        assert "sandbox-servers has ended" in said
        code, said = operator.shoal("hosts", "status")
        assert code == 1
        assert re.search(r"^three +sandbox-servers +has ended with \d+", said, re.MULTILINE), said
        code, said = operator.shoal("up")
        assert code == 0, said
        assert "three  sandbox-servers started" in said
        code, said = operator.shoal("hosts", "down")
        assert code == 0, said
        code, said = operator.shoal("hosts", "status")
        assert said.count("has ended with") == 4, said
        code, said = operator.shoal("up", "--resume")
        assert code == 0, said
        assert "resuming run sandbox-" in operator.shoal("hosts", "logs", "one", "--lines=1000")[1]
