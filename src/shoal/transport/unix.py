"""Endpoints of one host: Unix sockets that only their owner may open, peers checked by the kernel's credentials.

Where there are other hosts an address is `unix:<machine>:/path`: it says on which machine the path means that socket,
so that no other one tries it, and who shares a machine. An address on the network says neither: every home has a
192.168.1.5. Without other hosts it is `unix:/path`.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError, HandshakeError, Offence
from shoal.events.base import emit
from shoal.events.links import SocketGone
from shoal.ids import PeerId, RunId
from shoal.runtime.linux_calls import LinuxCall, has
from shoal.runtime.run_dir import keep_directory
from shoal.transport.connection import Connection
from shoal.transport.limits import DEFAULT_LIMITS, TransportLimits
from shoal.transport.peers import StreamEndpoint

logger = logging.getLogger(__name__)

_SCHEME: Final = "unix:"
# sockaddr_un holds 108 bytes with the final zero on Linux, 104 on macOS.
_MAX_PATH_BYTES: Final = 103
_BACKLOG: Final = 128
_CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid


class UnixCarrier:
    """A `Carrier` of `unix:/path`."""

    scheme = _SCHEME

    def __init__(self, path: Path | None, *, socket_buffer_bytes: int, machine: str = "") -> None:
        """Remember what to do; nothing is opened yet.

        Args:
            path: where to make the socket; a socket without a listener is replaced. None: it only dials.
            socket_buffer_bytes: asked of the kernel for each connection; it may give less.
            machine: this machine's name in addresses; empty: there is no other machine.
        """
        self._path = path
        self._machine = machine
        self._socket_buffer_bytes = socket_buffer_bytes
        self._server: asyncio.Server | None = None
        self._accept: Callable[[], Connection] | None = None
        self._problem: str | None = None
        self._kept: int | None = None  # keeps the directory that this one had to make again

    @property
    def addresses(self) -> tuple[str, ...]:
        if self._path is None:
            return ()
        return (f"{_SCHEME}{self._machine}:{self._path}" if self._machine else f"{_SCHEME}{self._path}",)

    async def listen(self, make: Callable[[], Connection]) -> None:

        def accept() -> Connection:
            connection = make()
            connection.prepare = partial(self._prepare, connection)
            return connection

        self._accept = accept
        if self._path is not None:
            await self._listen(self._path, accept, waits=True)

    async def _listen(self, path: Path, accept: Callable[[], Connection], *, waits: bool) -> None:
        if not path.parent.is_dir():
            self._keep(keep_directory(path.parent, waits=waits))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(accept, sock=_bind(path), backlog=_BACKLOG)

    def _keep(self, directory: int | None) -> None:
        before, self._kept = self._kept, directory
        if before is not None:
            os.close(before)

    async def listen_again(self) -> None:
        if self._path is None or self._accept is None or self._path.exists():
            return
        before, self._server = self._server, None
        if before is not None:
            before.close()
        said, self._problem = self._problem, None
        try:
            await self._listen(self._path, self._accept, waits=False)
        except BlockingIOError:
            self._problem = said  # the next time
            return
        except (ConfigError, OSError) as error:
            self._problem = str(error)
        if self._problem is None or self._problem != said:
            emit(logger, SocketGone(str(self._path), self._problem or ""))

    async def connect(self, address: str, connection: Connection) -> None:
        path = address.removeprefix(_SCHEME)
        if not path.startswith("/"):
            machine, _, path = path.partition(":")
            if machine != self._machine:
                raise OSError("a socket of another machine")
        # The path may be another user's here: nothing is said to strangers.
        if os.stat(path).st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        connection.prepare = partial(self._prepare, connection)
        await asyncio.get_running_loop().create_unix_connection(lambda: connection, path)

    def stop_listening(self) -> None:
        self._accept = None
        if self._server is not None and self._path is not None:
            self._server.close()
            self._server = None
            self._path.unlink(missing_ok=True)
        self._keep(None)

    def _prepare(self, connection: Connection, sock: socket.socket) -> None:
        """Set the socket's buffers, and refuse what belongs to another user.

        Raises:
            HandshakeError: the kernel says that another user is at the other end.
        """
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._socket_buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._socket_buffer_bytes)
        process, user = other_end(sock)
        if user is not None and user != os.getuid():
            raise HandshakeError(f"user {user} has no access to the endpoint of user {os.getuid()}", Offence.USER)
        connection.process = process


def open_unix_endpoint(
    *, peer_id: PeerId, run_id: RunId, role: str, path: Path | None, limits: TransportLimits = DEFAULT_LIMITS
) -> StreamEndpoint:
    """Return an endpoint on a Unix socket of mode 0600 alone, to be entered as an asynchronous context.

    Args:
        run_id: only peers of the same run are accepted.
        role: what this process does, for the peers' logs.
        path: where to make the socket; a socket without a listener is replaced. None: nobody can dial this endpoint.

    Raises:
        ConfigError: on entering, if the path is too long, in use, or cannot be made.
    """
    carrier = UnixCarrier(path, socket_buffer_bytes=limits.socket_buffer_bytes)
    return StreamEndpoint(peer_id, run_id, role, [carrier], limits)


def other_end(sock: socket.socket) -> tuple[int | None, int | None]:
    """Return the process and the user at the other end of a Unix socket, as the kernel knows them; None: it does not.

    Where it knows neither, the mode of the socket keeps others out, and that of the path's owner is asked by who dials.
    """
    if has(LinuxCall.PEER_CREDENTIALS):
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        # 0 is a process of another container, which has no number here.
        return pid or None, uid
    getpeereid = getattr(ctypes.CDLL(None, use_errno=True), "getpeereid", None)
    if getpeereid is None:
        return None, None
    uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
    if getpeereid(sock.fileno(), ctypes.byref(uid), ctypes.byref(gid)):
        raise OSError(ctypes.get_errno(), "getpeereid")
    return None, uid.value


def _bind(path: Path) -> socket.socket:
    """Return a bound socket that does not listen yet; until it does, its mode has been set and nobody can connect."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(f"the socket path {path} is longer than {_MAX_PATH_BYTES} bytes: choose a shorter folder")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
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
