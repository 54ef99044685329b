"""Which run the initial peers know, on a host that has none of its own yet: a scout joins the swarm and says it.

The scout has a supervisor and a fork server of its own, which are gone before the run's roles are started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.exits import USER_ERROR
from shoal.cli.host import SwarmHost
from shoal.cli.host_network import HostNetwork
from shoal.clock import Clock
from shoal.config import Config
from shoal.config.shared import adopt_shared
from shoal.control.initial_peers import require_reachable
from shoal.errors import BootstrapError, RemoteError
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.runtime.launcher_messages import JoinedDht, ScoutReady
from shoal.runtime.role_handle import RoleHandle
from shoal.runtime.run_dir import RunDir
from shoal.runtime.supervisor import Supervisor

_PRELOAD = ("shoal.control.scout",)
_GRACE_S = 3.0


@dataclass(frozen=True)
class FoundRun:
    """A run of other hosts.

    Attributes:
        config: this host's, with the shared keys from the run.
    """

    run_id: RunId
    config: Config


async def find_run(
    config: Config,
    origins: Mapping[str, str],
    *,
    swarm_key: bytes,
    identity_of: Callable[[str, int], Identity],
    run_dir: RunDir,
    clock: Clock,
    say: Callable[[str], None],
) -> FoundRun:
    """Return the run that the initial peers know.

    Args:
        origins: names the keys that this host sets, and where.
        identity_of: returns the identity of a role and its index.
        say: shows the user a line about how far it is.

    Raises:
        BootstrapError: no initial peer can be joined, or none of them knows a run; the message says why.
        ConfigError: a shared key differs from the run's, or it names code of somebody's own and this host does not.
        RemoteError: the scout failed.
    """
    await require_reachable(config.network.initial_peers, clock, say)
    async with Supervisor(preload=_PRELOAD, clock=clock) as supervisor:
        host = SwarmHost(
            config=config,
            run_id="",
            log_dir=Path(run_dir.path),
            swarm_key=swarm_key,
            run_dir=run_dir,
            supervisor=supervisor,
            network=HostNetwork(config.network),
            identity_of=identity_of,
        )
        host.initial_peers_known(config.network.initial_peers)
        found = await run_of(await host.start_scout(), host, say)
        await supervisor.stop(_GRACE_S)
    return FoundRun(RunId(found.run_id), adopt_shared(config, origins, found.configuration))


async def run_of(scout: RoleHandle, host: SwarmHost, say: Callable[[str], None]) -> ScoutReady:
    """Return what the scout has found.

    Args:
        scout: has just been started.
        host: is told by which addresses the scout takes part in the DHT.
        say: shows the user a line about how far it is.

    Raises:
        BootstrapError: the scout reached no initial peer, or no run.
        RemoteError: the scout failed.
    """
    async for event in scout.events:
        match event:
            case JoinedDht(maddrs):
                host.joined(scout, maddrs)
                say("joined; looking for the run")
            case ScoutReady():
                return event
            case _:
                pass
    reason = scout.last_error or str(await scout.wait())
    if (await scout.wait()).code == USER_ERROR:
        raise BootstrapError(reason)
    raise RemoteError(f"{scout.spec} ended before it was ready: {reason}")
