"""Whoever has only the folder of a run reads in `shoal events` what broke, whose it was, when, and what it cost.

A reader knows nothing of the faults: each is told from the printed lines alone, and then compared with what was done.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from tests.e2e.hosts import Hosts, hosts_of, invited, two_server_hosts
from tests.e2e.launched import END_S, ENDLESS, ROOT, START_S, Launched, launched, until
from tests.e2e.namespaces import lan
from tests.e2e.needs import needs_namespaces
from tests.e2e.test_continuing import _address_of
from tests.e2e.test_faults import summed_up

from shoal_lab.told import require_told, told_incidents

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

_RUN = (*ENDLESS, "--host-name=box1", "--diloco.inner-steps=8")
_OPENED = re.compile(r"(?P<at>\d\d:\d\d:\d\d)  incident\.opened +WARNING (?P<what>.+)")
_CLOSED = re.compile(
    r"(?P<at>\d\d:\d\d:\d\d)  incident\.closed +"
    r"(?P<who>(?:server \d|trainer \d|data server|client)@\w+|the client) "
    r"(?P<kind>had ended|was frozen|was cut off|has left|was lost, and this client goes on in its place): "
    r"(?:noticed at once|noticed after (?P<noticed_s>[\d.]+) s), "
    r"(?:no trainer was hit|training went on after (?P<pause_s>[\d.]+) s)"
    r"(?:, (?:(?:back|gone) after (?P<away_s>[\d.]+) s(?: as a new process)?|not back when the run ended))?; "
    r"(?P<cost>no step lost|\d+ steps? of stage \d lost)(?:, (?P<again>\d+) begun again)?"
)
_TROUBLE = re.compile(
    r"\d\d:\d\d:\d\d  incident\.closed +(?P<who>server \d@\w+|two sides of the swarm) "
    r"(?P<kind>was out of memory|had gone on apart): over after [\d.]+ s"
)
# A host whose wall clock is wrong, as its programs see it.
_WRONG_CLOCK = """
import time
real_s = time.time
time.time = lambda: real_s() - 45.0
"""


@dataclass(frozen=True)
class Read:
    """What a reader makes of one incident."""

    who: str
    kind: str
    at: str
    noticed_s: float
    away_s: float | None
    cost: str


def _printed_events(folder: Path) -> list[str]:
    command = [sys.executable, "-m", "shoal", "events", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.splitlines()


def read_events(folder: Path) -> tuple[list[str], list[Read]]:
    """Return what `shoal events` says at the beginning of each incident, and at its end."""
    printed = _printed_events(folder)
    opened = [found["what"] for line in printed if (found := _OPENED.fullmatch(line))]
    lines = [line for line in printed if "incident.closed" in line]
    closed: list[Read] = []
    for line in lines:
        found = _CLOSED.fullmatch(line)
        assert found is not None, line
        noticed_s, away_s = float(found["noticed_s"] or 0.0), found["away_s"]
        at, away_s = found["at"], None if away_s is None else float(away_s)
        closed.append(Read(found["who"], found["kind"], at, noticed_s, away_s, found["cost"]))
    return opened, closed


def read_trouble(folder: Path) -> list[tuple[str, str]]:
    """Return who had what, of each trouble that is told as over, by which nobody is lost."""
    return [(found["who"], found["kind"]) for found in map(_TROUBLE.fullmatch, _printed_events(folder)) if found]


def until_closed(run: Launched, number: int) -> None:
    """Wait until an incident of a run that goes on is told as over."""

    def is_closed() -> bool:
        run.require_running()
        events = told_incidents(run.require_log_dir()).get(number, ())
        return any(event["event"] == "incident.closed" for event in events)

    until(is_closed, START_S, f"the end of incident {number}")


def test_a_reader_of_the_folder_alone_names_kind_victim_time_and_cost_of_each_fault(tmp_path: Path) -> None:
    wanted: list[tuple[str, str]] = []
    done_at: list[str] = []
    with launched(tmp_path, *_RUN) as run:
        run.saw("client_0", "round.recorded", round=1)
        for role, who, kind in (
            ("server:1", "server 1@box1", "had ended"),
            ("server:0", "server 0@box1", "was frozen"),
            ("trainer:1", "trainer 1@box1", "had ended"),
            ("data_server:0", "data server@box1", "had ended"),
            ("client:0", "client@box1", "had ended"),
        ):
            pid = run.pid_of(role)
            os.kill(pid, signal.SIGSTOP if kind == "was frozen" else signal.SIGKILL)
            wanted.append((who, kind))
            done_at.append(f"{datetime.now(UTC):%H:%M:%S}")
            if kind == "was frozen":
                until(lambda: "so it is frozen or cut off" in run.output, END_S, "the notice of the freeze")
                os.kill(pid, signal.SIGCONT)
                until(lambda: "server 0@box1 has caught up" in run.output, START_S, "the notice of its return")
            until_closed(run, len(wanted))
        run.interrupt()
        assert run.ends(END_S) == 130, run.output
        summary = summed_up(run)
        folder = run.require_log_dir()
    opened, closed = read_events(folder)
    assert [(each.who, each.kind) for each in closed] == wanted
    assert len(opened) == len(wanted)
    assert [what.startswith(who) for what, (who, _) in zip(opened, wanted, strict=True)] == [True] * len(wanted)
    assert [each.at >= at for each, at in zip(closed, done_at, strict=True)] == [True] * len(wanted)
    assert closed[1].noticed_s >= 2.0
    # Whoever watches the terminal has read it as well, and over whom its work goes on.
    assert re.search(
        r"^\d\d:\d\d:\d\dZ  server 0@box1 \(stage \d\) has said nothing for "
        r".*\(since \d\d:\d\d:\d\dZ\), so it is frozen .*; its work goes on over server \d@box1$",
        run.output,
        re.MULTILINE,
    ), run.output
    assert all(each.away_s is not None and each.away_s >= 0 for each in closed)
    lost = sum(int(each.cost.split()[0]) for each in closed if each.cost != "no step lost")
    assert lost + summary["steps_lost_otherwise"] == sum(summary["steps_lost"].values())
    require_told(folder, summary)


def test_a_server_that_leaves_is_no_loss_and_a_client_whose_host_is_gone_is_replaced_and_both_are_told(
    tmp_path: Path,
) -> None:
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("first", "start_trainer_client.py", *ENDLESS, "--num-servers=4")
        variable, command = invited(client)
        for host in ("servers", "more", "second"):
            hosts.give_key("first", host)
        servers = hosts.run("servers", *command, environment=variable)
        addresses = client.log_root / "sandbox" / "initial_peers.txt"
        more = hosts.run("more", *command, f"--network-initial-peers=@{addresses}")
        client.saw("client_0", "round.recorded", 2 * START_S, round=2)
        second = _waiting(hosts, servers)
        more.interrupt()
        assert more.ends(END_S) == 130, more.output
        for number in (1, 2):
            until_closed(client, number)
        opened, closed = read_events(client.require_log_dir())
        assert sum("leaves: its user wants it to" in what for what in opened) == 2
        assert ("server 0@more", "has left") in [(each.who, each.kind) for each in closed]
        client.lose_host()
        until_closed(second, 1)
        second.interrupt()
        assert second.ends(END_S) == 130, second.output
        folder = second.require_log_dir()
    opened, closed = read_events(folder)
    assert [(each.who, each.kind) for each in closed[:1]] == [
        ("client@first", "was lost, and this client goes on in its place")
    ]
    assert "client@first cannot be reached any more" in opened[0]


def _waiting(hosts: Hosts, servers: Launched, host: str = "second") -> Launched:
    """A client of another host that goes on when the first one is lost."""
    peers = f"--initial-peers={_address_of(servers)}"
    second = hosts.run(host, "start_trainer_client.py", peers, "--no-wandb")
    second.saw("client_0", "client.waits")
    return second


@needs_namespaces
def test_a_host_whose_cable_was_out_was_cut_off_and_not_frozen(tmp_path: Path) -> None:
    with two_server_hosts(tmp_path, (*ENDLESS, "--log-level=debug", "--diloco.inner-steps=8"), 2) as (swarm, network):
        client = swarm.client
        network.set_link("left", up=False)
        until(lambda: client.output.count("so it is frozen or cut off") == 2, END_S, "the notice of the cut")
        # The others train on, and nobody takes his own p2pd for dead because others cannot be reached.
        reached = client.events("client_0", "round.recorded")[-1]["round"]
        client.saw("client_0", "round.recorded", round=reached + 10)
        network.set_link("left", up=True)
        for number in (1, 2):
            until_closed(client, number)
        logs = [path for host in swarm.hosts for path in host.require_log_dir().glob("*.log")]
        assert [path.name for path in logs if '"dht.deaf"' in path.read_text()] == []
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        _, closed = read_events(client.require_log_dir())
        require_told(client.require_log_dir(), client.summary())
    assert sorted((each.who, each.kind) for each in closed) == [
        ("server 0@left", "was cut off"),
        ("server 1@left", "was cut off"),
    ]


def test_a_host_of_another_time_is_told_so_at_once_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "sitecustomize.py").write_text(_WRONG_CLOCK)
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *ENDLESS, "--num-servers=2")
        variable, command = invited(client)
        for host in ("right", "wrong"):
            hosts.give_key("client", host)
        hosts.run("right", *command, environment=variable)
        client.saw("client_0", "round.recorded", 2 * START_S, round=1)
        # A busy host finds a run late, and this one finds it before it looks at clocks.
        command.append("--network.bootstrap-timeout-s=120")
        wrong = hosts.run("wrong", *command, environment={**variable, "PYTHONPATH": str(tmp_path / "wrong")})
        assert wrong.ends(START_S) == 2, wrong.output
        assert "the clock there is about 45 s ahead of this host's" in wrong.output
        assert "timedatectl set-ntp true" in wrong.output
        client.saw("client_0", "round.recorded", round=client.events("client_0", "round.recorded")[-1]["round"] + 2)
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
    assert told_incidents(client.require_log_dir()) == {}


@needs_namespaces
def test_two_sides_that_have_trained_apart_are_told_when_they_meet(tmp_path: Path) -> None:
    with lan("here", "there") as network, hosts_of(tmp_path, network) as hosts:
        first = hosts.run("here", "start_trainer_client.py", *ENDLESS, "--num-servers=4")
        variable, command = invited(first)
        hosts.give_key("here", "there")
        servers = [hosts.run(host, *command, environment=variable, start="servers") for host in ("here", "there")]
        first.saw("client_0", "round.recorded", 2 * START_S, round=1)
        second = _waiting(hosts, servers[1], "there")
        network.set_link("there", up=False)
        taken = second.saw("client_0", "run.taken_over", 2 * START_S)
        second.saw("client_0", "round.recorded", START_S, round=taken["base_round"] + 2)
        network.set_link("there", up=True)

        def found() -> list[Launched]:
            told = ("two sides of the swarm", "had gone on apart")
            return [run for run in (first, second) if told in read_trouble(run.require_log_dir())]

        # The client of one side ends by itself then: the other one has taken the run over.
        until(found, 2 * START_S, "one chain again, told")
