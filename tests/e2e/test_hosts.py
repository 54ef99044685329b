"""A run over several hosts: the two commands of a user, between network namespaces and on one machine."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tests.e2e import ending_rows
from tests.e2e.hosts import Hosts, hosts_of, invited
from tests.e2e.launched import END_S, ENDLESS, SMALL, START_S, Launched, until
from tests.e2e.namespaces import lan
from tests.e2e.needs import needs_namespaces

from shoal.config import load_config

pytestmark = pytest.mark.timeout(600)

_HIDDEN, _SEQ_LEN, _STEPS, _ROUNDS = 96, 128, 4, 2
_WIDE = (
    "--no-wandb",
    f"--model.hidden-size={_HIDDEN}",
    f"--data.seq-len={_SEQ_LEN}",
    "--data.holdout-fraction=0.005",
    f"--diloco.inner-steps={_STEPS}",
    f"--diloco.outer-steps={_ROUNDS}",
    "--diloco.batch-size-per-step=16",
)
_OVERHEAD_BYTES = 1_200_000
"""DHT, heartbeats, handshakes and messages without tensors, on one link in a run of a few seconds."""


def finished(client: Launched, servers: Sequence[Launched]) -> dict[str, Any]:
    """Wait for the run's good end on all hosts; return its summary."""
    assert client.ends(120.0) == 0, "\n".join([client.output, *(each.output for each in servers)])
    for each in servers:
        assert each.ends(END_S) == 0, each.output
        assert "has ended" in each.output
    for each in (client, *servers):
        each.leaves_nothing()
    return client.summary()


def last_hashes(servers: Sequence[Launched]) -> dict[str, list[str]]:
    """Return, for each stage, the hash that each replica has reported last."""
    found: dict[str, list[str]] = {}
    for host in servers:
        assert host.log_dir is not None
        for log in host.log_dir.glob("server_*.log"):
            placed = [*host.events(log.stem, "server.ready"), *host.events(log.stem, "server.moved")]
            swapped = host.events(log.stem, "round.swapped")[-1]
            found.setdefault(str(placed[-1]["stage"]), []).append(swapped["parameters"])
    return found


def test_two_hosts_on_one_machine_train_with_the_printed_lines(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *SMALL, "--num-servers=4", "--model-pipeline.cut=1,3")
        variable, command = invited(client)
        hosts.give_key("client", "servers")
        first = hosts.run("servers", *command, environment=variable)
        hosts.give_key("client", "nas")
        mirror = hosts.run("nas", "-m", "shoal", "mirror", environment=variable)
        until(lambda: "mirror@nas follows run" in mirror.output, START_S, "a mirror on another host")
        # A second launcher of the same host and user takes other identities.
        addresses = client.log_root / "sandbox" / "initial_peers.txt"
        second = hosts.run(
            "servers-too", *command, f"--network-initial-peers=@{addresses}", f"--swarm-key-file={_key(hosts)}"
        )
        # Each host can be asked as well, as long as it is there.
        listed = until(lambda: _of_others(addresses, "nobody", 4), START_S, "the addresses of all")
        summary = finished(client, [first, second, mirror])
    assert mirror.events("mirror_0", "mirror.holds")
    assert client.events("mirror_0", "mirror.holds")
    assert (summary["exit"], summary["replicas"], summary["pipelines_max"]) == ("done", 4, 2)
    assert (summary["duplicates"], summary["missing"]) == (0, 0)
    assert last_hashes([first, second]) == {stage: [value] * 2 for stage, value in summary["hashes"].items()}
    printed = variable["INITIAL_PEERS"].split(",")
    assert listed[: len(printed)] == printed
    for run in (first, second):
        [resolved] = run.log_root.glob("*.servers*/config.yaml")
        assert load_config(resolved, (), {}).model_pipeline.cut == (1, 3), "the cut came with the run's record"


@pytest.mark.slow
def test_the_plain_loop_trains_beside_a_client_whose_servers_are_on_another_host(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        flags = ("--num-servers=2", "--model-pipeline.cut=1,3", "--diloco.inner-steps=10", "--device=cpu", "--baseline")
        client = hosts.run("client", "start_trainer_client.py", *SMALL, *flags)
        variable, command = invited(client)
        hosts.give_key("client", "servers")
        servers = hosts.run("servers", *command, environment=variable)
        summary = finished(client, [servers])
    assert (summary["exit"], summary["replicas"]) == ("done", 2)
    assert 0 < summary["loss_baseline"] < summary["loss_first"]
    assert 0 < summary["eval_loss_baseline"] < summary["eval_loss_first"]
    assert re.search(r"eval loss, baseline +\d\.\d{3}", client.output)
    assert "baseline@" not in client.output, "it has not failed"


def _key(hosts: Hosts) -> Path:
    return hosts.home("client") / ".config/shoal/swarm.key"


@pytest.mark.slow
def test_runs_that_start_on_one_host_at_once_listen_on_ports_of_their_own(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        clients = [hosts.run(name, "start_trainer_client.py", *SMALL, "--num-servers=4") for name in ("one", "two")]
        addresses = [invited(client)[0]["INITIAL_PEERS"].partition("/p2p/")[0] for client in clients]
        assert len(set(addresses)) == 2
        for client in clients:
            client.interrupt()
        for client in clients:
            assert client.ends(END_S) == 130, client.output
            client.leaves_nothing()


@pytest.mark.slow
@needs_namespaces
def test_two_server_hosts_and_a_client_host_share_no_socket_and_end_with_equal_hashes(tmp_path: Path) -> None:
    with (
        lan("client", "left", "right") as network,
        hosts_of(tmp_path, network) as hosts,
        network.sniffed("canary", "SHOL", "SHHI", "sandbox-2") as seen,
    ):
        network.say_in_clear("client", "left", "a canary")
        for host in ("left", "right"):
            network.add_home(host, "192.168.1.5")  # two homes with one private address are two machines
        client = hosts.run("client", "start_trainer_client.py", *SMALL, "--num-servers=4")
        variable, command = invited(client)
        assert network.address("client") in variable["INITIAL_PEERS"]
        assert "/tcp/50000/" in variable["INITIAL_PEERS"]
        for host in ("left", "right"):
            hosts.give_key("client", host)
        servers = [hosts.run(host, *command, environment=variable) for host in ("left", "right")]
        summary = finished(client, servers)
    assert (summary["exit"], summary["replicas"], summary["pipelines_max"]) == ("done", 4, 2)
    assert (summary["duplicates"], summary["missing"], summary["failovers"]) == (0, 0, [])
    assert last_hashes(servers) == {stage: [value] * 2 for stage, value in summary["hashes"].items()}
    for each in servers:
        assert sorted(last_hashes([each])) == ["0", "1"], "no stage has all of its replicas on one machine"
    # Frames, hellos and the run's name would be there in clear without TLS.
    assert seen["packets"] > 500
    assert seen["seen"].pop("canary") > 0
    assert seen["seen"] == {"SHOL": 0, "SHHI": 0, "sandbox-2": 0}


def _parameter_bytes(model: Path) -> dict[int, int]:
    """Of each of the two stages of a gpt, by the file that the run has left."""
    first, _ = json.loads((model / "config.json").read_text())["configuration"]["model_pipeline"]["cut"]
    sizes: Counter[str] = Counter()
    with safe_open(model / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            sizes[name.split(".")[1]] += file.get_tensor(name).nbytes
    units = ["embedding", *sorted(name for name in sizes if name.startswith("block_")), "head"]
    assert set(units) == sizes.keys()
    return {0: sum(sizes[unit] for unit in units[:first]), 1: sum(sizes[unit] for unit in units[first:])}


@pytest.mark.slow
@needs_namespaces
def test_activations_and_gradients_cross_one_link_from_server_to_server(tmp_path: Path) -> None:
    with lan("client", "left", "right") as network, hosts_of(tmp_path, network) as hosts:
        # A mirror would fetch every record's states over the same links.
        alone = (*_WIDE, "--no-param-mirror-enable")
        client = hosts.run("client", "start_trainer_client.py", *alone, "--num-servers=2")
        variable, command = invited(client)
        one = [part if part != "2" else "1" for part in command]
        for host in ("left", "right"):
            hosts.give_key("client", host)
        servers = {host: hosts.run(host, *one, environment=variable) for host in ("left", "right")}
        summary = finished(client, list(servers.values()))
        received_and_sent = {host: network.link_bytes(host) for host in network.hosts}
    [opened] = client.events("data_server_0", "dataset.opened")
    stage_of = {host: run.events("server_0", "server.ready")[0]["stage"] for host, run in servers.items()}
    assert sorted(stage_of.values()) == [0, 1]
    host_of = {stage: host for host, stage in stage_of.items()}
    trained, evaluated = summary["samples"], opened["num_holdout"] * (_ROUNDS + 1)
    activation_bytes = (trained + evaluated) * _SEQ_LEN * _HIDDEN * 4
    gradient_bytes = trained * _SEQ_LEN * _HIDDEN * 4
    assert activation_bytes > gradient_bytes > 5 * _OVERHEAD_BYTES
    # At the end the client fetches the model: parameters and momentum of each stage, once.
    left_bytes = {stage: 2 * size for stage, size in _parameter_bytes(Path(summary["model"])).items()}
    sent = {stage: received_and_sent[host_of[stage]][1] - left_bytes[stage] for stage in (0, 1)}
    assert activation_bytes < sent[0] < 1.05 * activation_bytes + _OVERHEAD_BYTES, received_and_sent
    assert gradient_bytes < sent[1] < 1.05 * gradient_bytes + _OVERHEAD_BYTES, received_and_sent
    # What the client's host has to do with it: token numbers and labels go out, answers come back.
    token_bytes = 2 * (trained + evaluated) * _SEQ_LEN * 8
    received, sent_by_client = received_and_sent["client"]
    assert received - sum(left_bytes.values()) < _OVERHEAD_BYTES, received_and_sent
    assert sent_by_client < 1.05 * token_bytes + _OVERHEAD_BYTES, received_and_sent


@pytest.mark.slow
def test_a_host_is_told_what_it_lacks_and_what_differs(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        # All at once: each waits for something else.
        nothing = hosts.run("empty", "start_servers.py", "--num-servers=1")
        client = hosts.run("client", "start_trainer_client.py", *SMALL)
        assert nothing.ends(START_S) == 2
        assert "export INITIAL_PEERS=" in nothing.output
        assert "swarm.key" in nothing.output
        variable, command = invited(client)
        hosts.give_key("client", "servers")
        hosts.give_key("client", "asking")
        strange = hosts.run("strange", "start_servers.py", "--num-servers=1", *_unreachable(hosts))
        other = hosts.run("servers", *command, "--model.hidden-size=64", environment=variable)
        asking = hosts.run("asking", "-m", "shoal", "status", "--json", environment=variable)
        assert other.ends(START_S) == 2, other.output
        assert "model.hidden_size = 64 (--model.hidden-size): the run has 48" in other.output
        assert strange.ends(START_S) == 2, strange.output
        assert "127.0.0.1 port 9: refused: that host is there, but nothing listens on the port" in strange.output
        # Of another prefix and of another key: test_joining.py.
        for refused in (nothing, other, strange):
            # A word alone with a full stop in it is the name of an event, which is for the logs.
            assert not re.search(r"^[a-z_]+\.[a-z_.]+$", refused.output, re.MULTILINE), refused.output
        assert asking.ends(START_S) == 0, asking.output
        told = json.loads(asking.output.splitlines()[-1])
        assert (told["experiment_prefix"], told["waiting_servers"]) == ("sandbox", [])
        assert [stage["replicas"] for stage in told["stages"]] == [[], []]
        assert client.process.poll() is None
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        client.leaves_nothing()


def _unreachable(hosts: Hosts) -> tuple[str, ...]:
    peer = "12D3KooWC1W43CCBCGosZwVWRPF4MTcvTk3tDstTqDMDQMpn8ytY"
    return (
        f"--initial-peers=/ip4/127.0.0.1/tcp/9/p2p/{peer}",
        "--network.bootstrap-timeout-s=2",
        f"--swarm-key-file={_key(hosts)}",
    )


def _trains_with_an_early_host(hosts: Hosts) -> tuple[Launched, Launched, dict[str, str], list[str]]:
    """Start a client's host and an early host of servers; a late one has the key, and the variable and the command."""
    client = hosts.run("client", "start_trainer_client.py", *ENDLESS)
    variable, command = invited(client)
    for host in ("early", "late"):
        hosts.give_key("client", host)
    early = hosts.run("early", *command, environment=variable)
    client.saw("client_0", "round.recorded", round=1)
    return client, early, variable, command


@pytest.mark.slow
def test_a_host_of_servers_comes_late_leaves_and_comes_back_as_the_same_peers(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client, early, variable, command = _trains_with_an_early_host(hosts)
        late = hosts.run("late", *command, environment=variable)
        assert _swaps_like_the_client(client, late)
        keys = _key_files(hosts, "late")
        assert [path.name for path in keys] == ["scout_0.key", "server_0.key", "server_1.key"]
        late.interrupt()
        assert late.ends(END_S) == 130, late.output
        late.leaves_nothing()
        reached = client.events("client_0", "round.recorded")[-1]["round"]
        client.saw("client_0", "round.recorded", round=reached + 2)
        again = hosts.run("late", *command, environment=variable, start="second")
        assert _swaps_like_the_client(client, again)
        assert _key_files(hosts, "late") == keys
        # One host cannot hear it from the registry.
        os.kill(_scout_of(early), signal.SIGSTOP)
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        for servers in (early, again):
            # Its client has said that the run is over, so nobody waits for it.
            assert servers.ends(END_S) == 0, servers.output
            servers.leaves_nothing()
        summary = client.summary()
    assert (summary["exit"], summary["duplicates"], summary["missing"]) == ("interrupted", 0, 0)


@pytest.mark.slow
def test_servers_hear_why_a_run_has_failed_also_from_the_successor_of_a_killed_scout(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    arguments = json.dumps({"ended": str(ended)})
    rows = f"--data.dataset-name={ending_rows.__name__}:EndingRows", f"--data.arguments={arguments}"
    with hosts_of(tmp_path) as hosts:
        client = hosts.run("client", "start_trainer_client.py", *ENDLESS, *rows)
        variable, command = invited(client)
        hosts.give_key("client", "servers")
        servers = hosts.run("servers", *command, environment=variable)
        client.saw("client_0", "round.recorded", round=1)
        for num_before in (0, 1):  # the first successor is a new role to the supervisor, the second one is its own work
            os.kill(_scout_of(servers), signal.SIGKILL)
            until(lambda n=num_before: len(servers.events("scout_0", "scout.watching")) > n, START_S, "another scout")
        ended.touch()
        assert client.ends(END_S) == 1, client.output
        assert servers.ends(END_S) == 1, servers.output
        assert "has failed: " in servers.output
        assert ending_rows.WHY in servers.output
        for each in (client, servers):
            each.leaves_nothing()
        assert client.summary()["exit"] == "failed"


def _scout_of(servers: Launched) -> int:
    [scout] = [pid for pid in servers.processes() if "scout" in Path(f"/proc/{pid}/comm").read_text()]
    return scout


def _key_files(hosts: Hosts, host: str) -> dict[Path, bytes]:
    folder = hosts.home(host) / ".config/shoal/identities"
    return {path: path.read_bytes() for path in sorted(folder.glob("servers@*/*.key"))}


def _swaps_like_the_client(client: Launched, servers: Launched) -> bool:
    """Wait until each server of a host has taken part in a round; return whether it got what the record says."""
    agrees = True
    for index in (0, 1):
        ready = servers.saw(f"server_{index}", "server.ready")
        swapped = servers.saw(f"server_{index}", "round.swapped")
        recorded = client.saw("client_0", "round.recorded", round=swapped["round"])
        agrees &= recorded["hashes"][str(ready["stage"])] == swapped["parameters"]
    return agrees


@pytest.mark.slow
def test_a_swarm_whose_first_peer_is_gone_for_good_trains_on_and_is_joined_through_any_other(tmp_path: Path) -> None:
    with hosts_of(tmp_path) as hosts:
        client, early, variable, command = _trains_with_an_early_host(hosts)
        assert early.log_dir is not None
        first = variable["INITIAL_PEERS"].rpartition("/p2p/")[2]
        listed = until(lambda: _of_others(early.log_dir / "initial_peers.txt", first), START_S, "other addresses")
        for num_starts in range(1, 7):
            until(lambda n=num_starts: len(_starts(client, "monitor:0")) == n, START_S, "another monitor")
            os.kill(client.pid_of("monitor:0"), signal.SIGKILL)
        until(lambda: "the swarm goes on without it" in client.output, START_S, "the end of the monitor")
        assert client.output.count("however long it takes; Ctrl-C ends") == 1, "it does not wait while it trains"
        reached = client.events("client_0", "round.recorded")[-1]["round"]
        client.saw("client_0", "round.recorded", round=reached + 2)
        # The monitor was one of those who keep this file; by it the client will find back.
        until(lambda: _of_others(client.require_log_dir() / "initial_peers.txt", first), START_S, "the others")
        # Of the host of servers, which has been there from the beginning.
        late = hosts.run("late", *command, f"--network-initial-peers={listed[-1]}")
        assert _swaps_like_the_client(client, late)
        # What is started again finds the swarm by those that its host has heard of.
        os.kill(client.pid_of("client:0"), signal.SIGKILL)
        client.saw("client_0", "client.resumed", generation=2)
        os.kill(early.pid_of("server:0"), signal.SIGKILL)
        early.saw("server_0", "state.fetched")
        reached = client.events("client_0", "round.recorded")[-1]["round"]
        client.saw("client_0", "round.recorded", round=reached + 2)
        client.interrupt()
        assert client.ends(END_S) == 130, client.output
        for servers in (early, late):
            assert servers.ends(END_S) == 0, servers.output
        for host in (client, early, late):
            host.leaves_nothing()
        summary = client.summary()
    assert (summary["exit"], summary["duplicates"], summary["missing"]) == ("interrupted", 0, 0)


def _of_others(path: Path, peer: str, number: int = 1) -> list[str]:
    """Return the addresses in a file that are not of this peer, once there are of so many others."""
    lines = path.read_text().split() if path.exists() else []
    others = [line for line in lines if not line.endswith(f"/p2p/{peer}")]
    return others if len({line.rpartition("/p2p/")[2] for line in others}) >= number else []


def _starts(host: Launched, role: str) -> list[dict[str, Any]]:
    return [event for event in host.events("launcher", "role.started") if event["role"] == role]
