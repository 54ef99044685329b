"""How a role opens its endpoint: on a Unix socket, and under TLS for other hosts where there are any."""

from __future__ import annotations

from pathlib import Path

from shoal.config.start import RoleStart
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.endpoint import open_endpoint
from shoal.transport.limits import limits_for
from shoal.transport.peers import StreamEndpoint

_UPLINK = "uplink"
"""In the directory that all roles of a launcher have their sockets in."""


def open_role_endpoint(start: RoleStart, identity: Identity, metrics: MetricRegistry | None = None) -> StreamEndpoint:
    """Return the endpoint that a role was told to have, to be entered as an asynchronous context.

    Args:
        start: says where to listen and whether there are other hosts.
        metrics: of a process that counts before it has an endpoint; None: new ones.

    Raises:
        ConfigError: on entering, if an address cannot be used.
    """
    config = start.config()
    socket_path = Path(start.socket_path)
    return open_endpoint(
        identity=identity,
        run_id=RunId(start.run_id),
        role=start.role,
        unix_path=socket_path,
        swarm_key=start.swarm_key if start.between_hosts else None,
        tcp=start.listen_tcp,
        announce=start.announce,
        max_upload_mbit=config.network.max_upload_mbit,
        uplink_file=socket_path.parent / _UPLINK,
        limits=limits_for(config.health),
        metrics=metrics,
    )
