"""What can be done with hosts of a file: by a command (`commands`), or from the operator's page (`host_board`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Final, Protocol

from shoal.cli.remote.bring_up import BringUp
from shoal.cli.remote.container import ContainerImage
from shoal.cli.remote.hosts_file import OWN_VERSION, DescribedSwarm, HostsFile
from shoal.cli.remote.operate import stop_units
from shoal.cli.remote.own_wheel import own_wheel
from shoal.cli.remote.plan import Installation, Wanted
from shoal.clock import Clock
from shoal.errors import ConfigError

Say = Callable[[str, str], None]
"""Is told a line for a host; without a name, for all."""


class _Order(Protocol):
    def __call__(self, swarm: DescribedSwarm, names: Collection[str], say: Say, *, clock: Clock) -> Awaitable[int]: ...


async def bring_up(
    swarm: DescribedSwarm,
    names: Collection[str],
    say: Say,
    *,
    clock: Clock,
    resumes: bool = False,
    is_dry: bool = False,
) -> int:
    """Bring hosts to what the file says.

    Raises:
        ConfigError: what the file says cannot be.
    """
    return await BringUp(wanted_of(swarm), names, clock, say, resumes=resumes, is_dry=is_dry).run()


async def take_down(swarm: DescribedSwarm, names: Collection[str], say: Say, *, clock: Clock) -> int:
    """End what runs on hosts."""
    return await stop_units(swarm.hosts, names, swarm.prefix, say, clock)


async def restart(swarm: DescribedSwarm, names: Collection[str], say: Say, *, clock: Clock) -> int:
    """End what runs on hosts, and bring it up as the file says now.

    Raises:
        ConfigError: what the file says cannot be; then nothing was ended.
    """
    names = restarted_with(swarm.hosts, names)
    wanted = wanted_of(swarm)
    ended = await stop_units(swarm.hosts, names, swarm.prefix, say, clock)
    return await BringUp(wanted, names, clock, say).run() or ended


def restarted_with(hosts: HostsFile, names: Collection[str]) -> Collection[str]:
    """Return the hosts that are restarted where these are: with its client the run ends everywhere."""
    return tuple(hosts.hosts) if hosts.swarm.client in names else names


ORDERS: Final[Mapping[str, _Order]] = {"up": bring_up, "restart": restart, "down": take_down}
"""By the names of the commands that give them."""


def wanted_of(swarm: DescribedSwarm) -> Wanted:
    """Return what the file wants the hosts to be.

    Raises:
        ConfigError: they have too few servers, or what they are to install cannot be read.
    """
    hosts, config = swarm.hosts, swarm.config
    if hosts.num_servers < config.num_stages:
        raise ConfigError(
            f"the hosts have {hosts.num_servers} server{'s'[: hosts.num_servers != 1]}, and each of the "
            f"{config.num_stages} stages of {swarm.config_path} needs one: give hosts more `servers`"
        )
    return Wanted(hosts, swarm.prefix, swarm.config_path.read_text(encoding="utf-8"), _installation(hosts))


def _installation(hosts: HostsFile) -> Installation | ContainerImage:
    if hosts.image is not None:
        return ContainerImage(hosts.image)
    if hosts.install == OWN_VERSION:
        return Installation(*own_wheel(), hosts.extras, hosts.pip_flags)
    if not hosts.install.endswith(".whl") or "://" in hosts.install:
        return Installation(hosts.install, None, hosts.extras, hosts.pip_flags)
    path = Path(hosts.install).expanduser()
    try:
        return Installation(path.name, path.read_bytes(), hosts.extras, hosts.pip_flags)
    except OSError as error:
        raise ConfigError(f"install: cannot read {path}: {error.strerror}") from error
