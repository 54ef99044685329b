"""A program that is a data server, as a role of its own process: its spec comes on standard input."""

from __future__ import annotations

import os
import socket
import sys

import anyio

from shoal.data_server.service import main
from shoal.runtime.control_pipe import open_role_control


async def serve(control: socket.socket) -> None:
    async with open_role_control(control) as role_control:
        await main(sys.stdin.buffer.read(), role_control)


os.environ.setdefault("OMP_NUM_THREADS", "1")
anyio.run(serve, socket.socket(fileno=int(sys.argv[1])), backend_options={"use_uvloop": True})
