"""A peer in a process of its own, for tests: says its pid, then echoes every message. Argument: path of its socket."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio

from shoal.ids import PeerId, RunId
from shoal.transport.base import Received
from shoal.transport.unix import open_unix_endpoint


async def main(path: Path) -> None:
    """Echo until killed."""
    async with open_unix_endpoint(peer_id=PeerId("child"), run_id=RunId("run"), role="test", path=path) as endpoint:
        sys.stdout.write(f"{os.getpid()}\n")
        sys.stdout.flush()
        async for event in endpoint.events():
            if isinstance(event, Received):
                endpoint.post(event.peer, event.message, event.tensors)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), backend_options={"use_uvloop": True})
