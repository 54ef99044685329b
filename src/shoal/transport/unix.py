"""Endpoints of one host: Unix sockets that only their owner may open, peers checked by the kernel's credentials."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError, HandshakeError
from shoal.ids import PeerId, RunId
from shoal.transport.connection import Connection
from shoal.transport.limits import DEFAULT_LIMITS, TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.wire.messages import Hop

_SCHEME: Final = "unix:"
# sockaddr_un holds 108 bytes with the final zero on Linux, 104 on macOS.
_MAX_PATH_BYTES: Final = 103
_BACKLOG: Final = 128
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid


class UnixEndpoint(StreamEndpoint):
    """An endpoint that listens on a Unix socket; made by `open_unix_endpoint`."""

    def __init__(self, *, peer_id: PeerId, run_id: RunId, role: str, path: Path, limits: TransportLimits) -> None:
        super().__init__(Hop(peer_id, (f"{_SCHEME}{path}",)), run_id, role, limits)
        self._path = path
        self._server: asyncio.Server | None = None

    async def _listen(self) -> None:
        listener = _bind(self._path)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: Connection(self, self._limits), sock=listener, backlog=_BACKLOG
        )

    async def _connect(self, address: str, connection: Connection) -> None:
        if not address.startswith(_SCHEME):
            raise OSError(f"{address} is no Unix socket")
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: connection, address.removeprefix(_SCHEME))

    def _check_socket(self, connection: Connection) -> None:
        if not hasattr(socket, "SO_PEERCRED"):
            return  # elsewhere than on Linux the socket's mode alone keeps others out
        raw = connection.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            raise HandshakeError(f"user {uid} has no access to the endpoint of user {os.getuid()}")

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)


def open_unix_endpoint(
    *, peer_id: PeerId, run_id: RunId, role: str, path: Path, limits: TransportLimits = DEFAULT_LIMITS
) -> UnixEndpoint:
    """Return an endpoint on a Unix socket of mode 0600, to be entered as an asynchronous context.

    Args:
        peer_id: who this process is.
        run_id: only peers of the same run are accepted.
        role: what this process does, for the peers' logs.
        path: where the socket is made; a socket that nobody listens on any more is replaced.
        limits: of frames, queues and times.

    Raises:
        ConfigError: on entering, if the path is too long, in use, or cannot be made.
    """
    return UnixEndpoint(peer_id=peer_id, run_id=run_id, role=role, path=path, limits=limits)


def _bind(path: Path) -> socket.socket:
    """Return a bound socket that does not listen yet; until it does, its mode has been set and nobody can connect."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(f"the socket path {path} is longer than {_MAX_PATH_BYTES} bytes: choose a shorter folder")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        listener.bind(os.fspath(path))
        path.chmod(0o600)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return  # bind itself says what is wrong with anything else
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a listener whose backlog is full would keep us waiting
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise ConfigError(f"another process listens on {path}")
