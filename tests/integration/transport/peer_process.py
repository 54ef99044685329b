"""A peer in a process of its own, for tests: says its pid and addresses, echoes, and comes back when it is lost.

Argument: path of its Unix socket.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio

from shoal.identity import Identity
from shoal.ids import RunId, StepKey
from shoal.transport.base import PeerLost, Received
from shoal.transport.endpoint import open_endpoint
from shoal.transport.limits import TransportLimits
from shoal.wire.messages.step import Opened


async def main(path: Path) -> None:
    """Echo until killed; greet whoever was lost with step 99."""
    async with open_endpoint(
        identity=Identity(b"child".ljust(32, b"\0")),
        run_id=RunId("run"),
        role="test",
        unix_path=path,
        swarm_key=b"k" * 32,
        tcp=("127.0.0.1", 0),
        limits=TransportLimits(heartbeat_s=0.05, deadline_s=30.0),
    ) as endpoint:
        sys.stdout.write(" ".join([str(os.getpid()), *endpoint.addresses]) + "\n")
        sys.stdout.flush()
        async for event in endpoint.events():
            if isinstance(event, Received):
                endpoint.post(event.peer, event.message, event.tensors)
            elif isinstance(event, PeerLost):
                endpoint.post(event.peer, Opened(StepKey(0, 0, 99, 0)))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), backend_options={"use_uvloop": True})
