"""`shoal machine-script`: what it prints, and what that does to a machine whose commands only note their calls."""

from __future__ import annotations

import io
import os
import re
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from shoal.cli import main
from shoal.cli.host_network import HostNetwork
from shoal.cli.remote.machine_script import RemoteMachine, Target, machine_text, service_text
from shoal.cli.remote.own_wheel import own_wheel
from shoal.config import load_config
from shoal.control.invitation import MARK
from shoal.errors import ConfigError

ROOT = Path(__file__).parents[4]
MACHINE = RemoteMachine("shoal.whl", num_servers=2)
MAX_USER_DATA_BYTES = 16 * 1024
"""Of the strictest cloud."""

_FAKES = {
    "id": '[ "$1" = -u ] && echo 0; [ -e "$ROOT/user" ] || [ "$1" = -u ]',
    "useradd": 'touch "$ROOT/user"',
    "getent": '[ "$2" = video ]',
    "usermod": "",
    "dpkg-query": '[ -e "$ROOT/packages" ] && echo install ok installed',
    "apt-get": '[ "$1" = update ] || touch "$ROOT/packages"',
    "ufw": '[ "$1" != status ] || echo Status: active',
    "systemctl": "",
    # Owners are those of the test.
    "install": 'for each; do case $each in /*) mkdir -p "$each";; esac; done',
    # With the environment that `python3 -m venv` makes.
    "python3": """[ "$2" = venv ] || exit 0
for folder; do :; done
mkdir -p "$folder/bin"
cp "$0" "$folder/bin/python"
cp "$0" "$folder/bin/shoal"
""",
}


class FakeMachine:
    """A machine in a folder: its commands note that they were called, and little more."""

    def __init__(self, root: Path) -> None:
        self._root, self._commands = root, root / "commands"
        self._commands.mkdir()
        for name, does in _FAKES.items():
            path = self._commands / name
            path.write_text(f'#!/bin/sh\necho "{name} $*" >>"$ROOT/called"\n{does}\n')
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        (root / "run/systemd/system").mkdir(parents=True)

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a script, all of whose absolute paths are below the folder."""
        inside = re.sub(r"(?<![\w./$}])/(opt|etc|var|run)/", rf"{self._root}/\1/", script)
        path = self._root / "machine.sh"
        path.write_text(inside)
        environment = {"PATH": f"{self._commands}:{os.environ['PATH']}", "ROOT": str(self._root)}
        return subprocess.run(
            ["sh", str(path), *arguments], cwd=self._root, env=environment, capture_output=True, text=True, check=False
        )

    def called(self) -> list[str]:
        """Return what was called since the last question, with paths as on a machine."""
        path = self._root / "called"
        lines = path.read_text().replace(str(self._root), "").splitlines()
        path.unlink()
        return lines

    def files(self) -> dict[str, str]:
        """Return what lies in the machine's own folders."""
        paths = [path for name in ("etc", "opt") for path in (self._root / name).rglob("*") if path.is_file()]
        return {str(path.relative_to(self._root)): path.read_text() for path in paths}


@pytest.mark.parametrize("target", ["bash", "jetson"])
def test_a_script_is_one_for_a_plain_shell(target: Target) -> None:
    machine = RemoteMachine("it's here.whl", sees_system_packages=target == "jetson")
    text = machine_text(target, machine)
    done = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search("@[A-Z_]+@", text) is None


def test_a_second_run_changes_nothing(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    done = machine.run(machine_text("bash", MACHINE))
    assert done.returncode == 0, done.stderr
    assert "shoal join --invitation=- --remember-only" in done.stdout
    first, files = machine.called(), machine.files()
    assert "ufw allow 29100:29104/tcp comment servers of shoal" in first
    assert "usermod --append --groups video shoal" in first
    assert "systemctl enable --quiet shoal-servers.service" in first
    assert any(line.startswith("useradd ") for line in first)
    assert any(line.startswith("apt-get install ") for line in first)
    again = machine.run(machine_text("bash", MACHINE))
    assert again.returncode == 0, again.stderr
    second = machine.called()
    assert machine.files() == files
    assert not [line for line in second if line.startswith(("useradd", "apt-get"))]
    assert {path for path in files if path.startswith("etc/")} == {
        "etc/systemd/system/shoal-servers.service",
        "etc/systemd/system/shoal-servers.service.d/machine.conf",
    }


def test_a_machine_that_has_joined_is_not_told_to_join(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    joined = tmp_path / "var/lib/shoal/.config/shoal/joined.json"
    joined.parent.mkdir(parents=True)
    joined.touch()
    done = machine.run(machine_text("bash", MACHINE))
    assert done.returncode == 0, done.stderr
    assert "invitation" not in done.stdout


def test_what_is_installed_may_be_said_when_it_runs(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    script = machine_text("bash", RemoteMachine(""))
    refused = machine.run(script)
    assert refused.returncode == 1
    assert "say what pip is to install" in refused.stderr
    assert machine.run(script, "./other.whl").returncode == 0
    assert any(line.endswith("./other.whl") for line in machine.called())


def test_a_wheel_of_the_same_version_is_installed_nevertheless(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    assert machine.run(machine_text("bash", MACHINE)).returncode == 0
    pips = [line for line in machine.called() if " pip " in line]
    assert ["--force-reinstall" in line for line in pips] == [False, True]
    assert machine.run(machine_text("bash", RemoteMachine("git+https://example.org/shoal"))).returncode == 0
    assert not [line for line in machine.called() if "--force-reinstall" in line]


def test_the_service_is_the_one_of_the_checkout_and_travels_in_the_wheel() -> None:
    text = (ROOT / "deploy/systemd/shoal-servers.service").read_text()
    assert text == service_text()
    assert f"<<'END_OF_UNIT'\n{text}END_OF_UNIT\n" in machine_text("bash", MACHINE)
    with zipfile.ZipFile(io.BytesIO(own_wheel()[1])) as wheel:
        assert wheel.read("shoal/cli/remote/shoal-servers.service").decode() == text


def test_cloud_init_writes_the_very_script_and_runs_it() -> None:
    text = machine_text("cloud-init", MACHINE)
    assert text.startswith("#cloud-config\n")
    assert len(text.encode()) < MAX_USER_DATA_BYTES
    said = yaml.safe_load(text)
    [file] = said["write_files"]
    assert file["content"] == machine_text("bash", MACHINE)
    assert file["permissions"] == "0755"
    assert said["runcmd"] == [[file["path"]]]


def test_on_a_jetson_the_torch_that_came_with_it_is_seen(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["machine-script", "--target=jetson", "--install=shoal.whl"]) == 0
    script = capsys.readouterr().out
    assert '"$python" -m venv --system-site-packages /opt/shoal' in script
    assert "--system-site-packages" not in machine_text("bash", MACHINE)
    monkeypatch.setitem(_FAKES, "python3", 'case "$*" in *"import torch"*) exit 1;; esac')
    done = FakeMachine(tmp_path).run(script)
    assert done.returncode == 1
    assert "install the one for this machine first" in done.stderr


@pytest.mark.parametrize("num_servers", [1, 3])
def test_the_ports_of_the_firewall_are_those_at_which_the_servers_are_reached(num_servers: int) -> None:
    machine = RemoteMachine("shoal.whl", num_servers=num_servers, first_port=50010)
    config = load_config(None, (), machine.settings)
    assert config.num_servers == num_servers
    network = HostNetwork(config.network)
    ports = [network.listen_tcp(place)[1] for place in range(num_servers)]
    # The scout has a DHT node as well, after those of the servers.
    maddrs = [maddr for place in range(num_servers + 1) for maddr in network.dht(place).host_maddrs]
    ports += [int(maddr.rpartition("/")[2]) for maddr in maddrs]
    first, last = machine.ports
    assert sorted(ports) == list(range(first, last + 1))


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (RemoteMachine("x", num_servers=0), "--num-servers 0"),
        (RemoteMachine("x", num_servers=20, first_port=65500), "65500 to 65540"),
        (RemoteMachine("x", first_port=0), "--first-port 0"),
        (RemoteMachine("x\nreboot"), "on one line"),
        (RemoteMachine("x", python="python3; reboot"), "--python"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(machine: RemoteMachine, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        machine_text("bash", machine)


def test_cloud_init_has_to_be_told_what_is_installed() -> None:
    with pytest.raises(ConfigError, match="--install"):
        machine_text("cloud-init", RemoteMachine(""))


def test_an_interpreter_with_a_folder_is_no_package() -> None:
    assert "python3.12 python3.12-venv ca-certificates" in machine_text("bash", RemoteMachine("x", python="python3.12"))
    assert "for package in ca-certificates;" in machine_text(
        "bash", RemoteMachine("x", python="/opt/python3.12/bin/python3")
    )


def test_what_runs_here_is_written_as_a_wheel_beside_the_script(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["machine-script", f"--wheel-in={tmp_path}"]) == 0
    [wheel] = tmp_path.iterdir()
    assert zipfile.is_zipfile(wheel)
    printed = capsys.readouterr()
    assert f"\ninstall=./{wheel.name}\n" in printed.out
    assert MARK not in printed.out
    assert str(wheel) in printed.err


def test_a_folder_that_is_none_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["machine-script", f"--wheel-in={tmp_path / 'none'}"]) == 2
    assert "--wheel-in: cannot write" in capsys.readouterr().err
