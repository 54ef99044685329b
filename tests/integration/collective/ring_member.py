"""A member of a ring as a process: `ring_member.py FOLDER INDEX NUM_MEMBERS VICTIM`.

Everybody starts a ring with all members. The victim kills itself when its second part arrives; the others go on without
it in the next epoch, from the same inputs, and print the SHA-256 of the result.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import anyio
import torch

from shoal.collective.group import Group
from shoal.collective.inbox import GroupInbox
from shoal.collective.shared_memory import SharedMemory
from shoal.collective.vectors import Reduction, RingVector
from shoal.errors import MemberFault
from shoal.ids import PeerId, RunId
from shoal.runtime.device_thread import DeviceThread
from shoal.transport.base import PeerLost, PeerUp, Received
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages import Hop
from shoal.wire.messages.collective import RingReady
from shoal.wire.messages.control import Heartbeat

NUM_ELEMENTS = 2_000_003


def contribution(index: int) -> torch.Tensor:
    return torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(index))


async def main(folder: Path, index: int, num_members: int, victim: int) -> None:
    peers = [PeerId(f"P{number}") for number in range(num_members)]
    inbox, memory, num_ready = GroupInbox(bytes, 1 << 30), SharedMemory(), 0
    met, everyone, lost = set[PeerId](), anyio.Event(), anyio.Event()
    async with (
        open_unix_endpoint(
            peer_id=peers[index], run_id=RunId("r"), role="member", path=folder / peers[index]
        ) as endpoint,
        DeviceThread(lambda: torch.set_num_threads(1)) as device,
        anyio.create_task_group() as tasks,
    ):

        async def receive() -> None:
            nonlocal num_ready
            async for event in endpoint.events():
                match event:
                    case PeerUp(peer):
                        met.add(peer)
                        if len(met) == num_members - 1:
                            everyone.set()
                    case PeerLost():
                        lost.set()
                    case Received():
                        num_ready += isinstance(event.message, RingReady)
                        if index == victim and num_ready == 2:
                            os.kill(os.getpid(), signal.SIGKILL)
                        inbox.receive(event)

        async def reduce(epoch: int, members: list[PeerId]) -> torch.Tensor:
            group = Group(endpoint, members, bytes([epoch]), inbox, device.run, memory=memory)
            [values_N] = memory.vectors([(NUM_ELEMENTS, torch.float32)])
            values_N.copy_(contribution(index))
            vectors = [RingVector(0, values_N, Reduction.SUM)]
            try:
                await group.all_reduce(vectors)
            except MemberFault:
                # The memory of a member that was killed goes with it; as in a round, whoever hears of its loss goes on.
                await anyio.Event().wait()
            return values_N

        async def end_with(scope: anyio.CancelScope) -> None:
            await lost.wait()
            scope.cancel()

        tasks.start_soon(receive)
        print("ready", flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)
        for number, peer in enumerate(peers):
            endpoint.introduce(Hop(peer, (f"unix:{folder / peer}",)))
            if number > index:
                endpoint.post(peer, Heartbeat())
        await everyone.wait()
        with anyio.CancelScope() as scope:
            tasks.start_soon(end_with, scope)
            await reduce(0, peers)
            raise AssertionError("a ring has ended without one of its members")
        survivors = [peer for number, peer in enumerate(peers) if number != victim]
        result = await reduce(1, survivors)
        print(hashlib.sha256(result.numpy().tobytes()).hexdigest(), flush=True)
        # The others end first where they still read: `run` has waited for that.
        memory.close()
        tasks.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), *map(int, sys.argv[2:]), backend_options={"use_uvloop": True})
