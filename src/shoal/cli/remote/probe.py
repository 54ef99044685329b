"""What a host has, before anything is there: asked with a POSIX shell alone, in one round trip. And how its units are:
asked of the process that looks after them (`unit`), over ssh."""

from __future__ import annotations

import re
import shlex
from typing import Final

import msgspec

from shoal.cli.remote.ssh import Ssh, last_line
from shoal.cli.remote.unit_messages import Request, Units
from shoal.clock import Clock
from shoal.errors import HostFailed

_WITHIN_S: Final = 60.0
HOME: Final = ".local/share/shoal"
"""On a host, below the user's home: installation and units."""
INSTALLED: Final = f"{HOME}/installed"
"""Each installation is in a folder there; it has a file `whole` when it is."""
UNITS: Final = f"{HOME}/units"
"""Each unit is in a folder there."""

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
exit 0
"""

NEWEST: Final = (
    f'newest=$(ls -t "$HOME"/{INSTALLED}/*/whole 2>/dev/null | head -n 1); newest=${{newest%whole}}; '
    '[ -n "$newest" ] || '
    "{ echo 'nothing was brought up there: shoal up' >&2; exit 1; }; "
)
"""Finds the installation that was made last, for who does not know which one that was."""
UNIT: Final = "-m shoal.cli.remote.unit"


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


def probe_script(python: str) -> str:
    """Return what the shell is told."""
    script = _SCRIPT.replace("PYTHON", shlex.quote(python), 1)
    return script.replace("FOLDER", HOME).replace("INSTALLED", INSTALLED)


async def probe(ssh: Ssh, python: str, clock: Clock) -> HostFacts:
    """Return what a host has.

    Args:
        python: the interpreter that is to be used there.

    Raises:
        HostFailed: it cannot be reached, or has no POSIX shell.
    """
    done = await ssh.run("sh -s", probe_script(python).encode(), within_s=_WITHIN_S)
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
    )


def _number(text: str) -> int:
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else 0


async def ask_units(ssh: Ssh, request: Request, python: str = "", *, within_s: float = 60.0) -> Units:
    """Return what the host answers.

    Args:
        python: of the installation there; empty: of the newest one.

    Raises:
        HostFailed: it cannot be reached, there is no installation, or what was asked cannot be done there.
    """
    command = f"exec {python} {UNIT}" if python else f'{NEWEST}exec "$newest"bin/python {UNIT}'
    done = await ssh.run(command, msgspec.json.encode(request), within_s=within_s)
    if done.code:
        raise HostFailed(last_line(done.stderr) or f"its units do not answer: exit code {done.code}")
    try:
        # A login shell may have something to say before.
        return msgspec.json.decode(done.stdout.splitlines()[-1] if done.stdout else b"", type=Units)
    except msgspec.MsgspecError as error:
        raise HostFailed("its units answer in another version: `shoal up` brings this one there") from error
