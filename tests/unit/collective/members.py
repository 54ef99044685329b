"""Groups in one process, over an in-memory network: what every member does is one coroutine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
import torch
from tests.alongside import alongside
from torch import Tensor

from shoal.collective.group import Group
from shoal.collective.inbox import GroupInbox
from shoal.collective.plan import Collective
from shoal.collective.shared_memory import SharedMemory
from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.control import Heartbeat

TAG = b"group"
APART = [0, 1, 2, 3, 4, 5, 6, 7]
TOGETHER = [0] * 8
MIXED = [0, 0, 1, 1, 0, 1, 1, 0]


async def inline(function: Callable[[], None]) -> None:
    function()
    await anyio.lowlevel.checkpoint()


def fixed(collective: Collective) -> Callable[[int, int], Collective]:
    return lambda _num_bytes, _num_members: collective


RING = fixed(Collective.RING)


@dataclass(frozen=True)
class Member:
    """One of them, and how it makes a group."""

    place: int
    peers: Sequence[PeerId]
    endpoint: MemoryEndpoint
    inbox: GroupInbox
    memory: SharedMemory
    segment_bytes: int
    choose: Callable[[int, int], Collective]

    def group(self, tag: bytes = TAG, peers: Sequence[PeerId] | None = None) -> Group:
        return Group(
            self.endpoint,
            self.peers if peers is None else peers,
            tag,
            self.inbox,
            inline,
            memory=self.memory,
            segment_bytes=self.segment_bytes,
            choose=self.choose,
        )

    def shared(self, *values: Tensor) -> list[Tensor]:
        """Copies of vectors where others may read them."""
        copies = self.memory.vectors([(each.numel(), each.dtype) for each in values])
        for copy, each in zip(copies, values, strict=True):
            copy.copy_(each)
        return copies


async def together(
    num_members: int,
    work: Callable[[Member], Awaitable[None]],
    *,
    hosts: Sequence[int] = APART,
    segment_bytes: int = 64,
    choose: Callable[[int, int], Collective] = RING,
    network: MemoryNetwork | None = None,
) -> list[MemoryEndpoint]:
    """Run all members until all have ended. Those of one host lend each other their vectors."""
    network = network or MemoryNetwork(seed=0)
    peers = [PeerId(f"R{index}") for index in range(num_members)]
    host_of = dict(zip(peers, hosts, strict=False))
    network.is_one_host = lambda here, there: host_of[here] == host_of[there]
    endpoints = [network.endpoint(peer) for peer in peers]
    for endpoint in endpoints:
        for other in endpoints:
            endpoint.introduce(other.hop)
            if other is not endpoint:
                endpoint.post(other.peer_id, Heartbeat())
    members = [
        Member(place, peers, endpoint, GroupInbox(bytes, 10**7), SharedMemory(), segment_bytes, choose)
        for place, endpoint in enumerate(endpoints)
    ]

    async def serve(member: Member) -> None:
        async for event in member.endpoint.events():
            if isinstance(event, Received):
                member.inbox.receive(event)

    async with alongside() as servers:
        for member in members:
            servers.start_soon(serve, member)
        async with anyio.create_task_group() as workers:
            for member in members:
                workers.start_soon(work, member)
    for member in members:
        member.memory.close()
    return endpoints


def random_vectors(num_members: int, num_elements: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_members)
    return [torch.randn(num_elements, generator=generator, dtype=dtype) for _ in range(num_members)]
