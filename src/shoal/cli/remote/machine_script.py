"""`shoal machine-script`: a script that makes a bare machine ready to be a host of servers.

packages --> user --> firewall --> environment --> service; then a person gives it the invitation, by standard input

Debian, Ubuntu and what comes with a Jetson are known. A second run changes only what has changed. Nothing secret is in
it: what is printed may lie anywhere.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent
from typing import Final, Literal

from shoal.cli.exits import DONE
from shoal.cli.remote.own_wheel import own_wheel
from shoal.cli.remote.plan import FIRST_PYTHON
from shoal.config.host import MAX_PORT
from shoal.errors import ConfigError
from shoal.runtime.durable_files import put_whole

Target = Literal["bash", "cloud-init", "jetson"]
_UNIT: Final = "shoal-servers.service"
_PLACE: Final = "/usr/local/sbin/shoal-machine"
"""Where cloud-init writes the script that it then runs."""
_INTERPRETER: Final = re.compile(r"(/[\w./-]*)?python3(\.\d+)?")


@dataclass(frozen=True)
class RemoteMachine:
    """What is to become of a machine.

    Attributes:
        install: what pip installs, as it stands on its command line; empty: the script is given it.
        first_port: the first of those at which others reach them: one each for tensors, then one each for the DHT, and
            one for the scout. Below 32768, where Linux takes the ports of connections that it makes: a server that is
            started again has to find its port free.
        python: the interpreter that the environment is made with; a name without a folder is a package as well.
        sees_system_packages: the environment sees what that interpreter has, such as the torch of a Jetson.
    """

    install: str
    num_servers: int = 1
    first_port: int = 29100
    python: str = "python3"
    sees_system_packages: bool = False

    @property
    def ports(self) -> tuple[int, int]:
        """The first and the last port that the firewall has to let in."""
        return self.first_port, self.first_port + 2 * self.num_servers

    @property
    def settings(self) -> dict[str, str]:
        """The keys of the configuration that follow from it, as variables of the environment."""
        return {
            "SHOAL_SERVERS__NUM_SERVERS": str(self.num_servers),
            "SHOAL_NETWORK__DATA_PORT": str(self.first_port),
            "SHOAL_NETWORK__HOST_MADDRS": f"/ip4/0.0.0.0/tcp/{self.first_port + self.num_servers}",
        }


def print_machine_script(target: Target, machine: RemoteMachine, wheel_in: Path | None) -> int:
    """Print the script, and return the exit code.

    Args:
        wheel_in: the folder that gets what runs here as a wheel; the script installs it unless told otherwise. None:
            none does.

    Raises:
        ConfigError: there is no such machine, or the wheel cannot be written.
    """
    if wheel_in is not None:
        wheel = _write_wheel(wheel_in)
        machine = replace(machine, install=machine.install or f"./{wheel.name}")
    print(machine_text(target, machine), end="", flush=True)
    return DONE


def _write_wheel(folder: Path) -> Path:
    name, content = own_wheel()
    path = folder.expanduser() / name
    try:
        put_whole(path, content, lasting=False)
    except OSError as error:
        raise ConfigError(f"--wheel-in: cannot write {path}: {error.strerror}") from error
    print(f"wrote {path}: the script is run beside it", file=sys.stderr, flush=True)
    return path


def machine_text(target: Target, machine: RemoteMachine) -> str:
    """Return what is given to the machine: a script for its shell, or what cloud-init takes as user data.

    Raises:
        ConfigError: there is no such machine.
    """
    _require_possible(machine)
    if target == "cloud-init" and not machine.install:
        raise ConfigError("--install: cloud-init gives the script no argument, so say here what pip is to install")
    script = _script(machine)
    if target != "cloud-init":
        return script
    return (
        "#cloud-config\n"
        "write_files:\n"
        f"  - path: {_PLACE}\n"
        '    permissions: "0755"\n'
        "    content: |\n"
        f"{indent(script, '      ')}"
        "runcmd:\n"
        f"  - [{_PLACE}]\n"
    )


def service_text() -> str:
    """Return the service of the system that runs the servers, as deploy/systemd has it."""
    return Path(__file__).with_name(_UNIT).read_text(encoding="utf-8")


def _require_possible(machine: RemoteMachine) -> None:
    if "\n" in machine.install:
        raise ConfigError(f"--install {machine.install!r}: give what pip is to install, on one line")
    if machine.num_servers < 1:
        raise ConfigError(f"--num-servers {machine.num_servers}: a host of servers has at least one")
    first, last = machine.ports
    if first < 1 or last > MAX_PORT:
        raise ConfigError(
            f"--first-port {first}: {machine.num_servers} servers need the ports {first} to {last}, and there are "
            f"those from 1 to {MAX_PORT}"
        )
    if not _INTERPRETER.fullmatch(machine.python):
        raise ConfigError(f"--python {machine.python}: name it as python3.12, or with its folder")


def _script(machine: RemoteMachine) -> str:
    first, last = machine.ports
    values = {
        "INSTALL": shlex.quote(machine.install),
        "PYTHON": machine.python,
        "PACKAGES": " ".join(_packages(machine.python)),
        "SEES": "--system-site-packages " if machine.sees_system_packages else "",
        "OWN_TORCH": _OWN_TORCH if machine.sees_system_packages else "",
        "LEAST": ".".join(map(str, FIRST_PYTHON)),
        "MAJOR_MINOR": ", ".join(map(str, FIRST_PYTHON)),
        "PORTS": f"{first}:{last}/tcp",
        "UNIT": service_text().rstrip("\n"),
        "SETTINGS": "\n".join(f"Environment={name}={value}" for name, value in machine.settings.items()),
    }
    return re.sub("@([A-Z_]+)@", lambda found: values[found[1]], _SCRIPT)


def _packages(python: str) -> list[str]:
    """The packages of the distribution: those of an interpreter with a folder are its user's business."""
    of_python = [] if "/" in python else [python, f"{python}-venv"]
    return [*of_python, "ca-certificates"]


_OWN_TORCH: Final = """
# Another build than the one that came with this machine would not see its GPU.
"$python" -c 'import torch' 2>/dev/null || fail "$python has no torch: install the one for this machine first"
"""

_SCRIPT: Final = """\
#!/bin/sh
# Makes this machine ready to be a host of servers of shoal. It may run again: what is there already stays as it is.
# The swarm is told to it afterwards, by an invitation; nothing in this file is secret.
set -eu
umask 022
install=@INSTALL@
# `sh machine.sh ./shoal.whl` installs that.
[ $# = 0 ] || install=$1
python=@PYTHON@
home=/var/lib/shoal

fail() {
  echo "shoal-machine: $1" >&2
  exit 1
}

[ -n "$install" ] || fail "say what pip is to install: sh $0 ./shoal-0.1.0-py3-none-any.whl"
[ "$(id -u)" = 0 ] || fail "run it as root"
command -v apt-get >/dev/null || fail "there is no apt-get: it knows Debian and Ubuntu alone"

missing=""
for package in @PACKAGES@; do
  case "$(dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null || true)" in
    "install ok installed") ;;
    *) missing="$missing $package" ;;
  esac
done
if [ -n "$missing" ]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  # shellcheck disable=SC2086  # several words
  apt-get install -y -qq --no-install-recommends $missing
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (@MAJOR_MINOR@))' ||
  fail "$python is older than Python @LEAST@: shoal machine-script --python names another one"
@OWN_TORCH@
id shoal >/dev/null 2>&1 ||
  useradd --system --user-group --home-dir "$home" --no-create-home --shell /usr/sbin/nologin shoal
install -d -o shoal -g shoal -m 0700 "$home"
# Those who may use GPUs, where the machine has such groups.
for group in video render; do
  if getent group "$group" >/dev/null; then usermod --append --groups "$group" shoal; fi
done

if command -v ufw >/dev/null && ufw status | grep -q '^Status: active'; then
  ufw allow @PORTS@ comment 'servers of shoal'
fi

# It belongs to root: whatever runs in it cannot change it.
"$python" -m venv @SEES@/opt/shoal
pip() {
  /opt/shoal/bin/python -m pip install --quiet --no-cache-dir --disable-pip-version-check --root-user-action=ignore "$@"
}
pip "$install"
# Of a wheel pip sees the version alone, and would keep another one of the same.
case "$install" in *.whl | *.whl"["*) pip --no-deps --force-reinstall "$install" ;; esac
/opt/shoal/bin/shoal --version

install -d /etc/shoal /etc/systemd/system/shoal-servers.service.d
cat >/etc/systemd/system/shoal-servers.service <<'END_OF_UNIT'
@UNIT@
END_OF_UNIT
# What is in /etc/shoal/servers.env counts more than this.
cat >/etc/systemd/system/shoal-servers.service.d/machine.conf <<'END_OF_SETTINGS'
[Service]
@SETTINGS@
END_OF_SETTINGS
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  systemctl enable --quiet shoal-servers.service
fi

[ ! -e "$home/.config/shoal/joined.json" ] || exit 0
cat <<'END_OF_HINT'
This machine is ready. As root, give it an invitation by standard input, as `shoal invite` prints it, and start it:
  runuser -u shoal -- env HOME=/var/lib/shoal /opt/shoal/bin/shoal join --invitation=- --remember-only
  systemctl start shoal-servers
END_OF_HINT
"""
