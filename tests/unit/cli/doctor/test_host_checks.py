"""What the doctor says of a host: each problem is planted, found with its remedy, and gone once that is applied."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import runs_here
from shoal.cli.doctor import host_checks, host_facts
from shoal.cli.doctor.diagnosis import Condition, Judged, ok
from shoal.cli.doctor.facts import (
    Folder,
    HostAddresses,
    KeyFile,
    LanSeen,
    RunsHere,
    StageRoom,
    SwarmSeen,
    WantedCores,
    WantedDevices,
    nothing_seen,
)
from shoal.config import Config, load_config
from shoal.control.lan import FoundSwarm
from shoal.runtime.run_dir import FoundDir, RunDir, RunNote, found_dirs, remove_dead_dir
from shoal.server.visible_gpus import VisibleGpus
from shoal.swarm.assignment import StageNeed
from shoal.swarm.view import Run, SwarmView

MIB, GIB = host_checks.MIB, host_checks.GIB
KEY = b"k" * 32
CPU_TORCH = VisibleGpus("2.13.0+cpu", reason="it is built for CPUs alone")


def config_of(**values: Any) -> Config:
    return load_config(None, values, {})


def found(judged: Judged, condition: Condition, evidence: str, remedy: str) -> None:
    """Require a finding."""
    assert judged.condition is condition, judged
    assert evidence in judged.evidence
    assert remedy in judged.remedy


# ---- the key -------------------------------------------------------------------------------------------------------


def key_findings(path: Path) -> Mapping[str, Judged]:
    facts = nothing_seen(1.0)
    facts.key = host_facts.key_file_at(path)
    return {check.name: check.judge(facts) for check in host_checks.HOST_CHECKS if check.name.startswith("key.")}


def test_a_missing_key_an_open_one_and_a_short_one_are_found_and_well_once_the_remedy_is_applied(
    tmp_path: Path,
) -> None:
    path = tmp_path / "swarm.key"
    said = key_findings(path)
    found(said["key.file"], Condition.FAILED, f"there is no swarm key {path}", f"scp <client host>:{path} {path}")
    assert said["key.file"].remedy.startswith("`shoal join` here asks for a text")
    assert {said[name].condition for name in ("key.mode", "key.form")} == {Condition.SKIPPED}
    path.write_bytes(KEY[:31])
    path.chmod(0o644)
    said = key_findings(path)
    found(said["key.mode"], Condition.FAILED, "its mode is 644", f"chmod 600 {path}")
    found(said["key.form"], Condition.FAILED, "holds 31 bytes, and a key has 32", "copy the file as it is")
    path.chmod(0o640)
    found(key_findings(path)["key.mode"], Condition.FAILED, "its mode is 640", f"chmod 600 {path}")
    subprocess.run(said["key.mode"].remedy.split(), check=True)
    path.write_bytes(KEY + b"\n")
    found(key_findings(path)["key.form"], Condition.FAILED, "holds more than 32 bytes", "copy the file as it is")
    path.write_bytes(KEY)
    said = key_findings(path)
    assert {judged.condition for judged in said.values()} == {Condition.OK}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KEY.decode() not in str(said), "nobody is told the key"


def test_a_key_that_cannot_be_read_is_found() -> None:
    judged = host_checks.key_form(KeyFile(Path("/k"), 0o600, None, "Permission denied"))
    found(judged, Condition.FAILED, "/k cannot be read: Permission denied", "ls -l /k")


# ---- programs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needed", "there", "is_fitting"),
    [
        (">=2.8", "2.13.0+cpu", True),
        (">=2.8", "2.8", True),
        (">=2.8", "2.7.1", False),
        ("<2,>=1.1.12", "1.1.12", True),
        ("<2,>=1.1.12", "2.0.0", False),
        (">=3.11", "3.11.7", True),
        ("", "0.1", True),
        (">=1", "", False),
        ("!=1.5,==1.6", "1.6.0", True),
        (">1.6", "1.6.0", False),
        (">=5", "5.0.0rc1", True),
    ],
)
def test_a_version_is_compared_by_its_numbers(needed: str, there: str, is_fitting: bool) -> None:
    assert host_checks.fits(needed, there) is is_fitting


def test_an_old_and_a_missing_program_are_found_and_what_is_installed_here_is_new_enough() -> None:
    judged = host_checks.programs({"python": (">=3.11", "3.10.1"), "torch": (">=2.8", ""), "rich": (">=13", "14.0")})
    found(judged, Condition.FAILED, "python 3.10.1, needed is >=3.11; torch is missing", "pip install 'torch>=2.8'")
    assert "install Python >=3.11" in judged.remedy
    needed = host_facts.needed_programs()
    assert {"python", "torch", "hivemind", "uvloop"} <= needed.keys()
    assert not {"wandb", "pytest"} & needed.keys()
    assert all(required for required, _ in needed.values())
    assert host_checks.programs(needed).condition is Condition.OK


async def test_a_daemon_that_is_missing_is_not_executable_or_is_no_program_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hivemind"
    (package / "hivemind_cli").mkdir(parents=True)
    (package / "__init__.py").touch()
    spec = host_facts.importlib.util.spec_from_file_location(
        "hivemind", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    monkeypatch.setattr(host_facts.importlib.util, "find_spec", lambda _: spec)
    path = package / "hivemind_cli" / "p2pd"

    async def judged() -> Judged:
        return host_checks.daemon(await host_facts.daemon_file())

    found(await judged(), Condition.FAILED, f"there is no {path}", "pip install --force-reinstall hivemind")
    path.write_bytes(b"\x7fELF of another machine")
    found(await judged(), Condition.FAILED, "Permission denied", f"chmod +x {path}")
    path.chmod(0o755)
    found(await judged(), Condition.FAILED, "Exec format error", "install hivemind again")
    path.write_text("#!/bin/sh\nexit 2\n")
    assert (await judged()).condition is Condition.OK
    monkeypatch.setattr(host_facts.importlib.util, "find_spec", lambda _: None)
    found(await judged(), Condition.FAILED, "hivemind is not installed", "pip install")


async def test_the_daemon_that_is_installed_starts() -> None:
    assert host_checks.daemon(await host_facts.daemon_file()).condition is Condition.OK


def test_a_missing_compiler_is_found_where_stages_are_compiled_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = config_of(model_pipeline={"compile": True})
    monkeypatch.setenv("CXX", str(tmp_path / "g++"))
    found(host_facts.compiler_for(compiled), Condition.FAILED, "there is no", "name yours in CXX")
    assert host_facts.compiler_for(config_of()).condition is Condition.SKIPPED
    assert host_facts.compiler_for(None).condition is Condition.SKIPPED
    (tmp_path / "g++").touch(mode=0o755)
    include = tmp_path / "include"
    include.mkdir()
    (include / "Python.h").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(include))
    assert host_facts.compiler_for(compiled).condition is Condition.OK


# ---- the machine ---------------------------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_is_found_and_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    judged = host_checks.folder(host_facts.folder_of("log_dir", tmp_path / "file" / "logs"))
    found(judged, Condition.FAILED, "cannot be written to: Not a directory", "choose another folder with --log-dir")
    seen = host_facts.folder_of("log_dir", tmp_path / "new" / "logs")
    assert seen.path == tmp_path / "new" / "logs"
    assert not seen.problem
    assert not (tmp_path / "new").exists()
    for free_bytes, condition in ((63 * MIB, "failed"), (1000 * MIB, "warning"), (2 * GIB, "ok")):
        judged = host_checks.folder(Folder("checkpoint_dir", Path("/c"), "", free_bytes))
        assert judged.condition == condition
        assert judged.condition == "ok" or "with --checkpoint-dir" in judged.remedy


def test_checkpoints_are_looked_for_where_they_go(tmp_path: Path) -> None:
    assert isinstance(host_facts.checkpoint_folder(config_of()), Judged)
    assert "s3://b/p" in str(host_facts.checkpoint_folder(config_of(checkpoint_dir="s3://b/p")))
    seen = host_facts.checkpoint_folder(config_of(checkpoint_dir=str(tmp_path)))
    assert isinstance(seen, Folder)
    assert seen.path == tmp_path


NEEDS = (StageNeed(300 * MIB, 50 * MIB, sample_bytes=10 * MIB, max_samples=8), StageNeed(900 * MIB))


def test_memory_below_the_smallest_stage_is_found_and_enough_for_one_stage_suffices() -> None:
    judged = host_checks.room(StageRoom(350 * MIB, 2, None, NEEDS))
    found(judged, Condition.FAILED, "2 servers may take 350 MiB, and the smallest stage needs", "with --num-servers")
    least = 300 + 50 + 10
    assert f"needs {least} MiB" in judged.evidence
    for share, count in ((least, "1 of 2"), (1000, "all")):
        judged = host_checks.room(StageRoom(share * MIB, 1, None, NEEDS))
        assert judged.condition is Condition.OK
        assert f"{count} stages fit" in judged.evidence
    assert host_checks.room(StageRoom(0, 1, None, NEEDS)).condition is Condition.SKIPPED


def test_memory_that_suffices_with_files_on_the_disk_suffices() -> None:
    needs = (replace(NEEDS[0], file_bytes=40 * MIB, moment_bytes=100 * MIB, disk_bytes=GIB), NEEDS[1])
    judged = host_checks.room(StageRoom(250 * MIB, 1, None, needs, disk_bytes=GIB))
    assert judged.condition is Condition.OK
    assert "1 of 2 stages fit, 1 with files in place of memory" in judged.evidence
    found(
        host_checks.room(StageRoom(250 * MIB, 1, None, needs, disk_bytes=GIB - 1)),
        Condition.FAILED,
        "may take 250 MiB, and the smallest stage needs 360 MiB",
        "--num-servers",
    )


def test_a_device_that_is_not_there_is_found() -> None:
    judged = host_checks.devices(WantedDevices(("cuda",), False, CPU_TORCH))
    found(judged, Condition.FAILED, "device = cuda, and torch 2.13.0+cpu sees no GPU", "--device cpu")
    one = VisibleGpus("2.13.0", ("H100",))
    judged = host_checks.devices(WantedDevices(("cpu", "cuda:1"), True, one))
    found(judged, Condition.FAILED, "torch 2.13.0 sees 1 GPU", "--device auto")
    found(
        host_checks.devices(WantedDevices(("auto",), True, CPU_TORCH)),
        Condition.WARNING,
        "servers would compute on the CPU",
        "--device cpu",
    )
    for seen in (
        WantedDevices(("cuda", "auto"), True, one),
        WantedDevices(("cpu",), True, None),
        WantedDevices(("auto",), False, None),
    ):
        assert host_checks.devices(seen).condition is Condition.OK


async def test_torch_is_asked_only_where_a_gpu_may_be_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def answer(module: str, within_s: float) -> VisibleGpus:
        asked.append((module, within_s))
        return CPU_TORCH

    monkeypatch.setattr(host_facts, "answer_of", answer)
    monkeypatch.setattr(host_facts, "has_gpu_driver", lambda: False)
    for device in ("cpu", "auto"):
        assert (await host_facts.devices_of(config_of(device=device), 5.0)).gpus is None
    assert asked == []
    assert (await host_facts.devices_of(config_of(device="cpu,cuda"), 5.0)).gpus is CPU_TORCH
    assert asked == [("shoal.server.visible_gpus", 5.0)]


def test_a_limit_of_open_files_that_is_too_low_is_found_in_a_process_that_has_it() -> None:
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))\n"
        "from shoal.cli.doctor import host_checks, host_facts\n"
        "judged = host_checks.open_files(host_facts.max_files())\n"
        "print(judged.condition, judged.evidence, judged.remedy, sep='|')"
    )

    def judged(limit: int) -> list[str]:
        command = (sys.executable, "-c", program, str(limit))
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("|")

    condition, evidence, remedy = judged(128)
    assert condition == "failed"
    assert "may have 128 files" in evidence
    assert "ulimit -n 65536" in remedy
    assert host_checks.open_files(1024).condition is Condition.WARNING
    assert host_checks.open_files(65536).condition is Condition.OK


def test_more_threads_than_cores_are_found() -> None:
    judged = host_checks.cores(WantedCores((2, 2, 1), 4))
    found(judged, Condition.WARNING, "3 servers compute with 5 threads on 4 cores", "--servers.threads")
    assert host_checks.cores(WantedCores((2, 2), 4)).condition is Condition.OK


def test_threads_are_counted_of_servers_on_the_cpu_that_the_user_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_facts, "has_gpu_driver", lambda: False)
    config = config_of(device="cpu,cuda:0,auto", servers={"num_servers": 3, "threads": "1,2,4"})
    origins = {"servers.num_servers": "--num-servers"}
    assert host_facts.said_servers(config, origins) == 3
    seen = host_facts.wanted_cores(config, 3)
    assert isinstance(seen, WantedCores)
    assert seen.threads == (1, 4)
    assert host_facts.said_servers(config, {}) is None
    assert isinstance(host_facts.wanted_cores(config, None), Judged)


def test_a_path_that_is_too_long_for_sockets_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    found(host_facts.socket_room(), Condition.FAILED, "the socket path", "set XDG_RUNTIME_DIR to a shorter directory")
    with tempfile.TemporaryDirectory(prefix="s") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        assert host_facts.socket_room().condition is Condition.OK
        (Path(short) / f"shoal-{os.getuid()}").chmod(0o755)
        found(host_facts.socket_room(), Condition.FAILED, "has to be a directory of yours", "remove it")


# ---- the host's network --------------------------------------------------------------------------------------------


def ports_of(config: Config, **facts_too: Any) -> Judged:
    facts = nothing_seen(1.0)
    facts.ports = host_facts.wanted_ports(config, config.num_servers)
    for name, value in facts_too.items():
        setattr(facts, name, value)
    return host_checks.ports(facts)


def living(run_id: str) -> RunsHere:
    note = RunNote(run_id=run_id, hosts="servers", launcher_pid=42, begun_unix_s=1.0, log_dir="/logs")
    return RunsHere((note,), ())


def announcing(run_id: str) -> SwarmSeen:
    view = SwarmView(run=Run(run_id, 2, Config().experiment_prefix))  # type: ignore[arg-type]
    return SwarmSeen("m", "p", "f", (), None, False, 0, view, {})


def _listening(first: int) -> socket.socket:
    """Take the second of two free ports that the system gives nobody who asks for any."""
    while True:
        try:
            with socket.create_server(("127.0.0.1", first)):
                return socket.create_server(("127.0.0.1", first + 1))
        except OSError:
            first -= 2


@pytest.mark.parametrize("key", ["monitor_port", "data_port", "host_maddrs"])
def test_a_port_that_is_taken_is_found_and_free_once_whoever_has_it_has_ended(key: str) -> None:
    # Each process of the tests looks from another place on.
    with _listening(30_000 - os.getpid() % 5_000 * 2) as other:
        port = other.getsockname()[1]
        # The second role of the host takes the next port.
        first = port if key == "monitor_port" else port - 1
        value = [f"/ip4/0.0.0.0/tcp/{first}"] if key == "host_maddrs" else first
        config = config_of(network={key: value}, servers={"num_servers": 2})
        flag = f"--network.{key.replace('_', '-')}"
        found(ports_of(config), Condition.FAILED, f"port {port} is taken", f":({port}) ")
        assert ports_of(config).remedy.endswith(flag)
        # It is this host's own server.
        own = ports_of(config, runs=living("r-1"), swarm=announcing("r-1"))
        assert own.condition is Condition.SKIPPED
        assert ports_of(config, runs=living("r-2"), swarm=announcing("r-1")).condition is Condition.FAILED
    assert ports_of(config).condition is Condition.OK


def test_ports_above_the_last_one_are_found_and_where_none_is_fixed_nothing_is_looked_at() -> None:
    config = config_of(network={"data_port": 65535}, servers={"num_servers": 2})
    found(ports_of(config), Condition.FAILED, "network.data_port = 65535", "give a lower first port")
    assert ports_of(config_of()).condition is Condition.SKIPPED


def addresses(**values: Any) -> Judged:
    given: dict[str, Any] = {
        "public_ip": None,
        "announce_maddrs": (),
        "host_maddrs": ("/ip4/0.0.0.0/tcp/0",),
        "own": ("10.0.0.5",),
        "unresolved": (),
        "peers": ("10.0.0.1",),
    }
    return host_checks.addresses(HostAddresses(**{**given, **values}))


@pytest.mark.parametrize(
    ("values", "condition", "evidence", "remedy"),
    [
        ({"announce_maddrs": ("/ip4/10.0.0.5/udp/1",)}, "failed", "nobody can dial /ip4/10.0.0.5/udp/1", "/tcp/50001"),
        ({"announce_maddrs": ("/ip4/10.0.0.5/tcp/0",)}, "failed", "nobody can dial", "with the port"),
        ({"public_ip": "nas.lan", "unresolved": ("nas.lan",)}, "failed", "the name nas.lan", "--public-ip"),
        ({"host_maddrs": ("/ip4/10.0.0.6/tcp/1",)}, "failed", "no address of this host, which has 10.0.0.5", "0.0.0.0"),
        ({"public_ip": "127.0.0.1"}, "warning", "127.0.0.1 means each host itself", "--public-ip <address>"),
        ({"public_ip": "10.0.0.9"}, "warning", "10.0.0.9 is a private address, and none of this host", "--public-ip"),
        ({"announce_maddrs": ("/ip4/10.0.0.9/tcp/7",)}, "warning", "10.0.0.9 is a private address", "--public-ip"),
        ({"public_ip": "10.0.0.5", "peers": ("8.8.8.8",)}, "warning", "the initial peers are elsewhere", "--public-ip"),
        ({"peers": ("8.8.8.8", "h")}, "warning", "this host has private addresses alone (10.0.0.5)", "--public-ip"),
    ],
)
def test_an_address_at_which_others_cannot_dial_this_host_is_found(
    values: dict[str, Any], condition: str, evidence: str, remedy: str
) -> None:
    found(addresses(**values), Condition(condition), evidence, remedy)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"public_ip": "10.0.0.5"},
        {"public_ip": "9.9.9.9", "peers": ("8.8.8.8",)},
        {"public_ip": "host.example"},
        {"announce_maddrs": ("/dns4/host.example/tcp/50001",), "host_maddrs": ("/ip4/10.0.0.5/tcp/50001",)},
        {"public_ip": "127.0.0.1", "peers": ("127.0.0.1",), "host_maddrs": ("/ip4/127.0.0.1/tcp/0",)},
        {"own": ("10.0.0.5", "9.9.9.9"), "peers": ("8.8.8.8",)},
        {"peers": ()},
    ],
)
def test_an_address_that_they_reach_is_no_finding(values: dict[str, Any]) -> None:
    assert addresses(**values).condition is Condition.OK


async def test_names_that_are_announced_are_looked_up() -> None:
    config = config_of(network={"public_ip": "no-such-host.invalid", "initial_peers": "/ip4/127.0.0.1/tcp/1"})
    seen = await host_facts.addresses_of(config)
    assert seen.unresolved == ("no-such-host.invalid",)
    assert seen.peers == ("127.0.0.1",)
    assert (await host_facts.addresses_of(config_of(network={"public_ip": "localhost"}))).unresolved == ()


async def test_a_resolver_that_does_not_answer_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    def silent(_name: str, _port: None) -> list[object]:
        answers.wait()
        return [object()]

    monkeypatch.setattr(host_facts.socket, "getaddrinfo", silent)
    monkeypatch.setattr(host_facts, "NAME_S", 0.05)
    try:
        assert not await host_facts.is_known("host.example")
    finally:
        answers.set()
    monkeypatch.setattr(host_facts, "NAME_S", 200.0)
    assert await host_facts.is_known("host.example")


async def test_a_hub_that_cannot_be_reached_is_found_where_something_is_fetched_from_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HF_HUB_OFFLINE", "https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    key = {"data.dataset_name": "--data.dataset-name"}
    of_hub = config_of(data={"dataset_name": "Salesforce/wikitext"})
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{place.getsockname()[1]}")
        seen = await host_facts.hub_for(of_hub, key)
        assert not isinstance(seen, Judged)
        found(host_checks.hub(seen), Condition.FAILED, "data.dataset_name = Salesforce/wikitext", "HF_ENDPOINT")
        assert "127.0.0.1 port" in host_checks.hub(seen).evidence
        assert "refused" in host_checks.hub(seen).evidence
        place.listen()
        seen = await host_facts.hub_for(of_hub, key)
        assert not isinstance(seen, Judged)
        assert host_checks.hub(seen).condition is Condition.OK
    # What is not named here, is on this host, comes with shoal or was fetched before, is not fetched.
    (tmp_path / "corpus").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("corpus", "./nothing", "digits", "package.module:Class", "files/*.txt"):
        assert isinstance(await host_facts.hub_for(config_of(data={"dataset_name": name}), key), Judged)
    assert isinstance(await host_facts.hub_for(of_hub, {}), Judged)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert isinstance(await host_facts.hub_for(of_hub, key), Judged)


def test_a_run_of_the_local_network_is_told_and_what_keeps_one_from_being_found_where_it_counts() -> None:
    there = FoundSwarm("herd", ("/ip4/10.0.0.7/tcp/50000/p2p/12D3KooWx",), 1.0)
    found(host_checks.lan(LanSeen(True, there, True)), Condition.OK, "run herd is announced, at /ip4/10.0.0.7", "")
    found(host_checks.lan(LanSeen(True, None, True)), Condition.OK, "come back to this host, and none is of a run", "")
    deaf = host_checks.lan(LanSeen(False, None, True, "no interface"))
    found(deaf, Condition.WARNING, "do not come through here: no interface", "`shoal invite` on the client's host")
    found(host_checks.lan(LanSeen(False, None, False)), Condition.OK, "the initial peers are known without", "")


async def test_the_local_network_is_listened_to_with_the_key_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(await host_facts.lan_of(config_of(network={"lan": False}), KEY), Judged)
    assert isinstance(await host_facts.lan_of(config_of(), None), Judged)
    peers = {"initial_peers": ["/ip4/10.0.0.7/tcp/50000/p2p/12D3KooWx"]}

    async def nothing(*_: object) -> None:
        return None

    async def cut_off(_: float) -> bool:
        raise OSError("no interface")

    monkeypatch.setattr(host_facts, "find_on_lan", nothing)
    monkeypatch.setattr(host_facts, "hears_itself", cut_off)
    assert await host_facts.lan_of(config_of(network=peers), KEY) == LanSeen(False, None, False, "no interface")


def test_the_runs_of_this_host_are_found_by_what_their_launchers_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_here, "found_dirs", lambda: found_dirs(tmp_path))
    with RunDir(tmp_path) as living_dir:
        [note] = living("r-1").living
        living_dir.announce(note)
        (living_dir.path.parent / "0badcafe").mkdir()
        seen = host_facts.runs_here()
        assert isinstance(seen, RunsHere)
        assert seen.living == (note,)
        assert [each.path.name for each in seen.dead] == ["0badcafe"]
        assert remove_dead_dir(seen.dead[0].path)
    assert host_facts.runs_here() == RunsHere((), ())


@pytest.mark.slow
async def test_a_device_that_no_host_has_is_found_by_asking_torch() -> None:
    seen = await host_facts.devices_of(config_of(device="cuda:77"), 200.0)
    found(host_checks.devices(seen), Condition.FAILED, "device = cuda:77, and torch ", "--device cpu")


def test_another_launcher_and_what_a_dead_one_has_left_are_found_and_the_run_that_is_meant_is_not() -> None:
    facts = nothing_seen(1.0)
    facts.runs = living("r-1")
    found(host_checks.runs(facts), Condition.WARNING, "run r-1 (servers, process 42)", "`shoal stop r-1`")
    facts.swarm = announcing("r-1")
    assert host_checks.runs(facts).condition is Condition.OK
    facts.runs = RunsHere((), (FoundDir(Path("/run/shoal-0/0badcafe"), None, is_alive=False),))
    found(host_checks.runs(facts), Condition.WARNING, "left of a dead run: /run/shoal-0/0badcafe", "`shoal clean`")
    facts.runs = RunsHere((), ())
    assert host_checks.runs(facts).condition is Condition.OK


def test_values_for_another_number_of_servers_are_found() -> None:
    config = config_of(servers={"num_servers": 3, "threads": "1,2"})
    judged = host_facts.configuration(config, {"servers.num_servers": "--num-servers"})
    found(judged, Condition.FAILED, "servers.threads", "one for each")
    assert host_facts.configuration(config_of(), {}) == ok("experiment_prefix = shoal, 0 keys are set")
