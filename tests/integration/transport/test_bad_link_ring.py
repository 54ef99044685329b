"""A ring of real endpoints, each two neighbours with a bad link between them: the right bits on every member."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import anyio
import torch
from tests.integration.transport.samples import ALICE, BOB, CAROL, port_of

from shoal.collective.group import Group
from shoal.collective.inbox import GroupInbox
from shoal.collective.vectors import Reduction, RingVector
from shoal.transport.base import Received
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.wire.messages import Hop
from shoal_lab.faults.link_grammar import parse_link
from shoal_lab.faults.link_proxy import LinkProxy

TAG = b"group"
LINKS = ("50mbit,40ms,jitter=20ms,loss=1%,seed=1", "20mbit,10ms", "100mbit,100ms,loss=2%,seed=2")


async def inline(function: Callable[[], None]) -> None:
    function()


async def test_a_ring_over_slow_late_and_lossy_links_ends_with_the_sum_everywhere(host: Any) -> None:
    limits = TransportLimits(heartbeat_s=0.1, deadline_s=2.0)
    endpoints = [await host(identity, limits=limits) for identity in (ALICE, BOB, CAROL)]
    peers = [endpoint.peer_id for endpoint in endpoints]
    inboxes = [GroupInbox(bytes, 10**8) for _ in endpoints]
    # Whole numbers, so that the sum does not depend on the order of additions.
    vectors = [torch.arange(300_000, dtype=torch.float32) % 1000 * (rank + 1) for rank in range(3)]
    expected = sum(vectors[1:], vectors[0].clone())

    async def serve(endpoint: StreamEndpoint, inbox: GroupInbox) -> None:
        async for event in endpoint.events():
            if isinstance(event, Received):
                inbox.receive(event)

    async def run(rank: int) -> None:
        group = Group(endpoints[rank], peers, TAG, inboxes[rank], inline)
        await group.all_reduce([RingVector(0, vectors[rank], Reduction.SUM)])

    async with AsyncExitStack() as stack:
        for rank, link in enumerate(LINKS):
            after = endpoints[(rank + 1) % 3]
            proxy = await stack.enter_async_context(LinkProxy(("127.0.0.1", port_of(after)), parse_link(link)))
            endpoints[rank].introduce(Hop(after.peer_id, (proxy.address,)))
        servers = await stack.enter_async_context(anyio.create_task_group())
        for endpoint, inbox in zip(endpoints, inboxes, strict=True):
            servers.start_soon(serve, endpoint, inbox)
        async with anyio.create_task_group() as rings:
            for rank in range(3):
                rings.start_soon(run, rank)
        assert [endpoint.counters["transport.lost"] for endpoint in endpoints] == [0, 0, 0]
        servers.cancel_scope.cancel()
    for vector in vectors:
        assert torch.equal(vector, expected)
