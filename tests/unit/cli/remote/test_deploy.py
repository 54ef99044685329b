"""What is in deploy/: every command, flag, key, path and port of it is one that there is; what can be run is run."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.checkpoint.manifest import MANIFEST
from shoal.cli import main
from shoal.config import Config, load_config
from shoal.config.sources import ENV_RESERVED, from_env
from shoal.control.peers_file import PEERS_FILE
from shoal.identity import create_swarm_key, load_swarm_key
from shoal.monitor.http.access import TOKEN_FILE

ROOT = Path(__file__).parents[4]
DEPLOY = ROOT / "deploy"
UNITS = ("shoal-client.service", "shoal-servers.service")
PEER = "/ip4/203.0.113.7/tcp/50000/p2p/12D3KooWFrCUuswLZqfWycRGiHa1uWQcgJac2rbagi2VKoe6XbJ4"
END_S = 60.0


def _yaml(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text())


def _loads(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the configuration that a command would run with."""
    capsys.readouterr()
    code = main([*command, "--print-config"])
    printed = capsys.readouterr()
    assert code == 0, f"{shlex.join(command)}: {printed.err}"
    return printed.out


def test_variables_that_are_named_are_keys_of_the_configuration() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    texts = [path.read_text() for path in (*files, ROOT / "docs/deploy.md")]
    named = {name for text in texts for name in re.findall(r"\bSHOAL_[A-Z_]+\b", text)} - ENV_RESERVED
    assert named
    assert from_env(dict.fromkeys(named, "1")).problems == []


# ---- systemd -------------------------------------------------------------------------------------------------------


def _values(unit: str, name: str) -> list[str]:
    """Return what a unit says under a name; lines that end in a backslash go on."""
    text = (DEPLOY / "systemd" / unit).read_text().replace("\\\n", " ")
    return re.findall(rf"^{name}=(.*)$", text, re.MULTILINE)


def _shell(unit: str, name: str) -> list[str]:
    """Return the arguments of a command of a unit as systemd passes them, which has `$$` for `$`."""
    [value] = _values(unit, name)
    return [word.replace("$$", "$") for word in shlex.split(value)]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze of Debian's package systemd")
@pytest.mark.parametrize("unit", UNITS)
def test_systemd_takes_the_units(unit: str, tmp_path: Path) -> None:
    # Which program a unit starts is looked up: here it is the one of this environment.
    text = (DEPLOY / "systemd" / unit).read_text().replace("/opt/shoal/bin/", f"{Path(sys.executable).parent}/")
    (tmp_path / unit).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit)], capture_output=True, text=True, check=False
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if unit in line]
    assert (done.returncode, said) == (0, [])


@pytest.mark.parametrize("unit", UNITS)
def test_units_hide_no_device(unit: str) -> None:
    hidden = ("PrivateDevices", "DevicePolicy", "DeviceAllow", "ProtectClock", "MemoryDenyWriteExecute")
    assert {name: _values(unit, name) for name in hidden} == {name: [] for name in hidden}
    assert _values(unit, "NoNewPrivileges") == ["yes"]
    assert _values(unit, "ProtectSystem") == ["strict"]


@pytest.mark.parametrize("unit", UNITS)
def test_a_role_that_is_killed_for_want_of_memory_ends_no_other_one(unit: str) -> None:
    assert (_values(unit, "OOMPolicy"), _values(unit, "KillMode")) == (["continue"], ["mixed"])


def test_both_units_harden_alike() -> None:
    texts = [(DEPLOY / "systemd" / unit).read_text().partition("# What it may touch.")[2] for unit in UNITS]
    assert texts[0] == texts[1] != ""


class ClientService:
    """The client's service as far as shells go: what systemd would start, with a shoal that notes how it is called.

    Attributes:
        has_servers: whether `shoal status` finds some of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.has_servers = False
        fake = folder / "shoal"
        fake.write_text('#!/bin/sh\n[ "$1" != status ] || exit "$STATUS"\nprintf "%s\\n" "$@"\n')
        fake.chmod(0o700)

    def start(self) -> list[str]:
        """Start it; return the arguments of shoal."""
        command = [word.replace("/opt/shoal/bin/shoal", "./shoal") for word in _shell(UNITS[0], "ExecStart")]
        environment = {**os.environ, "STATUS": "0" if self.has_servers else "2"}
        done = subprocess.run(command, cwd=self._folder, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    def end(self, code: str, status: str) -> None:
        """It has ended."""
        environment = {**os.environ, "EXIT_CODE": code, "EXIT_STATUS": status}
        subprocess.run(_shell(UNITS[0], "ExecStopPost"), cwd=self._folder, env=environment, check=True)

    def write(self, name: str) -> None:
        """The run that goes on has written a file below its logs, some time after it began."""
        path = self._folder / "logs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        began_s = path.stat().st_mtime - 10
        os.utime(self._folder / "unfinished", (began_s, began_s))


BEGINS = ["start-trainer-client", "--config-path", "/etc/shoal/run.yaml"]
CHECKPOINT = f"checkpoints/{{}}/round_000010/{MANIFEST}"


def test_a_client_that_was_lost_goes_on_from_its_checkpoint_and_one_whose_run_is_over_begins_another(
    tmp_path: Path,
) -> None:
    service = ClientService(tmp_path)
    assert service.start() == BEGINS
    service.write(f"first/{PEERS_FILE}")
    service.end("exited", "1")
    assert service.start() == BEGINS, "nothing was kept of it"
    service.write(CHECKPOINT.format("first"))
    for code, status in (("exited", "130"), ("killed", "KILL"), ("exited", "1")):
        service.end(code, status)
        assert service.start() == [*BEGINS, "--resume"]
    service.end("exited", "0")
    assert service.start() == BEGINS
    service.end("killed", "KILL")
    assert service.start() == BEGINS, "the checkpoint is of the run before it"


def test_a_client_that_was_lost_goes_on_with_the_servers_that_its_run_still_has(tmp_path: Path) -> None:
    service = ClientService(tmp_path)
    assert service.start() == BEGINS
    for name in (CHECKPOINT.format("first"), f"first/{PEERS_FILE}"):
        service.write(name)
    service.end("killed", "KILL")
    service.has_servers = True
    assert service.start() == [*BEGINS, "--initial-peers", f"@logs/first/{PEERS_FILE}"]
    service.end("exited", "0")
    assert service.start() == BEGINS, "servers of another run are not its own"


def test_what_the_client_service_calls_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / PEERS_FILE).write_text(PEER)
    monkeypatch.chdir(ROOT)
    begins = ["start-trainer-client", "--config-path", "configs/sandbox.yaml"]
    _loads(begins, capsys)
    _loads([*begins, "--initial-peers", f"@{tmp_path / PEERS_FILE}"], capsys)
    assert main(["status", "--log-dir", "logs", "--help"]) == 0
    capsys.readouterr()


def test_the_servers_service_is_started_once_a_swarm_was_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.cli.inviting import JOINED_FILE

    home = dict(pair.split("=") for pair in _values(UNITS[1], "Environment")[0].split())["HOME"]
    monkeypatch.setenv("HOME", home)
    assert _values(UNITS[1], "ConditionPathExists") == [str(JOINED_FILE.expanduser())]


# ---- containers ----------------------------------------------------------------------------------------------------


def _containers() -> dict[str, dict[str, Any]]:
    return {name: each for name, each in _yaml("compose.yaml")["services"].items() if each["image"] == "shoal"}


def test_containers_run_commands_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # an image has no checkout
    (tmp_path / "sandbox").mkdir()
    (tmp_path / "sandbox" / PEERS_FILE).write_text(f"{PEER}\n")
    said = {
        name: yaml.safe_load(_loads([word.replace("/runs/", f"{tmp_path}/") for word in each["command"]], capsys))
        for name, each in _containers().items()
    }
    servers = [said[name]["servers"]["num_servers"] for name in ("servers-a", "servers-b")]
    assert said["client"]["servers"]["num_servers"] == sum(servers)
    assert all(each["network"]["swarm_key_file"] == "/key/swarm.key" for each in said.values())
    assert said["servers-a"]["network"]["initial_peers"] == [PEER]
    assert said["client"]["experiment_prefix"] == "sandbox"


def test_health_is_asked_by_commands_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [each["healthcheck"]["test"] for each in _containers().values()]
    asked += [["CMD", *json.loads(_instructions("HEALTHCHECK")[0].partition("CMD ")[2])]]
    for kind, *words in asked:
        command = shlex.split(words[0].partition("|")[0]) if kind == "CMD-SHELL" else words
        assert command[0] == "shoal"
        assert main([*command[1:], "--help"]) == 0
    capsys.readouterr()


def test_containers_mount_what_there_is_and_the_key_is_written_by_the_client_alone() -> None:
    compose = _yaml("compose.yaml")
    keys: dict[str, str] = {}
    for name, service in compose["services"].items():
        assert set(service.get("depends_on", ())) <= set(compose["services"])
        for mount in service.get("volumes", ()):
            source, target, *mode = mount.split(":")
            is_path = source.startswith(".")
            assert (DEPLOY / source).is_file() if is_path else source in compose["volumes"], mount
            assert not is_path or mode == ["ro"], mount
            if source == "key":
                keys[name] = mode[0] if mode else "rw"
                assert target == "/key"
    assert keys == {"client": "rw", "servers-a": "ro", "servers-b": "ro"}
    others = {name: service for name, service in compose["services"].items() if name != "grafana"}
    assert "environment" not in json.dumps({**compose, "services": others}), "a key in one is for all to see"
    assert all(name.startswith("GF_AUTH_") for name in compose["services"]["grafana"]["environment"])


def test_prometheus_looks_where_the_client_tells_its_numbers() -> None:
    [job] = _yaml("monitoring/prometheus.yaml")["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{Config().dashboard.port}"]}]
    assert job["authorization"]["credentials_file"] == f"/runs/sandbox/{TOKEN_FILE}"
    services = _yaml("compose.yaml")["services"]
    assert services["prometheus"]["network_mode"] == "service:client"
    # The token is readable for its owner alone.
    uid = re.search(r"useradd --uid (\d+)", (DEPLOY / "Containerfile").read_text())
    assert uid is not None
    assert services["prometheus"]["user"] == f"{uid[1]}:{uid[1]}"
    text = (ROOT / "docs/monitoring.md").read_text()
    documented = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[0])["scrape_configs"][0]
    documented["authorization"]["credentials_file"] = job["authorization"]["credentials_file"]
    assert documented == job


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool of Debian's package prometheus")
def test_prometheus_takes_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("x")
    text = (DEPLOY / "monitoring/prometheus.yaml").read_text()
    path = tmp_path / "prometheus.yaml"
    path.write_text(text.replace(f"/runs/sandbox/{TOKEN_FILE}", str(tmp_path / "token")))
    done = subprocess.run(["promtool", "check", "config", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_grafana_gets_the_dashboard_of_the_documents() -> None:
    mounts = dict(mount.split(":")[:2] for mount in _yaml("compose.yaml")["services"]["grafana"]["volumes"])
    [provider] = _yaml("monitoring/grafana_dashboards.yaml")["providers"]
    assert Path(mounts["../docs/grafana.json"]).parent == Path(provider["options"]["path"])
    [source] = _yaml("monitoring/grafana_source.yaml")["datasources"]
    shown = json.loads((ROOT / "docs/grafana.json").read_text())
    [variable] = shown["templating"]["list"]
    assert (variable["type"], variable["query"], source["type"]) == ("datasource", source["type"], "prometheus")


def _instructions(name: str) -> list[str]:
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    return re.findall(rf"^{name} (.*)$", text, re.MULTILINE)


def test_an_image_is_built_of_what_there_is() -> None:
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in ignored if line.startswith("!")}
    copied = {source for line in _instructions("COPY") if "--from" not in line for source in line.split()[:-1]}
    assert copied == let_in
    assert all((ROOT / source).exists() for source in copied)
    assert _instructions("USER") == ["shoal"]
    assert _instructions("ENTRYPOINT") == ['["shoal"]']
    assert _instructions("STOPSIGNAL") == [_containers()["client"]["stop_signal"]]


# ---- SkyPilot ------------------------------------------------------------------------------------------------------

_FAKE_SHOAL = f"""#!/bin/sh
for word; do printf '%s\\n' "$word"; done >"$HOME/arguments.$1.$#"
env >"$HOME/environment"
case "$*" in *--invitation=-*) cat >"$HOME/standard_input" ;; esac
[ "$1" = start-trainer-client ] || exit 0
mkdir -p "$HOME/jobs/$SKYPILOT_TASK_ID/run"
echo {PEER} >"$HOME/jobs/$SKYPILOT_TASK_ID/run/{PEERS_FILE}"
while [ ! -e "$HOME/is_over" ]; do sleep 0.05; done
"""


class Node:
    """A node on which SkyPilot runs a task, with a shoal that notes how it is called."""

    def __init__(self, folder: Path, rank: int, task: dict[str, Any], **variables: str) -> None:
        self.home = folder / f"node{rank}"
        (self.home / "bin").mkdir(parents=True)
        fake = self.home / "bin" / "shoal"
        fake.write_text(_FAKE_SHOAL)
        fake.chmod(0o700)
        self._script = task["run"]
        self.environment = {
            **{name: str(value) for name, value in task["envs"].items()},
            "HOME": str(self.home),
            "PATH": f"{self.home}/bin:{os.environ['PATH']}",
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "\n".join(["127.0.0.1"] * task["num_nodes"]),
            "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
            "SKYPILOT_TASK_ID": "sky-2026-01-01_shoal-1",
            **variables,
        }

    def start(self) -> subprocess.Popen[bytes]:
        """Start what the node runs."""
        return subprocess.Popen(["bash", "-c", self._script], env=self.environment)

    def calls(self) -> Iterator[list[str]]:
        """Yield how shoal was called."""
        for path in sorted(self.home.glob("arguments.*")):
            yield path.read_text().splitlines()

    def tells_shoal(self, secret: str) -> bool:
        """Whether a secret is in what shoal's own process shows others, or inherits."""
        seen = [path.read_text() for path in self.home.glob("arguments.*")]
        return any(secret in text for text in (*seen, (self.home / "environment").read_text()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_first_node_of_a_cluster_runs_the_client_and_the_others_join_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    create_swarm_key(tmp_path / "swarm.key")
    secret = base64.b64encode((tmp_path / "swarm.key").read_bytes()).decode()
    variables = {"SWARM_KEY": secret, "PORT": str(_free_port())}
    task = _yaml("skypilot/client.yaml")
    assert task["secrets"] == {"SWARM_KEY": None}
    first, second = (Node(tmp_path, rank, task, **variables) for rank in (0, 1))
    client = first.start()
    try:
        assert second.start().wait(END_S) == 0
    finally:
        (first.home / "is_over").touch()
        assert client.wait(END_S) == 0
    for node in (first, second):
        key = node.home / ".config/shoal/swarm.key"
        assert load_swarm_key(key) == load_swarm_key(tmp_path / "swarm.key")
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert not node.tells_shoal(secret)
    monkeypatch.chdir(ROOT)
    [begins], [joins] = first.calls(), second.calls()
    assert (begins[0], joins[0]) == ("start-trainer-client", "start-servers")
    told, heard = (yaml.safe_load(_loads(command, capsys)) for command in (begins, joins))
    assert told["servers"]["num_servers"] == task["num_nodes"] - 1
    assert heard["network"]["initial_peers"] == [PEER]
    assert told["experiment_prefix"] == heard["experiment_prefix"]
    assert heard["network"]["host_name"] == "node1"
    with pytest.raises(ConnectionRefusedError):  # what told the others has ended with the client
        socket.create_connection(("127.0.0.1", int(variables["PORT"])))


def test_nodes_of_another_cluster_join_by_an_invitation_that_nobody_else_sees(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = _yaml("skypilot/servers.yaml")
    assert task["secrets"] == {"INVITATION": None}
    task = {**task, "num_nodes": 2}
    node = Node(tmp_path, 1, task, INVITATION="shoal1:abc", SKYPILOT_NODE_IPS="10.0.0.4\n10.0.0.5")
    assert node.start().wait(END_S) == 0
    assert (node.home / "standard_input").read_text() == "shoal1:abc"
    assert not node.tells_shoal("shoal1:abc")
    remembers, joins = node.calls()
    assert remembers == ["join", "--invitation=-", "--remember-only"]
    assert joins[0] == "join"
    config = load_config(None, joins[1:])
    assert (config.network.public_ip, config.network.host_name) == ("10.0.0.5", "sky1")
    assert config.num_servers == task["envs"]["SERVERS_PER_NODE"]
    assert main([*remembers, "--help"]) == 0
    capsys.readouterr()


@pytest.mark.parametrize("name", ["client", "servers"])
def test_set_up_of_a_node_is_a_script_that_names_files_of_the_checkout(name: str) -> None:
    task = _yaml(f"skypilot/{name}.yaml")
    assert task["workdir"] == "."
    for part in (task["setup"], task["run"]):
        done = subprocess.run(["bash", "-n"], input=part, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    for file in re.findall(r"--constraint (\S+)", task["setup"]):
        assert (ROOT / file).is_file()
    assert (ROOT / task["envs"].get("CONFIG", "configs/sandbox.yaml")).is_file()
