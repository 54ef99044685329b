"""The host of a run's client: what `start_trainer_client.py` and `shoal start-trainer-client` do.

Monitor, client, data server and trainers run here; servers join from other hosts, with the lines that are printed. From
the launch to the summary it is the same as a run on one machine, without servers of its own.
"""

from __future__ import annotations

import anyio

from shoal import log
from shoal.cli.cuts import with_known_cut
from shoal.cli.early import EarlyStart
from shoal.cli.host_network import HostNetwork
from shoal.cli.joining import LastingIdentities, invitation, load_or_create_swarm_key
from shoal.cli.local import HostRun
from shoal.cli.run_files import make_log_dir, new_run_id
from shoal.clock import SystemClock
from shoal.config import Config
from shoal.errors import ConfigError


def start_trainer_client(config: Config, early: EarlyStart) -> int:
    """Wait for servers of other hosts, train with them until the run is done, and return the exit code.

    Args:
        config: The resolved configuration.
        early: What runs already; the caller ends it.

    Raises:
        ConfigError: the swarm key or the identities cannot be used, or the log directory cannot be written.
    """
    if config.network.initial_peers:
        raise ConfigError(
            "network.initial_peers: this command starts a swarm of its own, and a run has one client; remove it here, "
            "start_servers.py takes it"
        )
    swarm_key, is_new = load_or_create_swarm_key(config.network.swarm_key_file)
    identities = LastingIdentities("client")
    try:
        clock = SystemClock()
        config = with_known_cut(config)
        run_id = new_run_id(config, clock)
        log_dir = make_log_dir(config, run_id)
        log.configure("launcher", log_dir, config.log_level)

        async def run() -> int:
            host = HostRun(
                config,
                run_id,
                log_dir,
                clock,
                swarm_key=swarm_key,
                network=HostNetwork(config.network),
                identity_of=identities.identity,
                invite=lambda maddrs: invitation(config, maddrs, new_key=is_new),
            )
            return await host.run(early)

        early.require_uninterrupted()
        return anyio.run(run, backend_options={"use_uvloop": True})
    finally:
        identities.close()
