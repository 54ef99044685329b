"""What a process of the swarm is told when it starts: which run, who it is, where its files are.

It reaches the process over a pipe, never over argv or the environment, because it holds keys. Each role's package
extends `RoleStart` by what only that role needs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.config.load import config_from_json
from shoal.config.schema import Config


class RoleStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Start parameters that all roles share.

    Attributes:
        index: Number among the processes of this role on this host, from 0.
        config_json: The resolved configuration.
        identity_key: Ed25519 private key, 32 bytes.
        swarm_key: The swarm's pre-shared key, 32 bytes.
        socket_path: Unix socket to listen on.
        log_dir: `logs/<run_id>` of this host.
        initial_peers: Multiaddresses of DHT peers to join; empty for the first peer.
        between_hosts: Whether peers of other hosts are reached, over TLS with the swarm's key.
        listen_tcp: Address and port to listen on for other hosts; None is not dialled by them.
        announce: Hosts, or `host:port`, under which others reach this role; empty: the addresses of its interfaces.
    """

    run_id: str
    role: str
    index: int
    config_json: bytes
    identity_key: bytes
    swarm_key: bytes
    socket_path: str
    log_dir: str
    initial_peers: tuple[str, ...] = ()
    between_hosts: bool = False
    listen_tcp: tuple[str, int] | None = None
    announce: tuple[str, ...] = ()

    def config(self) -> Config:
        """Return the resolved configuration."""
        return config_from_json(self.config_json)

    @property
    def log_path(self) -> Path:
        """`<role>_<n>.log` of this process."""
        return Path(self.log_dir) / f"{self.role}_{self.index}.log"
