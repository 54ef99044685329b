"""What users of hosts that join are told: why they cannot, who cannot be dialled, and how the run is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from tests.e2e.hosts import Hosts, hosts_of, invited
from tests.e2e.launched import END_S, ENDLESS, FEW, START_S, Launched, until
from tests.e2e.namespaces import lan
from tests.e2e.needs import needs_namespaces

from shoal.control.swarm_status import SwarmStatus

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), needs_namespaces]


def test_a_join_that_cannot_succeed_says_why_and_what_to_do(tmp_path: Path) -> None:
    with lan("client", "other") as network, hosts_of(tmp_path, network) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *ENDLESS)
        variable, command = invited(client)
        hosts.give_key("client", "other")
        there = variable["INITIAL_PEERS"]
        peer = there.rpartition("/p2p/")[2]
        refused = there.replace("/tcp/50000/", "/tcp/50999/")
        nobody = f"/ip4/10.77.0.99/tcp/50000/p2p/{peer}"
        elsewhere = f"/ip4/192.168.200.1/tcp/50000/p2p/{peer}"
        unnamed = f"/dns4/no-such-host.invalid/tcp/50000/p2p/{peer}"
        stranger = there.replace(peer, "12D3KooWC1W43CCBCGosZwVWRPF4MTcvTk3tDstTqDMDQMpn8ytY")
        other_key = hosts.directory / "other.key"
        other_key.write_bytes(bytes(32))
        other_key.chmod(0o600)

        def join(start: str, peers: Sequence[str], *flags: str) -> Launched:
            # Nobody waits so long: the last attempts below would still be at it when the test is over.
            patient = "--network.bootstrap-timeout-s=10000"
            joined = {"INITIAL_PEERS": ",".join(peers)}
            return hosts.run("other", *command, patient, *flags, environment=joined, start=start)

        everything = join("all", (refused, nobody, elsewhere, unnamed, stranger))
        prefix = join("prefix", (there,), "--experiment-prefix=elsewhere")
        key = join("key", (there,), f"--swarm-key-file={other_key}")
        for run in (everything, prefix, key):
            assert run.ends(START_S) == 2, run.output
            assert "role.exited" not in run.output
            assert "servers.failed" not in run.output
            # A word alone with a full stop in it is the name of an event, which is for the logs.
            assert not re.search(r"^[a-z_]+\.[a-z_.]+$", run.output, re.MULTILINE), run.output
        for part in (
            f"{refused}\n                10.77.0.1 port 50999: refused",
            f"{nobody}\n                10.77.0.99 port 50000: no way leads there",
            f"{elsewhere}\n                192.168.200.1 port 50000: no way leads there",
            f"{unnamed}\n                the name no-such-host.invalid is not known on this host",
            f"{stranger}\n                10.77.0.1 port 50000: another peer is there, {peer}",
        ):
            assert part in everything.output, everything.output
        assert "joined; looking for the run" in prefix.output
        assert "join it with --experiment-prefix sandbox" in prefix.output
        assert "has another swarm key than this host, whose fingerprint is" in key.output
        # One that answers is enough.
        good = join("good", (refused, there))
        until(lambda: "server 0@other serves stage" in good.output, 2 * START_S, "a server")
        steps = [
            good.output.index(step) for step in ("the swarm answers", "joined; looking", "run sandbox-", "starting 2")
        ]
        assert steps == sorted(steps)
        for run in (client, good):
            run.interrupt()
        for run in (client, good):
            run.ends(END_S)
            run.leaves_nothing()


def test_a_server_that_nobody_can_dial_is_named_on_both_terminals_and_found_again_when_it_can(tmp_path: Path) -> None:
    with lan("client", "servers") as network, hosts_of(tmp_path, network) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *ENDLESS)
        variable, command = invited(client)
        hosts.give_key("client", "servers")
        nobody = "10.77.0.99"
        servers = hosts.run("servers", *command, f"--public-ip={nobody}", environment=variable)
        for run, said in (
            (servers, "server 0@servers cannot be dialled from the client's host"),
            (servers, "server 1@servers cannot be dialled from the client's host"),
            (client, "server 0@servers cannot be dialled from this host, so nobody trains over it: 10.77.0.99:"),
            (client, "server 1@servers cannot be dialled from this host, so nobody trains over it: 10.77.0.99:"),
        ):
            until(lambda run=run, said=said: said in run.output, START_S, said)
        for run in (client, servers):
            assert f"{nobody}:" in run.output
            assert "no way leads there" in run.output
            assert "--public-ip" in run.output
        said = _status(hosts, "servers", "undialled", variable)
        assert {replica.state for stage in said.stages for replica in stage.replicas} <= {"undialled", "joining"}
        assert said.client is not None
        assert said.client.answers
        # Its user gives the host the address that it names.
        network.add_address("servers", nobody)
        until(
            lambda: "server 0@servers can be dialled from the client's host now" in servers.output,
            START_S,
            "the good news",
        )
        client.saw("client_0", "round.recorded", round=1)
        assert "server 0@servers can be dialled from this host now" in client.output
        listed = servers.require_log_dir() / "initial_peers.txt"
        said = until(lambda: _with_numbers(hosts, listed), START_S, "what each server measures")
        assert said.state.startswith("training round ")
        assert (said.round or 0) >= 1
        assert (said.loss or 0.0) > 0.0
        assert said.trainers
        assert [(stage.stage, replica.state, replica.host) for stage in said.stages for replica in stage.replicas] == [
            (stage, "serving", nobody) for stage in (0, 1)
        ]
        names = {replica.name for stage in said.stages for replica in stage.replicas}
        assert names == {"server 0@servers", "server 1@servers"}
        assert said.client.name == "client@client"
        assert [mirror.name for mirror in said.mirrors] == ["mirror@client"]
        told = [line for line in client.events("client_0", "server.undialled") if line["who"] in names]
        assert {line["who"] for line in told} == names
        client.lose_host()
        until(lambda: "nobody announces run " in servers.output, START_S, "the loss of the client")
        others = ",".join(maddr for maddr in listed.read_text().split() if network.address("servers") in maddr)
        # What the client has said last may still stand with a node of the DHT for a moment.
        said = until(lambda: _without_client(hosts, others), START_S, "a registry that names no client")
        assert said.state.startswith("no client; 2 servers hold round ")
        assert (said.client, said.round) == (None, None)
        servers.interrupt()
        assert servers.ends(END_S) == 130, servers.output
        servers.leaves_nothing()


def test_a_client_s_host_that_gets_another_address_says_so_and_its_new_lines_lead_there(tmp_path: Path) -> None:
    with lan("client", "servers") as network, hosts_of(tmp_path, network) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *FEW)
        invited(client)
        elsewhere = "10.77.0.77"
        network.move("client", elsewhere)
        moved = client.saw("launcher", "swarm.moved")
        assert {maddr.split("/")[2] for maddr in moved["initial_peers"]} == {elsewhere}

        def printed() -> tuple[dict[str, str], list[str]] | None:
            variable, command = invited(client)
            return (variable, command) if f"/{elsewhere}/" in variable["INITIAL_PEERS"] else None

        variable, command = until(printed, START_S, "the lines that lead there")
        assert f"/{network.address('client')}/" not in variable["INITIAL_PEERS"]
        assert "other hosts find this one at other addresses now" in client.output
        hosts.give_key("client", "servers")
        servers = hosts.run("servers", *command, environment=variable)
        client.saw("client_0", "round.recorded", round=1)
        for run in (client, servers):
            run.interrupt()
        for run in (client, servers):
            assert run.ends(END_S) in (0, 130), run.output
            run.leaves_nothing()


def _with_numbers(hosts: Hosts, listed: Path) -> SwarmStatus | None:
    """Return how the run is, if each server has said what it measures since it has trained."""
    said = _status(hosts, "servers", "training", {}, f"--initial-peers=@{listed}")
    servers = [server for stage in said.stages for server in stage.replicas]
    for server in servers:
        if None in (server.age_s, server.samples_per_s, server.busy, server.step_s):
            return None
        for total in (server.steps, server.sent_bytes, server.received_bytes, server.memory_bytes):
            if not total:
                return None
    return said


def _without_client(hosts: Hosts, peers: str) -> SwarmStatus | None:
    said = _status(hosts, "servers", "orphaned", {"INITIAL_PEERS": peers})
    return said if said.client is None else None


def _status(hosts: Hosts, host: str, start: str, variable: dict[str, str], *flags: str) -> SwarmStatus:
    """Ask how the run is, on a host, and return the answer."""
    run = hosts.run(host, "-m", "shoal", "status", "--json", *flags, environment=variable, start=start)
    assert run.ends(START_S) == 0, run.output
    run.leaves_nothing()
    return msgspec.json.decode(run.output.splitlines()[-1], type=SwarmStatus)
