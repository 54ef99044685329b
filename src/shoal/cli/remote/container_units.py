"""Asks podman or docker on a host for what `unit` does where shoal is installed: starts, ends and looks at units.

Each unit is a container. The engine starts one again that has failed, keeps what it says, and knows how it has ended.
"""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from shoal.cli.remote.container import ENGINE, MAKE_FOLDERS, MOST_STARTS, container_name
from shoal.cli.remote.probe import BEGUN, UNITS
from shoal.cli.remote.ssh import Done, Ssh, last_line
from shoal.cli.remote.unit_messages import (
    AwaitPeers,
    LookAtUnits,
    Request,
    StartUnit,
    StopUnits,
    Unit,
    Units,
    UnitState,
)
from shoal.errors import MALFORMED, HostFailed

_LABEL: Final = "shoal.unit"
"""Of a container: the digest of the unit that it was started as."""
_RUNNING: Final = {"running", "restarting", "paused", "stopping"}
_MARK: Final = "shoal-says"
_KILLED: Final = 137
_REPLACED_S: Final = 40.0
_NOT_THERE: Final = re.compile(r"no such (container|object)", re.IGNORECASE)
_PEERS: Final = """
cd "$HOME/FOLDER" || exit 1
tries=0
while [ $tries -lt SECONDS ]; do
  [ -z "$(find logs -maxdepth 2 -name initial_peers.txt -newer BEGUN)" ] || { echo known; exit 0; }
  [ "$("$engine" container inspect --format '{{.State.Running}}' NAME)" = true ] || exit 0
  sleep 1
  tries=$((tries + 1))
done
"""


class _State(msgspec.Struct, rename="pascal"):
    """As both engines say it."""

    status: str
    exit_code: int
    started_at: datetime.datetime
    pid: int = 0


class _Config(msgspec.Struct, rename="pascal"):
    labels: dict[str, str] | None = None
    image: str = ""


class _Container(msgspec.Struct, rename="pascal"):
    state: _State
    config: _Config
    restart_count: int = 0


async def ask_containers(ssh: Ssh, request: Request, *, within_s: float) -> Units:
    """Return what the host answers.

    Raises:
        HostFailed: it cannot be reached, it runs no containers, or what was asked cannot be done there.
    """
    match request:
        case LookAtUnits():
            found = [await _look(ssh, name, request.num_lines, within_s) for name in request.names]
            version = next((image for _, image in found if image), "")
            return Units(tuple(state for state, _ in found), version=version)
        case StartUnit():
            return await _start(ssh, request, within_s)
        case StopUnits():
            return await _stop(ssh, request, within_s)
        case AwaitPeers():
            script = _PEERS.replace("FOLDER", f"{UNITS}/{request.name}").replace("NAME", container_name(request.name))
            script = script.replace("SECONDS", f"{request.within_s:.0f}").replace("BEGUN", BEGUN)
            said = await _told(ssh, script, within_s)
            state, _ = await _look(ssh, request.name, 5, within_s)
            return Units((state,), changed="knows its addresses" if said.strip() else "")


def logs_command(units: Sequence[str], num_lines: int, *, follows: bool) -> str:
    """Return what has a shell print the newest lines that units have said, and with `follows` those that come."""
    follow, meanwhile = ("--follow ", " &") if follows else ("", ";")
    command = f'"$engine" logs {follow}--tail {num_lines}'
    parts = [f'{{ echo "==> {unit} <=="; {command} {container_name(unit)} 2>&1; }}{meanwhile}' for unit in units]
    return f"{ENGINE}{' '.join(parts)} wait"


async def _start(ssh: Ssh, request: StartUnit, within_s: float) -> Units:
    unit = request.unit
    now, _ = await _look(ssh, unit.name, 1, within_s)
    verb = "started"
    if now.is_running:
        if now.digest == unit.digest():
            return Units((now,))
        if not request.replaces:
            return Units((now,), differs=True)
        await _end(ssh, [unit.name], _REPLACED_S, within_s)
        verb = "started anew"
    await _told(ssh, _start_script(unit, request.this_time), within_s)
    state, _ = await _look(ssh, unit.name, 1, within_s)
    return Units((state,), changed=verb)


def _start_script(unit: Unit, this_time: Sequence[str]) -> str:
    engine, run, *rest = unit.argv
    argv = (engine, run, "--label", f"{_LABEL}={unit.digest()}", *rest, *this_time)
    writes = "".join(f"printf %s {shlex.quote(text)} > {shlex.quote(name)}\n" for name, text in unit.files.items())
    return (
        f'set -e\n{MAKE_FOLDERS} "$HOME/{UNITS}/{unit.name}/logs"\ncd "$HOME/{UNITS}/{unit.name}"\n{writes}'
        # One that has ended was kept for what it has said.
        f'"$engine" rm {container_name(unit.name)} > /dev/null 2>&1 || true\n'
        f": > {BEGUN}\n{shlex.join(argv)} < /dev/null > /dev/null\n"
    )


async def _stop(ssh: Ssh, request: StopUnits, within_s: float) -> Units:
    looked = [await _look(ssh, name, 1, within_s) for name in request.names]
    running = [state.name for state, _ in looked if state.is_running]
    if running:
        # Twice the time, since an engine interrupts once.
        await _end(ssh, running, 2 * request.patience_s, within_s)
    units = tuple([(await _look(ssh, name, 1, within_s))[0] for name in request.names])
    ended = [unit for unit in units if unit.name in running]
    words = [f"{unit.name} {'was killed: it did not end' if unit.code == _KILLED else 'has ended'}" for unit in ended]
    return Units(units, changed="; ".join(words))


async def _end(ssh: Ssh, names: Sequence[str], patience_s: float, within_s: float) -> None:
    containers = " ".join(map(container_name, names))
    await _told(ssh, f'"$engine" stop -t {patience_s:.0f} {containers} > /dev/null', within_s)


async def _look(ssh: Ssh, name: str, num_lines: int, within_s: float) -> tuple[UnitState, str]:
    """Return how a unit is, and its image."""
    container = container_name(name)
    done = await _run(ssh, f'"$engine" container inspect {container}', within_s)
    if done.code and _NOT_THERE.search(done.stderr):
        return UnitState(name, False, None, 0.0, 0), ""
    _require_done(done)
    try:
        [found] = msgspec.json.decode(done.stdout, type=list[_Container])
    except MALFORMED as error:
        raise HostFailed(f"what runs containers there says something else of {container}: {error}") from error
    said = await _told(ssh, f'"$engine" logs --tail {num_lines} {container} 2>&1', within_s)
    state, is_running = found.state, found.state.status in _RUNNING
    unit = UnitState(
        name,
        is_running,
        None if is_running else state.exit_code,
        max(0.0, state.started_at.timestamp()),
        state.pid,
        tuple(said.splitlines()),
        (found.config.labels or {}).get(_LABEL, ""),
        has_given_up=not is_running and bool(state.exit_code) and found.restart_count >= MOST_STARTS,
    )
    return unit, found.config.image


async def _told(ssh: Ssh, script: str, within_s: float) -> str:
    """Have the host's shell run a script that may use `$engine`; return what it prints.

    Raises:
        HostFailed: it has failed.
    """
    done = await _run(ssh, script, within_s)
    _require_done(done)
    return done.stdout.decode(errors="replace")


async def _run(ssh: Ssh, script: str, within_s: float) -> Done:
    done = await ssh.run("sh -s", f"echo {_MARK}\n{ENGINE}\n{script}\n".encode(), within_s=within_s)
    # A login shell may have something to say before.
    return replace(done, stdout=done.stdout.partition(f"{_MARK}\n".encode())[2])


def _require_done(done: Done) -> None:
    if done.code:
        raise HostFailed(last_line(done.stderr) or f"exit code {done.code}")
