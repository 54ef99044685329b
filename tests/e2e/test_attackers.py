"""A real swarm under attack trains to a good end and names the attack; and none of its secrets is seen from outside."""

from __future__ import annotations

import base64
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import anyio
import pytest
from tests.audited.sitecustomize import FILE_VARIABLE
from tests.e2e.launched import END_S, SMALL, START_S, Launched, until
from tests.e2e.test_hosts import Hosts, hosts_of, invited

from shoal.clock import Deadline, SystemClock
from shoal.control.dht import DhtNode
from shoal.control.keyed_protocol import Members
from shoal.control.records import VerifiedRecord, _mac_key
from shoal.errors import BootstrapError, RunFailed
from shoal.identity import Identity, namespace
from shoal.log import JsonFormatter
from shoal.transport.tls import _authority_key

pytestmark = pytest.mark.timeout(600)

LISTENING = "0A"
REFUSED = ("tls", "swarm_key", "run", "version")
AUDITED = Path(__file__).parents[1] / "audited"
COUNTED = b"counters/transport.accepted"
"""In a W&B run to which the client has told its counters."""
TOPICS = ("monitor", "mirror", "run", "client", "stage.0", "stage.1")
ROLES = ("monitor_0", "client_0", "data_server_0")


def _listening(runs: Iterable[Launched]) -> list[int]:
    """Return the TCP ports on which processes of these runs listen, p2pd among them."""
    ports: dict[str, int] = {}
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTENING:
                ports[f"socket:[{columns[9]}]"] = int(columns[1].rpartition(":")[2], 16)
    found: set[int] = set()
    for pid in [pid for run in runs for pid in run.processes()]:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                found |= {ports[target] for target in (os.readlink(path),) if target in ports}
            except OSError:
                continue
    return sorted(found)


def _training(
    hosts: Hosts, *flags: str, environment: Mapping[str, str] | None = None
) -> tuple[Launched, Launched, dict[str, str]]:
    """Start a host of a client and a host of two servers, as users do; return them when a round has been recorded."""
    client = hosts.run("client", "start_trainer_client.py", *SMALL, *flags, environment=environment, cold=True)
    variable, command = invited(client)
    hosts.give_key("client", "servers")
    servers = hosts.run("servers", *command, environment={**variable, **(environment or {})}, cold=True)
    client.saw("client_0", "round.recorded", within_s=90.0, round=1)
    return client, servers, variable


async def _stored(swarm_key: bytes, initial_peers: Sequence[str], state_dir: Path) -> dict[str, bytes]:
    """Return the records of the DHT as they are stored there, by a name for each, when there are some of each topic.

    One node looks again and again: each that has come and gone would be one more that others ask, and wait for.

    Raises:
        RunFailed: there are not, in time.
    """
    found: dict[str, bytes] = {}
    deadline = Deadline.after(SystemClock(), START_S)
    async with await _node(swarm_key, initial_peers, state_dir, deadline) as node:
        accept = node.checker.accept

        def seen(topic: str, subkey: str, value: bytes) -> VerifiedRecord | None:
            found[f"record {topic} of {subkey}"] = value
            return accept(topic, subkey, value)

        node.checker.accept = seen
        while missing := set(TOPICS) - {name.split()[1] for name in found}:
            if deadline.expired():
                raise RunFailed(f"no record of {', '.join(sorted(missing))} within {START_S} s; there is {list(found)}")
            await node.get(missing)
    return found


async def _node(swarm_key: bytes, initial_peers: Sequence[str], state_dir: Path, deadline: Deadline) -> DhtNode:
    """Return a node of the swarm's DHT."""
    while True:
        try:
            return await DhtNode.create(
                Identity.generate(),
                namespace=namespace(swarm_key, "sandbox"),
                state_dir=state_dir,
                clock=SystemClock(),
                initial_peers=initial_peers,
            )
        except BootstrapError:  # a busy machine answers p2pd, which waits for seconds only, too late
            if deadline.expired():
                raise


@pytest.mark.slow
def test_a_swarm_that_is_attacked_at_every_port_trains_to_the_end_and_names_it(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        audit = {FILE_VARIABLE: str(tmp_path / "audit.txt"), "PYTHONPATH": os.pathsep.join([str(AUDITED), *sys.path])}
        flags = ("--num-servers=2", "--diloco.outer-steps=10000")
        client, servers, variable = _training(hosts, *flags, environment=audit)
        roles = {client.pid_of(role) for role in ("client:0", "monitor:0", "data_server:0", "trainer:0")}
        roles |= {servers.pid_of(f"server:{index}") for index in (0, 1)}
        ports = _listening([client, servers])
        assert len(ports) >= 5, "data ports of the client and two servers, and a p2pd for each host"
        aims = {
            "ports": ports,
            "initial_peers": variable["INITIAL_PEERS"].split(","),
            "swarm_key": hosts.key("client").hex(),
            "prefix": "sandbox",
            "state_dir": str(tmp_path),
        }
        attacker = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("attacker.py")), json.dumps(aims)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert attacker.stdout is not None
            assert select.select([attacker.stdout], [], [], START_S)[0], "some attacks of each kind"
            assert attacker.stdout.readline() == "enough\n"
            # It trains on meanwhile.
            reached = client.events("client_0", "round.recorded")[-1]["round"]
            client.saw("client_0", "round.recorded", round=reached + 2)
            for index in (0, 1):
                servers.saw(f"server_{index}", "round.swapped", round=reached + 2)
            attacker.communicate("", timeout=END_S)
            client.interrupt()
            assert client.ends(END_S) == 130, client.output
            assert servers.ends(END_S) == 0, servers.output
            for host in (client, servers):
                host.leaves_nothing()
            summary = client.summary()
        finally:
            attacker.kill()
            attacker.communicate()
    assert (summary["exit"], summary["replicas"]) == ("interrupted", 2)
    audited = (tmp_path / "audit.txt").read_text().splitlines()
    assert {f"watched {pid}" for pid in roles} <= set(audited)
    assert [line for line in audited if not line.startswith("watched ")] == []
    assert summary["outer_rounds"] >= reached + 2
    assert (summary["duplicates"], summary["missing"], summary["failovers"]) == (0, 0, [])
    recorded = {event["round"]: event["hashes"] for event in client.events("client_0", "round.recorded")}
    for index in (0, 1):
        [ready] = servers.events(f"server_{index}", "server.ready")
        # A last one may have been committed when the client was interrupted, and not be written down.
        swaps = servers.events(f"server_{index}", "round.swapped")
        swapped = [event for event in swaps if event["round"] in recorded][-1]
        assert swapped["round"] >= reached + 2
        assert swapped["parameters"] == recorded[swapped["round"]][str(ready["stage"])]
    counters = summary["counters"]
    for offence in REFUSED:
        assert counters[f"transport.refused{{offence={offence}}}"] > 0, counters
    for reason in ("wrong_signer", "bad_mac", "oversized"):
        assert counters[f"records.dropped{{reason={reason}}}"] > 0, counters
    for host, process in ((client, "client_0"), (servers, "server_0"), (servers, "server_1")):
        lines = host.events(process, "transport.refused")
        assert {line["offence"] for line in lines} & set(REFUSED)
        assert all(line["source"] == "127.0.0.1" and line["reason"] for line in lines)
        [last] = host.events(process, "role.counters")
        refused = sum(count for name, count in last["counters"].items() if name.startswith("transport.refused"))
        assert refused >= len(lines) + sum(line.get("left_out", 0) for line in lines)
    # To which DHT nodes a stranger's record is offered is the DHT's choice.
    nodes = ((client, "monitor_0"), (client, "client_0"), (servers, "server_0"), (servers, "server_1"))
    assert any(host.events(process, "record.rejected") for host, process in nodes)
    for process in ROLES:
        assert client.events(process, "role.counters"), process


@pytest.mark.slow
def test_no_secret_is_in_an_argument_the_environment_a_record_a_log_or_the_output(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client, servers, variable = _training(hosts, "--num-servers=2", "--diloco.outer-steps=10000", "--wandb")
        keys = [path for host in ("client", "servers") for path in hosts.home(host).rglob("*.key")]
        assert {"swarm.key", "client_0.key", "server_0.key", "monitor_0.key"} <= {path.name for path in keys}
        secrets = [form for path in keys for form in _forms(path.read_bytes())]
        key = hosts.key("client")
        secrets += _forms(_authority_key(key).private_bytes_raw())
        swarm = namespace(key, "sandbox")
        secrets += [swarm.encode(), *_forms(_mac_key(swarm)), *_forms(Members(swarm)._key)]
        pids = client.processes() | servers.processes()
        assert len(pids) >= 12

        seen = anyio.run(_stored, key, variable["INITIAL_PEERS"].split(","), tmp_path)
        for pid in pids:
            for name in ("cmdline", "environ"):
                try:
                    seen[f"/proc/{pid}/{name}"] = Path(f"/proc/{pid}/{name}").read_bytes()
                except OSError:
                    continue
        assert any(b"p2pd" in content for content in seen.values())
        until(
            lambda: any(COUNTED in each.read_bytes() for each in client.directory.rglob("*.wandb")), END_S, "counters"
        )
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        assert servers.ends(END_S) == 0, servers.output
        for run in (client, servers):
            seen |= {str(path): path.read_bytes() for path in run.directory.rglob("*") if path.is_file()}
    names = " ".join(seen)
    assert "client_0.log" in names
    assert "server_1.log" in names
    assert ".wandb" in names
    assert "config.yaml" in names
    assert any(COUNTED in seen[where] for where in seen if where.endswith(".wandb"))
    for where, content in seen.items():
        for secret in secrets:
            assert secret not in content, where


def _forms(key: bytes) -> list[bytes]:
    """Return a key as it could appear: raw, in hex, in base64, as Python shows it; the seed of an identity as well."""
    parts = {key, key[-64:-32]} if len(key) == 68 else {key}
    forms: list[bytes] = []
    for part in parts:
        python = repr(part)[2:-1]
        shown = [part.hex(), part.hex().upper(), base64.b64encode(part).decode().rstrip("="), python]
        # In a line of JSON its backslashes and quotes are written twice.
        shown.append(json.dumps(python)[1:-1])
        forms += [part, *(form.encode() for form in shown)]
    return forms


def test_a_key_in_a_line_of_a_log_would_be_noticed() -> None:
    key = bytes(range(96, 128)) + os.urandom(32)
    for field in (key, key.hex(), base64.b64encode(key).decode(), f"key {key!r}"):
        record = logging.makeLogRecord({"msg": "oops", "key": field, "args": ()})
        line = JsonFormatter("server_0").format(record).encode()
        assert any(form in line for form in _forms(key)), line
