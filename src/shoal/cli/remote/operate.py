"""`shoal hosts`: what units of all hosts do, what they say, and their end."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import anyio
import msgspec

from shoal.cli.exits import DONE, FAILED
from shoal.cli.output import on_one_line, table_lines, without_controls
from shoal.cli.remote.container_units import logs_command
from shoal.cli.remote.hosts_file import HostsFile
from shoal.cli.remote.plan import client_name, servers_name
from shoal.cli.remote.probe import UNITS
from shoal.cli.remote.ssh import Ssh, connections
from shoal.cli.remote.unit_messages import LookAtUnits, Request, StopUnits, Units, UnitState
from shoal.cli.remote.units_there import NEWEST, ask_units, stop_other_kind, units_of_other_kind
from shoal.clock import Clock, utc_iso
from shoal.errors import HostFailed
from shoal.monitor.http.access import URL_FILE

_PATIENCE_S: Final = 30.0
_WITHIN_S: Final = 60.0
_OF_OTHER_KIND: Final = {
    True: "in a container, though the file names no image: `shoal up` replaces it",
    False: "not in a container, though the file names an image: `shoal up` replaces it",
}


async def ask_all(
    file: HostsFile, units: Mapping[str, tuple[str, ...]], request: Callable[[tuple[str, ...]], Request], clock: Clock
) -> dict[str, Units | HostFailed]:
    """Ask the units of hosts, all at once; return what each answers, or why it does not, in the file's order.

    Args:
        units: those that are meant, by host; where there are none the host is not asked, since it would take that for
            all that it has, of other swarms as well.
    """
    answers: dict[str, Units | HostFailed] = {name: Units(()) for name, meant in units.items() if not meant}

    async def ask(name: str, ssh: Ssh) -> None:
        asked, ended, others = request(units[name]), "", ()
        in_containers, within_s = file.image is not None, _WITHIN_S + 3 * _PATIENCE_S
        try:
            if isinstance(asked, StopUnits):
                names, patience_s = asked.names, asked.patience_s
                ended = await stop_other_kind(ssh, names, patience_s, in_containers=in_containers, within_s=within_s)
            else:
                others = await units_of_other_kind(ssh, units[name], in_containers=in_containers, within_s=within_s)
            answer = await ask_units(ssh, asked, in_containers=in_containers, within_s=within_s)
            words = "; ".join(filter(None, (ended, answer.changed)))
            answers[name] = msgspec.structs.replace(answer, changed=words, others=others)
        except HostFailed as error:
            # Where there are units of the other kind, there may be nothing yet that would have those of this one.
            answers[name] = Units((), changed=ended, others=others) if ended or others else error

    targets = file.destinations([name for name, meant in units.items() if meant])
    async with connections(targets, file.ssh_command, clock) as hosts, anyio.create_task_group() as tasks:
        for name, ssh in hosts.items():
            tasks.start_soon(ask, name, ssh)
    return {name: answers[name] for name in file.hosts if name in answers}


async def print_units(file: HostsFile, names: Collection[str], prefix: str, clock: Clock) -> int:
    """Print a line for each unit of each host; return 1 if a host does not answer, or a unit has failed."""
    rows: list[tuple[str, str, str]] = [("host", "unit", "is")]
    answers = await ask_all(file, {name: units_of(file, name, prefix) for name in names}, LookAtUnits, clock)
    is_well = True
    for name, answer in answers.items():
        if isinstance(answer, HostFailed):
            rows.append((name, "", on_one_line(f"not known: {answer}")))
            is_well = False
            continue
        for unit in answer.units:
            rows.append((name, on_one_line(unit.name), told(unit)))
            is_well = is_well and (unit.is_running or unit.code == 0)
        for unit in answer.others:
            rows.append((name, on_one_line(unit.name), f"{told(unit)} ({_OF_OTHER_KIND[file.image is None]})"))
    for line in table_lines(rows):
        print(line)
    return DONE if is_well else FAILED


def told(unit: UnitState) -> str:
    """Return how a unit is, in words."""
    said = on_one_line(unit.said[-1]) if unit.said else ""
    if not unit.since_unix_s:
        return "was not started here"
    if unit.is_running:
        state = f"runs since {utc_iso(unit.since_unix_s)}"
    elif unit.has_given_up:
        state = f"has failed again and again, with {unit.code} the last time, and is left so until `shoal up`"
    else:
        state = "is not there any more" if unit.code is None else f"has ended with {unit.code}"
    return f"{state}: {said}" if said else state


async def stop_units(
    file: HostsFile, names: Collection[str], prefix: str, say: Callable[[str, str], None], clock: Clock
) -> int:
    """End the units of hosts, the client first: with it the run ends, and servers leave by themselves."""
    client = file.swarm.client
    order: list[Sequence[str]] = [
        [name for name in names if name == client],
        [name for name in names if name != client],
    ]
    is_well = True
    for some in filter(None, order):
        # Also servers that the file does not have any more.
        units = {name: (*(client_name(prefix),) * (name == client), servers_name(prefix)) for name in some}
        answers = await ask_all(file, units, lambda meant: StopUnits(meant, _PATIENCE_S), clock)
        for name, answer in answers.items():
            if isinstance(answer, HostFailed):
                is_well = False
                say(name, f"error: {answer}")
            else:
                say(name, answer.changed or "nothing ran")
    return DONE if is_well else FAILED


async def print_logs(file: HostsFile, name: str, prefix: str, lines: int, clock: Clock, *, follows: bool) -> int:
    """Print the newest lines that the units of a host have said, and with `follows` those that come."""
    units = units_of(file, name, prefix)
    files = " ".join(f'"$HOME/{UNITS}/{unit}/output.log"' for unit in units)
    command = f"{NEWEST}exec tail -n {lines} {'-F ' if follows else ''}{files}"
    if file.image is not None:
        command = logs_command(units, lines, follows=follows)
    async with connections(file.destinations((name,)), file.ssh_command, clock) as hosts:
        async for line in hosts[name].lines(command):
            print(without_controls(line), flush=True)
    return DONE


async def show_dashboard(file: HostsFile, prefix: str, port: int, clock: Clock) -> int:
    """Let this machine's browser see the dashboard on the client's host, until Ctrl-C.

    Args:
        port: of this machine; if it is taken, any that is free.
    """
    client = file.swarm.client
    async with connections(file.destinations((client,)), file.ssh_command, clock) as hosts:
        there, query = await dashboard_address(hosts[client], client, prefix)
        here = _free_port(port)
        address = f"http://127.0.0.1:{here}/{query}"
        said = f"dashboard: {address}\nthe way there is open until Ctrl-C; the address can be opened once"
        await hosts[client].forward(here, there, lambda: print(said, flush=True))
    return DONE


async def dashboard_address(ssh: Ssh, client: str, prefix: str) -> tuple[int, str]:
    """Return the port of the dashboard on the client's host, and the query whose token lets the next browser in.

    Raises:
        HostFailed: the host does not answer, or has no dashboard.
    """
    folder = f"$HOME/{UNITS}/{client_name(prefix)}/logs"
    # Of the newest run: the address whose token is the next to be used. None of it is told but here.
    command = f'cat "$(ls -t "{folder}"/*/{URL_FILE} 2>/dev/null | head -n 1)"'
    done = await ssh.run(command, within_s=_WITHIN_S)
    found = re.search(r"^http://127\.0\.0\.1:(\d{1,5})/(\?token=[\w-]+)$", done.stdout.decode(errors="replace"), re.M)
    if done.code or found is None:
        raise HostFailed(
            f"the client on {client} has no dashboard (yet): there is one from the first step on, if it was "
            f"brought up with `extras: dashboard` in the file; `shoal hosts logs {client} -n 1000` says more"
        )
    return int(found[1]), found[2]


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise HostFailed("no port of this machine is free")


def units_of(file: HostsFile, name: str, prefix: str) -> tuple[str, ...]:
    """Return the names of the units that a host is to have."""
    client = (client_name(prefix),) if name == file.swarm.client else ()
    servers = (servers_name(prefix),) if file.hosts[name].servers else ()
    return (*client, *servers)
