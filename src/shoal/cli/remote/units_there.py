"""Asks what looks after a host's units, over ssh: a process of shoal (`unit`), or what runs containers."""

from __future__ import annotations

from typing import Final

import msgspec

from shoal.cli.remote.container_units import ask_containers
from shoal.cli.remote.probe import INSTALLED
from shoal.cli.remote.ssh import Ssh, last_line
from shoal.cli.remote.unit_messages import Request, Units
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
