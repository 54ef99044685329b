"""`shoal doctor` on a host of a real swarm, in network namespaces: what is planted in the network between is found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
from tests.e2e.hosts import Hosts, hosts_of, invited
from tests.e2e.launched import END_S, ENDLESS, START_S
from tests.e2e.namespaces import lan
from tests.e2e.needs import needs_namespaces
from tests.integration import patient_doctor

from shoal.cli.doctor.diagnosis import CheckResult, Condition, Diagnosis

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs_namespaces]
HEALTHY_RUNS = 3


def _examined(hosts: Hosts, start: str, peers: str, *, answer_s: float = patient_doctor.LONG_S) -> Diagnosis:
    """Have the host examined, with time for everything but answers.

    Args:
        answer_s: for each answer of a peer.
    """
    flags = ("--experiment-prefix=sandbox", "--num-servers=1", f"--initial-peers={peers}")
    run = hosts.run("other", patient_doctor.__file__, "0", str(answer_s), *flags, start=start)
    assert run.ends(2 * patient_doctor.LONG_S) == 0, run.output
    run.leaves_nothing()
    return msgspec.json.decode(run.output.splitlines()[-1], type=Diagnosis)


def _findings(found: Diagnosis) -> list[CheckResult]:
    """Return them, but for those about other runs of this user: other tests have theirs on the same machine."""
    return [each for each in found.findings if each.name != "host.runs"]


def _check(found: Diagnosis, name: str) -> CheckResult:
    [result] = [each for each in found.checks if each.name == name]
    return result


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True)


def test_what_is_wrong_between_two_hosts_is_found_and_a_host_with_nothing_wrong_has_no_finding(tmp_path: Path) -> None:
    with lan("client", "other") as network, hosts_of(tmp_path, network) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *ENDLESS)
        variable, command = invited(client)
        there = variable["INITIAL_PEERS"]
        found = _examined(hosts, "keyless", there)
        assert [each.name for each in _findings(found)] == ["key.file"]
        hosts.give_key("client", "other")
        for number in range(HEALTHY_RUNS):
            found = _examined(hosts, f"healthy-{number}", there)
            assert _findings(found) == [], found
            told = {each.name for each in found.of(Condition.OK)}
            assert {"swarm.run", "swarm.client", "swarm.large_frames", "swarm.clock", "host.memory"} <= told

        network.set_way("other", "client", is_open=False)
        found = _examined(hosts, "silent", there, answer_s=1.0)
        assert [each.name for each in _findings(found)] == ["swarm.peers"]
        assert "10.77.0.1 port 50000: no answer: the host is off, or a firewall" in _findings(found)[0].evidence
        assert "open TCP port 50000 there" in _findings(found)[0].remedy
        network.set_way("other", "client", is_open=True)

        # Full packets are lost on their way to the client's host, without a word.
        eth0 = ("-n", network.namespace("other"), "link", "set", "eth0")
        port = ("-n", network.namespace("switch"), "link", "set", f"port{network.hosts.index('client')}")
        _ip(*eth0, "gso_max_segs", "1")
        _ip(*port, "mtu", "1280")
        result = _check(_examined(hosts, "stalls", there, answer_s=8.0), "swarm.large_frames")
        assert result.verdict is Condition.WARNING, result
        assert "ip link set dev <interface> mtu 1280" in result.remedy
        _ip(*eth0, "mtu", "1280")
        result = _check(_examined(hosts, "well again", there), "swarm.large_frames")
        assert result.verdict is Condition.OK, result

        # A join that fails says why, and below it what the doctor finds.
        refused = {"INITIAL_PEERS": there.replace("/tcp/50000/", "/tcp/50999/")}
        servers = hosts.run("other", *command, "--public-ip=10.77.0.99", environment=refused, start="refused")
        assert servers.ends(START_S) == 2, servers.output
        parts = (
            "error: the swarm cannot be joined",
            "shoal doctor finds on this host",
            "swarm.peers",
            "host.addresses",
        )
        assert [part for part in parts if part not in servers.output] == [], servers.output
        assert servers.output.index(parts[0]) < servers.output.index(parts[1])
        assert "10.77.0.99 is a private address, and none of this host" in servers.output
        servers.leaves_nothing()
        client.interrupt()
        client.ends(END_S)
        client.leaves_nothing()
