"""`shoal up` brings a swarm up on three machines from one file, over ssh; `shoal hosts` looks after it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documented import quick_start
from tests.e2e.launched import END_S, ROOT, until
from tests.e2e.needs import needs_ssh_hosts
from tests.e2e.operators import Operator, operator_of

GENERATE = 'shoal generate logs/sandbox --prompt "Once upon a time" --max-tokens 50'
"""Needs the model on this machine; tests/e2e/test_tasks.py does it."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), needs_ssh_hosts]


@contextlib.contextmanager
def _operator(directory: Path) -> Iterator[Operator]:
    # What shoal needs is in this interpreter's own environment, and need not be fetched and written for each host; what
    # `shoal up` sends and installs is shoal itself.
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    with operator_of(directory, {"PYTHONPATH": packages}) as operator:
        yield operator


def _exchanges(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Return commands and what they say, without what differs from time to time: also the order of hosts' lines."""
    found: list[tuple[str, list[str]]] = []
    for line in lines:
        if line.startswith("$ "):
            found.append((line, []))
        elif not re.match(r"run \S+: ", line):
            for pattern, name in ((r"sandbox-\d{8}\S*", "RUN"), (r"\b\d+ s\b", "N s"), (r"for \S+ \(.*?\)", "PYTHON")):
                line = re.sub(pattern, name, line)
            found[-1][1].append(line)
    return [(command, sorted(said)) for command, said in found]


def _pids(status: str) -> list[str]:
    return re.findall(r"runs since (\S+?):? ", status)


def test_one_file_brings_up_three_machines_and_a_second_call_changes_nothing(tmp_path: Path) -> None:
    with _operator(tmp_path) as operator:
        code, said = operator.shoal("up", "--dry-run")
        assert code == 0, said
        assert "two    would install: send shoal-" in said
        assert "two    would start sandbox-servers, in ~/" in said
        assert not list(operator.hosts.home("two").glob(".local/share/shoal/installed/*"))

        # A systemd of the user's own is there, and an administrator who lets nothing of it last.
        operator.hosts.put_program("two", "systemctl", "exit 0")
        operator.hosts.put_program("two", "loginctl", "echo 'Access denied' >&2; exit 1")
        code, said = operator.shoal("up")
        assert code == 0, said
        assert "two    it runs until this host restarts: its user's services end with the login, until `sudo" in said
        assert "three  it runs until this host restarts: its user has no systemd of their own" in said
        assert re.search(r"^run \S+ trains, \d+ s after the beginning: 2 stages, 3 servers$", said, re.MULTILINE), said
        assert "two    sandbox-servers started" in said
        key = operator.hosts.home("three") / ".config/shoal/swarm.key"
        assert key.stat().st_mode & 0o777 == 0o600
        code, before = operator.shoal("hosts", "status")
        assert code == 0, before

        code, said = operator.shoal("up")
        assert (code, said) == (0, "all hosts are as the file says: nothing was changed\n")
        operator.write(
            **{f"two: {{servers: 1, python: {sys.executable}": f"two: {{servers: 2, python: {sys.executable}"}
        )
        code, said = operator.shoal("up", "--dry-run")
        assert code == 0, said
        lines = said.splitlines()
        assert {*lines} >= {"three  sandbox-servers would be left as it is", "that was a look: nothing was changed"}
        assert any(line.startswith("two    would restart sandbox-servers, in ~/") for line in lines), said
        # The client waits for one server more, and is not ended for that.
        assert any(line.startswith("one    sandbox-client runs as it was started, not as the") for line in lines), said
        operator.write()
        code, after = operator.shoal("hosts", "status")
        assert _pids(before) == _pids(after)
        assert len(_pids(after)) == 4, after

        with operator.started("hosts", "dashboard", "--port=0") as spoken:
            address = until(
                lambda: re.search(r"^dashboard: (http://127\.0\.0\.1:\d+/\?token=\S+)$", spoken(), re.M), END_S, "it"
            )
            assert "<title>" in operator.fetched(address[1])

        with operator.started("up", "--ui") as spoken:
            address = until(
                lambda: re.search(r"^page: (http://127\.0\.0\.1:\d+/)\?(token=\S+)$", spoken(), re.M), END_S, "it"
            )
            said = operator.ordered(address[1], address[2], "three", "restart")
            assert 'id="hosts"' in said
            assert "event: past" in said, "the run's own news come over ssh"
            until(lambda: "three  restart: done" in spoken(), END_S, "the restart")
            assert re.search(r"^three +sandbox-servers started$", spoken(), re.MULTILINE), spoken()

        code, said = operator.shoal("hosts", "restart", "two")
        assert code == 0, said
        assert re.search(r"^two  sandbox-servers started$", said, re.MULTILINE), said
        code, said = operator.shoal("hosts", "down", "three")
        assert code == 0, said
        assert "sandbox-servers has ended" in said
        code, said = operator.shoal("hosts", "status")
        assert code == 1
        assert re.search(r"^three +sandbox-servers +has ended with \d+", said, re.MULTILINE), said
        assert re.search(r"^one +sandbox-client +runs since ", said, re.MULTILINE), said
        code, said = operator.shoal("up")
        assert code == 0, said
        assert "three  sandbox-servers started" in said
        assert "one" not in said.partition("run ")[0].replace("sandbox", "")
        shown = re.search(r"^```text\n(\$ shoal up\n.*?)^```$", (ROOT / "docs/hosts.md").read_text(), re.M | re.S)
        assert shown is not None
        happened = _exchanges(operator.transcript)
        for command, lines in _exchanges(shown[1].splitlines()):
            assert (command, lines) in happened, f"docs/hosts.md shows something else:\n{happened}"

        code, said = operator.shoal("hosts", "logs", "three")
        assert code == 0, said
        assert "serves stage" in said
        code, said = operator.shoal("hosts", "down")
        assert code == 0, said
        code, said = operator.shoal("hosts", "status")
        assert said.count("has ended with") == 4, said
        code, said = operator.shoal("up", "--resume")
        assert code == 0, said
        code, said = operator.shoal("hosts", "logs", "one", "--lines=1000")
        assert "resuming run sandbox-" in said

        # What a page says to do in place of another system's commands was done.
        run = {line.removeprefix("$ ").removesuffix(" --port=0") for line in operator.transcript}
        assert {*quick_start("smolcluster")} - run == {"hosts.yaml", GENERATE}


def test_each_host_that_cannot_take_part_says_why_in_a_line_and_keeps_no_other_from_it(tmp_path: Path) -> None:
    with _operator(tmp_path) as operator:
        hosts = operator.hosts
        # Another machine has come to the address of one, another one's disk is full, and a third has no such Python.
        hosts.know_hosts(wrongly="one")
        with hosts.full_disk("two"):
            operator.write(**{f"three: {{servers: 1, python: {sys.executable}}}": "three: {python: python-of-nobody}"})
            code, said = operator.shoal("up")
        assert code == 1
        lines = said.splitlines()
        assert any(line.startswith("one    error: its host key is another one than was known") for line in lines), said
        assert any(re.match(r"two    error: 0\.\d GiB are free in ", line) for line in lines), said
        assert "three  error: there is no python-of-nobody: install Python 3.11 or newer, or say where it is" in said
        hosts.know_hosts()
        code, said = operator.shoal("hosts", "status")
        assert code == 1
        assert "one    " in said
        assert said.count("not known: nothing was brought up there: shoal up") == 3, said
        # Who lets nobody in, and who is not there at all.
        hosts.let_nobody_in()
        operator.write(**{"three: {": "three: {ssh: 10.77.0.99, "})
        code, said = operator.shoal("up")
        assert code == 1
        assert "one    error: it lets nobody in without a password: put your key there, `ssh-copy-id one`" in said
        assert re.search(r"three  error: (it does not answer|no answer)", said), said
