"""`shoal up --ui`: the dashboard's page with a part for the hosts, served on the operator's machine, for them alone."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio

from shoal.cli.remote.host_board import HostBoard
from shoal.cli.remote.hosts_file import DescribedSwarm
from shoal.cli.remote.orders import Say
from shoal.cli.remote.ssh import connections
from shoal.clock import Clock
from shoal.errors import ConfigError
from shoal.monitor.http.access import URL_FILE, Access

_HOST: Final = "127.0.0.1"


async def serve_page(
    swarm: DescribedSwarm, read: Callable[[], DescribedSwarm], port: int, say: Say, *, clock: Clock
) -> int:
    """Serve the page until Ctrl-C.

    Args:
        read: returns what it says now.
        port: of this machine; if it is taken, any that is free.
        say: prints a line for a host.

    Raises:
        ConfigError: the web server is not installed here.
    """
    try:
        # Takes a moment, and is for this command alone.
        from shoal.monitor.http.hosts import operator_app
        from shoal.monitor.http.server import answering
    except ImportError as error:
        raise ConfigError(
            "the page needs packages that are not installed on this machine: pip install 'shoal[dashboard]'"
        ) from error
    file = swarm.hosts
    with tempfile.TemporaryDirectory(prefix="shoal-page-") as folder, _listener(port) as listener:
        access = Access(Path(folder), f"hosts of {swarm.prefix}", "the folder that its terminal names")
        targets = file.destinations(file.hosts)
        async with connections(targets, file.ssh_command, clock) as hosts, anyio.create_task_group() as tasks:
            board = HostBoard(swarm, read, hosts, tasks, clock, say)
            async with answering(listener, operator_app(access, board)):
                access.serves(listener.getsockname()[1])
                say("", f"page: {access.url}")
                say(
                    "",
                    f"it is there until Ctrl-C; the address can be opened once, the next one is in {folder}/{URL_FILE}",
                )
                await anyio.Event().wait()
    raise AssertionError("nobody sets that event")


def _listener(port: int) -> socket.socket:
    try:
        return socket.create_server((_HOST, port))
    except OSError:
        return socket.create_server((_HOST, 0))
