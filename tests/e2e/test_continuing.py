"""The host of a run's client is gone for good; a client on another host goes on from what the servers hold."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosts import Hosts, hosts_of, invited
from tests.e2e.launched import END_S, SMALL, START_S, Launched, until
from tests.e2e.test_hosts import finished, last_hashes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_EXPIRY_S = 30.0


def _rounds(run: Launched) -> dict[int, dict[str, Any]]:
    """The records that a client's host has written, by round."""
    assert run.log_dir is not None
    found = [json.loads(path.read_text()) for path in (run.log_dir / "rounds").glob("round_*.json")]
    return {content["record"]["round"]: content for content in found if "record" in content}


def _check(summary: dict[str, Any], lost: Launched, successor: Launched) -> None:
    """Both hosts' records are one chain; nothing was used twice or left out."""
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    before, after = _rounds(lost), _rounds(successor)
    assert summary["first_round_seen"] in (max(before) + 1, max(before) + 2), "one record may have been on its way"
    chain = {**before, **after}
    assert sorted(chain) == list(range(1, summary["outer_rounds"] + 1))
    for round in range(2, summary["outer_rounds"] + 1):
        assert chain[round]["record"]["previous"] == chain[round - 1]["hash"]
    assert chain[max(chain)]["record"]["ballot"]["peer"] != chain[1]["record"]["ballot"]["peer"]
    num_used = sum(stop - start for each in chain.values() for _, start, stop in each["record"]["samples"])
    assert summary["samples_before"] + summary["samples"] == num_used


def _is_done(summary: dict[str, Any], num_rounds: int, servers: Launched) -> bool:
    """Whether the run has come to its end, which all servers hold."""
    held = {stage: [digest] for stage, digest in summary["hashes"].items()}
    return (summary["exit"], summary["outer_rounds"], last_hashes([servers])) == ("done", num_rounds, held)


def _address_of(servers: Launched) -> str:
    """Where a host of servers takes part in the DHT."""
    joined = until(lambda: servers.events("launcher", "dht.joined"), START_S, "a host in the DHT")
    return joined[0]["maddrs"][-1]


def _begin(hosts: Hosts, num_rounds: int) -> tuple[Launched, Launched]:
    client = hosts.run("client", "start_trainer_client.py", *SMALL, f"--diloco.outer-steps={num_rounds}")
    variable, command = invited(client)
    for host in ("servers", "other"):
        hosts.give_key("client", host)
    servers = hosts.run("servers", *command, environment=variable)
    client.saw("client_0", "round.recorded", round=2)
    return client, servers


def test_a_client_of_another_host_continues_a_run_whose_client_host_is_gone(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client, servers = _begin(hosts, 12)
        client.lose_host()
        peers = f"--initial-peers={_address_of(servers)}"
        successor = hosts.run("other", "start_trainer_client.py", peers, "--no-wandb")
        summary = finished(successor, [servers])
        assert _is_done(summary, 12, servers)
        _check(summary, client, successor)


def test_the_printed_line_continues_a_run_and_a_differing_flag_is_named(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client, servers = _begin(hosts, 10_000)
        differing = (f"--initial-peers={_address_of(servers)}", "--model.hidden-size=64")
        other = hosts.run("other", "start_trainer_client.py", *differing, start="differing")
        client.lose_host()
        assert other.ends(START_S) == 2, other.output
        assert "model.hidden_size = 64 (--model.hidden-size): the run has 48" in other.output

        def printed() -> list[str] | None:
            assert servers.process.poll() is None, servers.output
            line = re.search(r"^python (start_trainer_client\.py .*)$", servers.output, re.MULTILINE)
            return shlex.split(line[1]) if line else None

        command = until(printed, _EXPIRY_S + END_S, "the line that continues the run")
        assert "nor is its client connected: this host keeps its state" in servers.output
        successor = hosts.run("other", *command, "--no-wandb")
        taken = successor.saw("client_0", "run.taken_over")
        successor.saw("client_0", "round.recorded", round=taken["base_round"] + 3)
        successor.interrupt()
        assert successor.ends(END_S) == 130, successor.output
        assert servers.ends(END_S) == 0, servers.output
        assert "is announced again" in servers.output
        for each in (successor, servers):
            each.leaves_nothing()
        _check(successor.summary(), client, successor)


def test_a_client_that_waits_beside_another_takes_over_by_itself_and_the_next_one_ends_with_the_run(
    tmp_path: Path,
) -> None:
    with hosts_of(tmp_path) as hosts:
        client, servers = _begin(hosts, 10_000)
        hosts.give_key("client", "third")
        peers = f"--initial-peers={_address_of(servers)}"
        second = hosts.run("other", "start_trainer_client.py", peers, "--no-wandb")
        second.saw("client_0", "client.waits")
        until(lambda: "this one waits, and goes on if it is lost" in second.output, START_S, "the line that says so")
        third = hosts.run("third", "start_trainer_client.py", peers, "--no-wandb")
        until(lambda: len(third.events("client_0", "client.waits")) == 2, START_S, "the third client, behind two")
        assert not second.events("client_0", "run.taken_over")
        client.lose_host()
        taken = second.saw("client_0", "run.taken_over")
        second.saw("client_0", "round.recorded", round=taken["base_round"] + 3)
        second.interrupt()
        assert second.ends(END_S) == 130, second.output
        for each in (servers, third):
            assert each.ends(END_S) == 0, each.output
            assert "has ended (interrupted at its client)" in each.output
            each.leaves_nothing()
        second.leaves_nothing()
        assert not third.events("client_0", "run.taken_over")
        _check(second.summary(), client, second)
