"""A peer of the registry whose wall clock is off from the start, or is set while it runs, as it is told on its stdin.

    stepping_peer.py SWARM_KEY_HEX STATE_DIR OFFSET_S MADDR...

It announces itself as a server; each line that it reads is `step SECONDS` (its clock is set) or `load NUMBER` (that is
announced), and it prints the load of each other server that it sees, and its clock's difference to the others' if any.
"""

from __future__ import annotations

import sys
import time

_real_unix_s = time.time
_offset_s = float(sys.argv[3])
# Before anybody can keep the function: whoever asks for the time from now on gets what the clock has been set to.
time.time = lambda: _real_unix_s() + _offset_s

# ruff: noqa: E402

from pathlib import Path

import anyio
import anyio.to_thread

from shoal.clock import SystemClock
from shoal.control.dht import DhtNode
from shoal.control.records import StageRecord
from shoal.control.registry import Registry
from shoal.identity import Identity, namespace


async def main() -> None:
    """Take part until stdin ends."""
    identity, clock = Identity.generate(), SystemClock()
    name = namespace(bytes.fromhex(sys.argv[1]), "clocks")
    async with await DhtNode.create(
        identity, namespace=name, state_dir=Path(sys.argv[2]), clock=clock, initial_peers=sys.argv[4:]
    ) as node:
        registry = Registry(node, identity, name, 1, clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(registry.run)
            tasks.start_soon(tell, registry, identity.peer_id)
            registry.advertise(record(0.0))
            print("joined", identity.peer_id, flush=True)
            await obey(registry)
            tasks.cancel_scope.cancel()


def record(load: float) -> StageRecord:
    """What is announced of this peer."""
    return StageRecord(("unix:/stepping",), 1.0, stage=0, load=load)


async def obey(registry: Registry) -> None:
    """Do as stdin says."""
    global _offset_s
    while line := await anyio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
        verb, number = line.split()
        if verb == "step":
            _offset_s = float(number)
            print("stepped", flush=True)
        else:
            registry.advertise(record(float(number)))


async def tell(registry: Registry, own: str) -> None:
    """Print what is seen of the others."""
    with registry.membership.eager():
        while True:
            for replica in registry.membership.view.replicas:
                if replica.peer != own:
                    print("sees", replica.load, flush=True)
            if registry.clock_difference_s is not None:
                print("differs", registry.clock_difference_s, flush=True)
            with anyio.move_on_after(0.5):
                await registry.membership.changed()


anyio.run(main, backend_options={"use_uvloop": True})
