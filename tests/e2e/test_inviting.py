"""`shoal invite` on one host and `shoal join` on others: a swarm, with nothing copied beside one text."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documented import quick_start
from tests.e2e.hosts import Hosts, hosts_of, invited
from tests.e2e.launched import END_S, ENDLESS, ROOT, START_S, until
from tests.e2e.namespaces import Lan, lan
from tests.e2e.needs import needs_namespaces
from tests.e2e.terminals import terminal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _shoal(hosts: Hosts, host: str, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HOME": str(hosts.home(host)), "XDG_CACHE_HOME": str(hosts.home(host) / "cache")}
    return subprocess.run(
        [sys.executable, "-m", "shoal", *command],
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_host_joins_by_an_invitation_and_the_next_time_by_nothing(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("desk", "start_trainer_client.py", *ENDLESS, "--num-servers=2")
        until(lambda: (client.log_root / "sandbox" / "initial_peers.txt").exists(), START_S, "its addresses")
        done = _shoal(hosts, "desk", "invite", "--for=30m", f"--log-dir={client.log_root}")
        assert done.returncode == 0, done.stderr
        text = done.stdout.strip()
        assert "who reads it is a member for good" in done.stderr
        assert text not in done.stderr
        for wrong, why in (("", "is no invitation"), (text[:-1], "is not whole")):
            refused = _shoal(hosts, "box", "join", stdin=wrong)
            assert (refused.returncode, why in refused.stderr) == (2, True), refused.stderr
        refused = _shoal(hosts, "box", "join", text)
        assert refused.returncode == 2
        assert "can be read by every user of this host" in refused.stderr
        assert text not in refused.stdout + refused.stderr
        own = {"HOME": str(hosts.home("box")), "XDG_CACHE_HOME": str(hosts.home("box") / "cache")}
        with terminal(("-m", "shoal", "join"), own, 80, 24) as seen:
            while "what you paste is not shown" not in seen.written:
                assert seen.read(), seen.written
            seen.press(text[:-1].encode() + b"\n")
            assert seen.ends(END_S) == 2, seen.written
            assert "is not whole" in seen.written
            assert text[:40] not in seen.written
        given = tmp_path / "given"
        given.write_text(text)
        box = hosts.run("box", "-m", "shoal", "join", f"--invitation={given}")
        client.saw("client_0", "round.recorded", 2 * START_S, round=1)
        key = hosts.home("box") / ".config/shoal/swarm.key"
        assert key.stat().st_mode & 0o777 == 0o600
        joined = json.loads((hosts.home("box") / ".config/shoal/joined.json").read_text())
        assert joined["experiment_prefix"] == "sandbox"
        box.interrupt()
        box.interrupt()
        assert box.ends(END_S) == 130, box.output
        assert text not in box.output
        again = hosts.run("box", "-m", "shoal", "join", start="again")
        until(lambda: "serves stage" in again.output, START_S, "the same swarm, unasked")
        assert "where this host was the last time" in again.output
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        assert again.ends(END_S) == 0, again.output


def test_three_commands_make_a_swarm_of_three_hosts(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        # The page says it for a model that takes longer, with two servers on each machine.
        start, join = (
            re.search(pattern, (ROOT / "docs/start/three_machines.md").read_text(), re.MULTILINE)
            for pattern in (
                r"^python (start_trainer_client.py --invite) --config-path \S+$",
                r"^shoal (join) --num-servers 2$",
            )
        )
        assert start is not None, "the page says it otherwise"
        assert join is not None, "the page says it otherwise"
        client = hosts.run("desk", *start[1].split(), *ENDLESS, "--num-servers=2")
        found = until(lambda: re.search(r"^shoal1:\S+$", client.output, re.MULTILINE), START_S, "the text")
        assert "`shoal join` asks for this text" in client.output
        given = tmp_path / "given"
        given.write_text(found[0])
        boxes = [hosts.run(name, "-m", "shoal", join[1], f"--invitation={given}") for name in ("box1", "box2")]
        client.saw("client_0", "round.recorded", 2 * START_S, round=1)
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        assert [box.ends(END_S) for box in boxes] == [0, 0]
        written = [
            path for path in client.log_root.rglob("*") if path.is_file() and found[0].encode() in path.read_bytes()
        ]
        assert written == [], "it is on the screen alone"


@contextlib.contextmanager
def _started(hosts: Hosts, network: Lan, host: str, output: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command of shoal on a host, whose standard input is ours; end it, however the test ends."""
    environment = os.environ | {
        "HOME": str(hosts.home(host)),
        "XDG_CACHE_HOME": str(hosts.home(host) / "cache"),
        "XDG_RUNTIME_DIR": str(hosts.shared_path),
        "SHOAL_NETWORK__HOST_NAME": host,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*network.prefix(host), sys.executable, "-m", "shoal", *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


@needs_namespaces
def test_on_a_local_network_a_host_that_has_nothing_joins_by_a_code(tmp_path: Path) -> None:
    with lan("desk", "box") as network, hosts_of(tmp_path, network) as hosts:
        # As in the quick start of a system that does the same.
        _, _, start, *commands = (command.split()[1:] for command in quick_start("MacFleet"))
        invite, join, status = commands
        client = hosts.run("desk", *start, *ENDLESS, "--experiment-prefix=herd")
        invited(client)
        said, heard = tmp_path / "said", tmp_path / "heard"
        invite.append(f"--log-dir={client.log_root}")
        join.append(f"--log-dir={tmp_path / 'logs'}")
        with (
            _started(hosts, network, "desk", said, *invite) as offer,
            _started(hosts, network, "box", heard, *join) as box,
        ):
            found = until(lambda: re.search(r"^the code is  (\S+)$", said.read_text(), re.MULTILINE), START_S, "a code")
            assert box.stdin is not None
            box.stdin.write(f"{found[1]}\n".encode())
            box.stdin.flush()
            client.saw("client_0", "round.recorded", 2 * START_S, round=1)
            assert offer.wait(END_S) == 0, said.read_text()
            assert f"{network.address('box')} has the invitation" in said.read_text()
            with _started(hosts, network, "desk", said, *status, f"--log-dir={client.log_root}") as asked:
                assert asked.wait(END_S) == 0, said.read_text()
            assert "herd-" in said.read_text()
            client.interrupt()
            assert client.ends(END_S) == 130, client.output
            assert box.wait(END_S) == 0, heard.read_text()


@needs_namespaces
def test_on_a_local_network_a_host_that_has_the_key_needs_no_argument(tmp_path: Path) -> None:
    with lan("desk", "box") as network, hosts_of(tmp_path, network) as hosts:
        own_name = "--experiment-prefix=herd"
        client = hosts.run("desk", "start_trainer_client.py", *ENDLESS, "--num-servers=2", own_name)
        invited(client)
        hosts.give_key("desk", "box")
        box = hosts.run("box", "start_servers.py", "--num-servers=2")
        client.saw("client_0", "round.recorded", 2 * START_S, round=1)
        assert "looking for the swarm on this network" in box.output
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        assert box.ends(END_S) == 0, box.output
