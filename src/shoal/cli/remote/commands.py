"""The commands `shoal up`, `shoal hosts` and `shoal machine-script`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import anyio
from cyclopts import App, Parameter

from shoal.cli.arguments import SET_UP, Switch
from shoal.cli.exits import FAILED, say_error
from shoal.cli.output import on_one_line
from shoal.clock import SystemClock
from shoal.errors import ConfigError, HostFailed

if TYPE_CHECKING:
    from shoal.cli.remote.hosts_file import DescribedSwarm, HostsFile

_PORT: Final = 8787
_USUAL_FILE: Final = Path("hosts.yaml")
_HostsPath = Annotated[Path, Parameter(name="--file", help="The file of all hosts, see docs/hosts.md.")]
_Names = Annotated[str, Parameter(help="Hosts, as the file names them; none: all.")]

hosts_app = App(name="hosts", group=SET_UP, help="Look after the hosts that `shoal up` has brought up.")


def up(
    file: Annotated[Path, Parameter(help="The file of all hosts, see docs/hosts.md.")] = _USUAL_FILE,
    *,
    dry_run: Annotated[bool, Switch, Parameter(help="Look at the hosts, and print what would be done there.")] = False,
    resume: Annotated[
        bool, Switch, Parameter(help="The client goes on from the newest checkpoint that its host has.")
    ] = False,
    ui: Annotated[
        bool,
        Switch,
        Parameter(
            help="Then serve, on this machine alone, the run's dashboard with a part for the hosts: state, orders."
        ),
    ] = False,
) -> int:
    """Bring a swarm up on many machines from one file: install, start, join, over the system's ssh.

    What is so already is left alone: a second call changes nothing. Exit code 1 if a host has failed.
    """
    from shoal.cli.remote.orders import bring_up

    swarm = _read(file)
    names = tuple(swarm.hosts.hosts)
    say = _say_for(names)
    code = _called(partial(bring_up, swarm, names, say, resumes=resume, is_dry=dry_run))
    if not ui or dry_run:
        return code
    from shoal.cli.remote.host_board import serve_page

    # Also where a host has failed: that is what the page can do something about.
    return _called(partial(serve_page, swarm, lambda: _read(file), _PORT, say))


def machine_script(
    *,
    target: Annotated[
        Literal["bash", "cloud-init", "jetson"],
        Parameter(
            help="bash: a script for a shell; cloud-init: user data for a cloud; jetson: a script that takes the torch "
            "of a Jetson."
        ),
    ] = "bash",
    install: Annotated[
        str, Parameter(help="What pip installs there: a wheel, a URL, git+https://...; else the script's argument.")
    ] = "",
    wheel_in: Annotated[
        Path | None, Parameter(help="Write what runs here as a wheel into this folder, for the script to install.")
    ] = None,
    num_servers: Annotated[int, Parameter(help="Servers on the machine.")] = 1,
    first_port: Annotated[int, Parameter(help="Of the 2 * servers + 1 TCP ports that others reach them at.")] = 29100,
    python: Annotated[
        str, Parameter(help="The interpreter there, 3.11 or newer: python3.12, or its path.")
    ] = "python3",
) -> int:
    """Print a script that makes a bare Debian or Ubuntu machine ready to be a host of servers.

    User, packages, firewall, installation and service; it may run again. No secret is in it: the machine is given an
    invitation afterwards. docs/deploy.md says how.
    """
    from shoal.cli.remote.machine_script import RemoteMachine, print_machine_script

    machine = RemoteMachine(install, num_servers, first_port, python, sees_system_packages=target == "jetson")
    return print_machine_script(target, machine, wheel_in)


@hosts_app.command
def status(*names: _Names, file: _HostsPath = _USUAL_FILE) -> int:
    """Say what runs on each host; without names, on all. Exit code 1 if something does not."""
    from shoal.cli.remote.operate import print_units

    swarm = _read(file)
    return _called(partial(print_units, swarm.hosts, _chosen(swarm.hosts, names), swarm.prefix))


@hosts_app.command
def logs(
    name: Annotated[str, Parameter(help="The host, as the file names it.")],
    *,
    file: _HostsPath = _USUAL_FILE,
    lines: Annotated[int, Parameter(name=("--lines", "-n"), help="So many of the newest.")] = 20,
    follow: Annotated[bool, Switch, Parameter(name=("--follow", "-f"), help="Go on until Ctrl-C.")] = False,
) -> int:
    """Print what a host's client and servers have said."""
    from shoal.cli.remote.operate import print_logs

    swarm = _read(file)
    [name] = _chosen(swarm.hosts, (name,))
    return _called(partial(print_logs, swarm.hosts, name, swarm.prefix, lines, follows=follow))


@hosts_app.command
def dashboard(
    *,
    file: _HostsPath = _USUAL_FILE,
    port: Annotated[int, Parameter(help="Of this machine; if it is taken, any that is free.")] = _PORT,
) -> int:
    """Show the run's dashboard in this machine's browser, through ssh, until Ctrl-C."""
    return _show_dashboard(_read(file), port)


@hosts_app.command
def restart(*names: _Names, file: _HostsPath = _USUAL_FILE) -> int:
    """End what runs on these hosts, and bring it up as the file says now; with the client's host, all.

    That ends the run where its client is among them: another one begins.
    """
    from shoal.cli.remote.orders import restart as serve
    from shoal.cli.remote.orders import restarted_with

    swarm = _read(file)
    chosen = restarted_with(swarm.hosts, _chosen(swarm.hosts, names))
    return _called(partial(serve, swarm, chosen, _say_for(chosen)))


@hosts_app.command
def down(*names: _Names, file: _HostsPath = _USUAL_FILE) -> int:
    """End what runs on these hosts, or on all; what they have trained and written stays there."""
    from shoal.cli.remote.orders import take_down

    swarm = _read(file)
    chosen = _chosen(swarm.hosts, names)
    return _called(partial(take_down, swarm, chosen, _say_for(chosen)))


def _show_dashboard(swarm: DescribedSwarm, port: int) -> int:
    from shoal.cli.remote.operate import show_dashboard

    return _called(partial(show_dashboard, swarm.hosts, swarm.prefix, port))


def _called(call: Callable[..., Awaitable[int]]) -> int:
    try:
        return anyio.run(partial(call, clock=SystemClock()))
    except HostFailed as error:
        say_error(on_one_line(str(error)))
        return FAILED


def _read(path: Path) -> DescribedSwarm:
    from shoal.cli.remote.hosts_file import read_swarm

    if not path.exists():
        raise ConfigError(f"there is no {path}: docs/hosts.md says what is in it, examples/hosts.yaml is one")
    return read_swarm(path)


def _chosen(hosts: HostsFile, names: Sequence[str]) -> tuple[str, ...]:
    if unknown := [name for name in names if name not in hosts.hosts]:
        raise ConfigError(f"{', '.join(unknown)}: none of the hosts, which are {', '.join(hosts.hosts)}")
    return tuple(names or hosts.hosts)


def _say_for(names: Collection[str]) -> Callable[[str, str], None]:
    width = max(map(len, names))

    def say(host: str, text: str) -> None:
        # Hosts have made parts of it.
        print(f"{host:<{width}}  {on_one_line(text)}" if host else on_one_line(text), flush=True)

    return say
