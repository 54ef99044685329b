"""Asks what looks after a host's units, over ssh: a process of shoal (`unit`), or what runs containers.

A file that names an image now, and did not before, or the other way round, has other units on its hosts still: they
are of the *other kind*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from shoal.cli.remote.container_units import ask_containers
from shoal.cli.remote.probe import BEGUN, INSTALLED, NOTE, UNITS
from shoal.cli.remote.ssh import Ssh, last_line
from shoal.cli.remote.unit_messages import LookAtUnits, Request, StopUnits, Units, UnitState
from shoal.errors import MALFORMED, HostFailed

NEWEST: Final = (
    f'newest=$(ls -t "$HOME"/{INSTALLED}/*/whole 2>/dev/null | head -n 1); newest=${{newest%whole}}; '
    '[ -n "$newest" ] || '
    "{ echo 'nothing was brought up there: shoal up' >&2; exit 1; }; "
)
"""Finds the installation that was made last, for who does not know which one that was."""
UNIT: Final = "-m shoal.cli.remote.unit"


async def ask_units(
    ssh: Ssh, request: Request, python: str = "", *, in_containers: bool = False, within_s: float = 60.0
) -> Units:
    """Return what the host answers.

    Args:
        python: of the installation there; empty: of the newest one.
        in_containers: nothing is installed there; units are containers.

    Raises:
        HostFailed: it cannot be reached, there is no installation, or what was asked cannot be done there.
    """
    if in_containers:
        return await ask_containers(ssh, request, within_s=within_s)
    command = f"exec {python} {UNIT}" if python else f'{NEWEST}exec "$newest"bin/python {UNIT}'
    done = await ssh.run(command, msgspec.json.encode(request), within_s=within_s)
    if done.code:
        raise HostFailed(last_line(done.stderr) or f"its units do not answer: exit code {done.code}")
    try:
        # A login shell may have something to say before.
        return msgspec.json.decode(done.stdout.splitlines()[-1] if done.stdout else b"", type=Units)
    except MALFORMED as error:
        raise HostFailed("its units answer in another version: `shoal up` brings this one there") from error


async def running_of_other_kind(
    ssh: Ssh, names: Sequence[str], *, in_containers: bool, within_s: float = 60.0
) -> tuple[str, ...]:
    """Return the names of those in `units_of_other_kind`; raises as that does."""
    found = await units_of_other_kind(ssh, names, in_containers=in_containers, within_s=within_s)
    return tuple(unit.name for unit in found)


async def units_of_other_kind(
    ssh: Ssh, names: Sequence[str], *, in_containers: bool, within_s: float = 60.0
) -> tuple[UnitState, ...]:
    """Return those units that run on a host as something else than its file says.

    Args:
        in_containers: as the file says.

    Raises:
        HostFailed: the host cannot be reached.
    """
    mark = NOTE if in_containers else BEGUN
    # Most hosts have never had any: that is known without what would look after them.
    looks = "; ".join(f'[ ! -e "$HOME/{UNITS}/{name}/{mark}" ] || echo "there={name}"' for name in names)
    there = (await ssh.run(looks, within_s=within_s)).stdout.decode(errors="replace").splitlines()
    known = tuple(name for name in names if f"there={name}" in there)
    if not known:
        return ()
    try:
        looked = await ask_units(ssh, LookAtUnits(known), in_containers=not in_containers, within_s=within_s)
    except HostFailed:
        return ()  # what would run them is gone, or does not work any more
    return tuple(unit for unit in looked.units if unit.is_running)


async def stop_other_kind(
    ssh: Ssh, names: Sequence[str], patience_s: float, *, in_containers: bool, within_s: float = 60.0
) -> str:
    """End the units that run on a host as something else than its file says; return what was done, in words.

    Raises:
        HostFailed: that is not possible.
    """
    running = await running_of_other_kind(ssh, names, in_containers=in_containers, within_s=within_s)
    if not running:
        return ""
    ended = await ask_units(ssh, StopUnits(running, patience_s), in_containers=not in_containers, within_s=within_s)
    return ended.changed
