"""`shoal status`: how the run of a swarm is, seen from any host that has its key, as text or JSON."""

from __future__ import annotations

from collections.abc import Mapping

import anyio
import msgspec

from shoal import log
from shoal.cli.known_peers import with_known_peers
from shoal.cli.observing import look
from shoal.config import Config
from shoal.control.swarm_status import lines_of, swarm_status
from shoal.identity import load_swarm_key
from shoal.wire.messages.control import AskStatus, RunStatus


def print_status(config: Config, origins: Mapping[str, str], *, as_json: bool) -> int:
    """Print how the run is, and return the exit code.

    Args:
        config: gives initial peers, swarm key and prefix; without peers, those of this host's newest run.
        origins: names the keys that are set.

    Raises:
        ConfigError: there is no swarm key, or nothing says where the swarm is.
        BootstrapError: the swarm cannot be joined, or announces no run; says why.
    """
    config = with_known_peers(config, origins)
    swarm_key = load_swarm_key(config.network.swarm_key_file)
    log.configure("status", None)
    view, answer, problem = anyio.run(
        look, config, swarm_key, AskStatus(), RunStatus, backend_options={"use_uvloop": True}
    )
    status = swarm_status(config.experiment_prefix, view, answer, problem)
    if as_json:
        print(msgspec.json.encode(status).decode())
    else:
        print("\n".join(lines_of(status)))
    return 0
