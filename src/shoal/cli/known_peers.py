"""Where the swarm is that a command looks at, if its user does not say: this host has been in it. Neither torch nor
hivemind is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.cli.run_files import written_config
from shoal.cli.run_folder import CONFIG_FILE, LOCAL_MARK
from shoal.config import Config
from shoal.control.peers_file import PEERS_FILE, read_peers_file
from shoal.errors import ConfigError


def with_known_peers(config: Config, origins: Mapping[str, str], folder: Path | None = None) -> Config:
    """Return a configuration with initial peers: without any, those of the newest run that this host has a folder of,
    and that run's prefix and key file, as far as they are not given.

    Args:
        folder: of the run that is meant; None: the newest one's.

    Raises:
        ConfigError: there is no such run.
    """
    if config.network.initial_peers:
        return config
    files = config.log_dir.glob(f"*/{PEERS_FILE}") if folder is None else (folder / PEERS_FILE,)
    left = {path: read_peers_file(path.parent) for path in files}
    seen = [path for path, peers in left.items() if peers and not (path.parent / LOCAL_MARK).exists()]
    newest = max(seen, key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise ConfigError(
            f"nothing says where the swarm is: no run in {folder or config.log_dir} has left its addresses (one of "
            "run-local is seen on its own host only); give --initial-peers as the client's host has printed them, or "
            "--log-dir"
        )
    peers = left[newest]
    network, prefix = config.network, config.experiment_prefix
    if (newest.parent / CONFIG_FILE).is_file():
        known = written_config(newest.parent)
        prefix = prefix if "experiment_prefix" in origins else known.experiment_prefix
        if "network.swarm_key_file" not in origins:
            network = network.model_copy(update={"swarm_key_file": known.network.swarm_key_file})
    network = network.model_copy(update={"initial_peers": peers})
    return config.model_copy(update={"experiment_prefix": prefix, "network": network})
