"""What a host has, before anything is there: asked with a POSIX shell alone, in one round trip."""

from __future__ import annotations

import re
import shlex
from typing import Final

import msgspec

from shoal.cli.remote.ssh import Ssh, last_line
from shoal.clock import Clock
from shoal.errors import HostFailed

_WITHIN_S: Final = 60.0
HOME: Final = ".local/share/shoal"
"""On a host, below the user's home: installation and units."""
INSTALLED: Final = f"{HOME}/installed"
"""Each installation is in a folder there; it has a file `whole` when it is."""
UNITS: Final = f"{HOME}/units"
"""Each unit is in a folder there."""
NOTE: Final = "unit.json"
"""In the folder of a unit that an installation has started: what it is."""
BEGUN: Final = "begun"
"""In the folder of a unit that is a container: is as old as that."""

_SCRIPT: Final = """
echo "home=$HOME"
echo "system=$(uname -s) $(uname -m)"
echo "unix_s=$(date +%s)"
python=$(command -v PYTHON) && echo "python=$python"
[ -n "$python" ] && "$python" -c '
import importlib.util, sys
print("python_version=%d.%d" % sys.version_info[:2])
print("venv=" + str(int(all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")))))'
uv=$(command -v uv || ls "$HOME/.local/bin/uv" 2>/dev/null) && echo "uv=$uv"
folder=$HOME/FOLDER
while [ ! -e "$folder" ]; do folder=$(dirname "$folder"); done
[ -w "$folder" ] && echo writable=1
echo "free_kb=$(df -Pk "$HOME" | awk 'NR == 2 { print $4 }')"
for each in "$HOME"/INSTALLED/*/whole; do [ -e "$each" ] && echo "installed=$(basename "$(dirname "$each")")"; done
command -v nvidia-smi >/dev/null && echo "gpus=$(nvidia-smi -L | grep -c ^GPU)"
systemctl --user show-environment >/dev/null 2>&1 && echo user_units=1
[ -e "/var/lib/systemd/linger/$(id -un)" ] && echo lingers=1
"""
_CONTAINERS: Final = """
echo "user=$(id -u):$(id -g)"
engine=$(command -v podman || command -v docker) || exit 0
echo "engine=$engine"
said=$("$engine" info 2>&1 >/dev/null) || echo "engine_says=$(printf '%s\\n' "$said" | tail -n 1) "
"$engine" image inspect IMAGE >/dev/null 2>&1 && echo image=1
"$engine" info --format '{{.SecurityOptions}}' 2>/dev/null | grep -q rootless && echo rootless=1
case "$engine" in
  */podman) ls /etc/cdi/nvidia.* /var/run/cdi/nvidia.* 2>/dev/null | grep -q . && echo lends_gpus=1 ;;
  *) command -v nvidia-ctk >/dev/null && echo lends_gpus=1 ;;
esac
"""


class Containers(msgspec.Struct, frozen=True):
    """What a host can do with an image of a container.

    Attributes:
        engine: the path of podman, or else of docker; empty: there is none.
        says: its complaint; empty: it has none.
        has_image: whether the image that was asked for is there.
        user: the numbers of user and group, as 1000:1000.
        is_rootless: docker runs as the user.
        lends_gpus: whether NVIDIA's GPUs can be lent to a container.
    """

    engine: str = ""
    says: str = ""
    has_image: bool = False
    user: str = ""
    is_rootless: bool = False
    lends_gpus: bool = False

    @property
    def is_podman(self) -> bool:
        """Whether the engine is podman."""
        return self.engine.endswith("/podman")


class HostFacts(msgspec.Struct, frozen=True):
    """What a host has.

    Attributes:
        system: its kernel and machine, as `uname` says them.
        python: the path of the interpreter that was asked for; empty: there is none.
        python_version: such as 3.11.
        has_venv: whether it can make environments with pip in them.
        uv: the path of uv, which installs faster; empty: there is none.
        is_writable: whether the folder of the installation can be made.
        free_kb: on the disk of the home directory.
        installed: the installations of shoal that are whole.
        gpus: of NVIDIA, as its driver counts them.
        has_user_units: whether there is a systemd of the user's own.
        lingers: whether that stays when the user has left.
        ahead_s: of the host's clock before ours.
        containers: what was asked where there is an image to run.
    """

    home: str
    system: str
    python: str
    python_version: str
    has_venv: bool
    uv: str
    is_writable: bool
    free_kb: int
    installed: tuple[str, ...]
    gpus: int
    has_user_units: bool
    lingers: bool
    ahead_s: float
    containers: Containers = Containers()


def probe_script(python: str, image: str | None = None) -> str:
    """Return what the shell is told."""
    script = _SCRIPT.replace("PYTHON", shlex.quote(python), 1).replace("FOLDER", HOME).replace("INSTALLED", INSTALLED)
    more = "" if image is None else _CONTAINERS.replace("IMAGE", shlex.quote(image))
    return f"{script}{more}exit 0\n"


async def probe(ssh: Ssh, python: str, clock: Clock, image: str | None = None) -> HostFacts:
    """Return what a host has.

    Args:
        python: the interpreter that is to be used there.
        image: that is to be run there instead.

    Raises:
        HostFailed: it cannot be reached, or has no POSIX shell.
    """
    done = await ssh.run("sh -s", probe_script(python, image).encode(), within_s=_WITHIN_S)
    lines = [line.partition("=") for line in done.stdout.decode(errors="replace").splitlines()]
    said = {name: value for name, _, value in lines}
    if "unix_s" not in said:
        raise HostFailed(f"its shell does not take commands: {last_line(done.stderr) or 'it says nothing'}")
    version = said.get("python_version", "")
    return HostFacts(
        home=said.get("home", ""),
        system=said.get("system", ""),
        python=said.get("python", ""),
        python_version=version if re.fullmatch(r"\d{1,3}\.\d{1,3}", version) else "",
        has_venv=said.get("venv") == "1",
        uv=said.get("uv", ""),
        is_writable=said.get("writable") == "1",
        free_kb=_number(said.get("free_kb", "")),
        installed=tuple(value for name, _, value in lines if name == "installed"),
        gpus=_number(said.get("gpus", "")),
        has_user_units=said.get("user_units") == "1",
        lingers=said.get("lingers") == "1",
        ahead_s=_number(said["unix_s"]) - clock.unix_s(),
        containers=Containers(
            engine=said.get("engine", ""),
            says=said.get("engine_says", ""),
            has_image=said.get("image") == "1",
            user=said.get("user", ""),
            is_rootless=said.get("rootless") == "1",
            lends_gpus=said.get("lends_gpus") == "1",
        ),
    )


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else 0
