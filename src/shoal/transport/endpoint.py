"""The endpoint of a process: a Unix socket for peers of its host, TCP under TLS for all others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ConfigError
from shoal.identity import Identity
from shoal.ids import RunId
from shoal.runtime.hardware import machine_name
from shoal.telemetry.registry import MetricRegistry
from shoal.transport.carrier import Carrier
from shoal.transport.limits import DEFAULT_LIMITS, TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.transport.tcp import TcpCarrier
from shoal.transport.tls import tls_contexts
from shoal.transport.unix import UnixCarrier
from shoal.transport.uplink import Uplink


def open_endpoint(
    *,
    identity: Identity,
    run_id: RunId,
    role: str,
    unix_path: Path | None,
    swarm_key: bytes | None = None,
    tcp: tuple[str, int] | None = None,
    announce: Sequence[str] = (),
    max_upload_mbit: float | None = None,
    uplink_file: Path | None = None,
    limits: TransportLimits = DEFAULT_LIMITS,
    metrics: MetricRegistry | None = None,
) -> StreamEndpoint:
    """Return an endpoint to be entered as an asynchronous context.

    A peer with several addresses is dialled at its Unix socket if that is on this machine and the peer itself answers,
    else at its TCP addresses in order.

    Args:
        run_id: only peers of the same run are accepted.
        role: what this process does, for the peers' logs.
        unix_path: where to make the socket for this host; a socket without a listener is replaced. None: peers of this
            host cannot dial this one, but it dials them.
        swarm_key: 32 secret bytes that all hosts share; None: only peers of this host can be reached.
        tcp: address and port to listen on for other hosts (`0.0.0.0` is every interface, port 0 any free one); None:
            other hosts cannot dial this one, but it dials them.
        announce: hosts, or `host:port`, under which other hosts reach this one; empty: the addresses of the interfaces.
        max_upload_mbit: the most to send to other hosts, in millions of bits per second; None: no limit.
        uplink_file: by which the processes of this host share that limit; None: this one has it for itself.
        metrics: None makes a registry of its own.

    Raises:
        ConfigError: `tcp` without a swarm key; on entering, if an address cannot be used.
    """
    machine = "" if swarm_key is None else machine_name()
    carriers: list[Carrier] = [UnixCarrier(unix_path, socket_buffer_bytes=limits.socket_buffer_bytes, machine=machine)]
    if swarm_key is not None:
        contexts = tls_contexts(identity, swarm_key)
        uplink = Uplink(max_upload_mbit, shared=uplink_file)
        carriers.append(TcpCarrier(contexts, listen_on=tcp, announce=announce, uplink=uplink))
    elif tcp is not None:
        raise ConfigError("listening for other hosts needs the swarm's key; make one with `shoal key new`")
    return StreamEndpoint(identity.peer_id, run_id, role, carriers, limits, metrics=metrics)
