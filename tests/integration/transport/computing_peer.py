"""A peer that computes on its device thread, as servers do, before it answers.

Arguments: path of its Unix socket, seconds that a call computes, seconds that another one holds the GIL.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import anyio

from shoal.identity import Identity
from shoal.ids import RunId
from shoal.runtime.device_thread import DeviceThread
from shoal.transport.base import Received
from shoal.transport.endpoint import open_endpoint
from shoal.transport.limits import TransportLimits


async def main() -> None:
    """Answer each message after computing, now without and now with the GIL."""
    socket_path, computes_s, holds_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    limits = TransportLimits(heartbeat_s=0.1, deadline_s=60.0)
    opened = open_endpoint(
        identity=Identity(b"child".ljust(32, b"\0")),
        run_id=RunId("run"),
        role="test",
        unix_path=socket_path,
        swarm_key=b"k" * 32,
        tcp=("127.0.0.1", 0),
        limits=limits,
    )
    async with opened as endpoint, DeviceThread() as device:
        print(*endpoint.addresses, flush=True)
        async for event in endpoint.events():
            if isinstance(event, Received):
                await device.run(time.sleep, computes_s)
                # Called with the GIL, unlike the functions of a CDLL: nothing else of this process runs meanwhile.
                await device.run(ctypes.PyDLL(None).usleep, int(holds_s * 1e6))
                endpoint.post(event.peer, event.message)


anyio.run(main, backend_options={"use_uvloop": True})
