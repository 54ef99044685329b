"""Says what the monitor of a run computes for: each Python of it loads this by PYTHONPATH (benchmarks/watching.py).

    now and then in its own time on a core --> where it is --> at its host's node of the DHT, or at what a monitor does

In the folder SAMPLES_DIR, a file for each monitor by its process id: how often at the node, and how often in all.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType

EVERY_S, WRITTEN_EVERY = 0.002, 10
OF_NODE = (
    "/hivemind/",
    "/google/protobuf/",
    "/asyncio/streams.py",  # the connections with p2pd
    "/shoal/control/dht",
    "/shoal/control/host_node.py",
    "/shoal/control/keyed_protocol.py",
    "/shoal/control/node_service.py",
)
_found = [0, 0]


def _is(role: str) -> bool:
    return Path("/proc/self/cmdline").read_text().startswith(f"shoal:{role}")


def _sample(_signal: int, frame: FrameType | None) -> None:
    if not _found[1] and not _is("monitor"):
        if not _is("fork_server"):  # it knows what it is
            signal.setitimer(signal.ITIMER_PROF, 0.0)
        return
    _found[1] += 1
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in OF_NODE):
            _found[0] += 1
            break
        frame = frame.f_back
    if _found[1] % WRITTEN_EVERY == 0:
        Path(os.environ["SAMPLES_DIR"], str(os.getpid())).write_text(f"{_found[0]} {_found[1]}")


def _begin() -> None:
    if not _is("fork_server"):
        return  # what becomes another program would keep the timer, and die of it
    signal.signal(signal.SIGPROF, _sample)
    signal.siginterrupt(signal.SIGPROF, False)
    signal.setitimer(signal.ITIMER_PROF, EVERY_S, EVERY_S)


os.register_at_fork(after_in_child=_begin)
