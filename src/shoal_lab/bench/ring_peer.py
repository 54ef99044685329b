"""One member of the benchmark `ring`: our all-reduce over a Unix socket and shared memory, and gloo's over TCP.

Ours is what a replica does in a round (`averaging.round_average`): the vector lies in shared memory, sums are formed on
a device thread, messages go over the endpoint of the process. Both sides do several reductions in a row.
"""

# torch.distributed is typed in part.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path

import anyio
import torch
import torch.distributed
from anyio.from_thread import start_blocking_portal

from shoal.clock import SystemClock
from shoal.collective.group import Group
from shoal.collective.inbox import GroupInbox
from shoal.collective.shared_memory import SharedMemory
from shoal.collective.vectors import Reduction, RingVector
from shoal.errors import InvariantViolation
from shoal.ids import PeerId, RunId
from shoal.runtime.device_thread import DeviceThread
from shoal.transport.base import Received
from shoal.transport.peers import StreamEndpoint
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages import Hop
from shoal.wire.messages.control import Heartbeat
from shoal_lab.bench.peer import Calls, Seat
from shoal_lab.bench.serving import serving


class Member:
    """Our member; all its methods run on the event loop."""

    def __init__(self, seat: Seat, folder: Path) -> None:
        self._index = seat.index
        self._peers = [PeerId(f"P{index}") for index in range(seat.num_peers)]
        self._folder = folder
        self._memory = SharedMemory()
        self._clock = SystemClock()
        self._inbox = GroupInbox(bytes, 1 << 30)

    async def serve(self, ready: anyio.Event, end: anyio.Event) -> None:
        """Be there for the others until the end."""
        me = self._peers[self._index]
        async with AsyncExitStack() as stack:
            self._endpoint: StreamEndpoint = await stack.enter_async_context(
                open_unix_endpoint(peer_id=me, run_id=RunId("bench"), role="member", path=self._folder / me)
            )
            self._device = await stack.enter_async_context(DeviceThread(lambda: torch.set_num_threads(1)))
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._memory.close)
            self._group = Group(
                self._endpoint, self._peers, b"bench", self._inbox, self._device.run, memory=self._memory
            )
            tasks.start_soon(self._receive)
            for peer in self._peers:
                self._endpoint.introduce(Hop(peer, (f"unix:{self._folder / peer}",)))
            ready.set()
            await end.wait()
            tasks.cancel_scope.cancel()

    async def meet(self) -> None:
        """Connect with the others, so that it is known who shares memory."""
        for peer in self._peers[self._index + 1 :]:
            self._endpoint.post(peer, Heartbeat())
            await self._endpoint.flushed(peer)

    async def reduce(self, num_elements: int, repeat: int) -> float:
        """Return the seconds that one reduction takes, of several in a row."""
        [values_N] = self._memory.vectors([(num_elements, torch.float32)])
        values_N.fill_(1.0)
        start_s = self._clock.now_s()
        for _ in range(repeat):
            await self._group.all_reduce([RingVector(0, values_N, Reduction.SUM)])
        taken_s = self._clock.now_s() - start_s
        if values_N[-1].item() != float(len(self._peers)) ** repeat:
            raise InvariantViolation("the sum is wrong: the measurement would mean nothing")
        return taken_s / repeat

    async def _receive(self) -> None:
        async for event in self._endpoint.events():
            if isinstance(event, Received):
                self._inbox.receive(event)


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer `ours` and `gloo`: the seconds of one reduction of so many float32, of several in a row."""
    torch.set_num_threads(1)
    folder = Path(seat.arguments["folder"])
    member = Member(seat, folder)
    with start_blocking_portal(backend_options={"use_uvloop": True}) as portal, serving(portal, member.serve):
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'gloo'}",
            rank=seat.index,
            world_size=seat.num_peers,
        )
        try:
            yield {
                "meet": partial(portal.call, member.meet),
                "ours": partial(portal.call, member.reduce),
                "gloo": partial(_gloo, SystemClock()),
            }
        finally:
            torch.distributed.destroy_process_group()


def _gloo(clock: SystemClock, num_elements: int, repeat: int) -> float:
    values_N = torch.ones(num_elements)
    start_s = clock.now_s()
    for _ in range(repeat):
        torch.distributed.all_reduce(values_N)
    return (clock.now_s() - start_s) / repeat
