"""All-reduce over an in-memory network: the bits of a plain sum in the agreed order, on every member."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import pytest
import torch
from tests.reference.diloco import ring_sum
from torch import Tensor

from shoal.codec.raw import to_wire
from shoal.collective.inbox import RingInbox, RingTag
from shoal.collective.ring import Reduction, Ring, RingVector
from shoal.errors import LocalProtocolError, RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.transport.base import Received
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages.round import RingPart

pytestmark = pytest.mark.anyio
TAG = RingTag(1, Ballot(1, PeerId("C"), 1), 0)


async def inline(function: Callable[[], None]) -> None:
    function()
    await anyio.lowlevel.checkpoint()


async def all_reduce(contributions: Sequence[Sequence[RingVector]], segment_bytes: int = 64) -> MemoryNetwork:
    network = MemoryNetwork()
    peers = [PeerId(f"R{index}") for index in range(len(contributions))]
    endpoints = [network.endpoint(peer) for peer in peers]
    for endpoint in endpoints:
        for other in endpoints:
            endpoint.introduce(other.hop)

    async def serve(endpoint: MemoryEndpoint, inbox: RingInbox) -> None:
        async for event in endpoint.events():
            if isinstance(event, Received):
                inbox.receive(event)

    async def run(endpoint: MemoryEndpoint, inbox: RingInbox, vectors: Sequence[RingVector]) -> None:
        await Ring(endpoint, TAG, 0, peers, vectors, inline, segment_bytes).run(inbox.open(TAG))

    async with anyio.create_task_group() as servers:
        inboxes = [RingInbox(0, 10**7) for _ in endpoints]
        for endpoint, inbox in zip(endpoints, inboxes, strict=True):
            servers.start_soon(serve, endpoint, inbox)
        async with anyio.create_task_group() as rings:
            for endpoint, inbox, vectors in zip(endpoints, inboxes, contributions, strict=True):
                rings.start_soon(run, endpoint, inbox, vectors)
        servers.cancel_scope.cancel()
    return network


def random_vectors(num_members: int, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_members)
    return [torch.randn(num_elements, generator=generator, dtype=dtype) for _ in range(num_members)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("num_members", "num_elements"), [(1, 5), (2, 7), (3, 100), (4, 101), (5, 3), (3, 0)])
async def test_every_member_ends_with_the_sum_in_the_agreed_order(
    num_members: int, num_elements: int, dtype: torch.dtype
) -> None:
    values = random_vectors(num_members, num_elements, dtype)
    expected = ring_sum(values)
    vectors = [[RingVector(0, value.clone(), Reduction.SUM)] for value in values]
    await all_reduce(vectors)
    for [vector] in vectors:
        assert torch.equal(vector.values_N, expected)


async def test_the_order_of_additions_matters_here() -> None:
    values = random_vectors(4, 1000, torch.float32)
    assert not torch.equal(ring_sum(values), values[0] + values[1] + values[2] + values[3])


async def test_large_parts_are_added_by_the_thread_that_computes() -> None:
    values = random_vectors(2, 300_000, torch.float32)
    vectors = [[RingVector(0, value.clone(), Reduction.SUM)] for value in values]
    await all_reduce(vectors, segment_bytes=1 << 20)
    assert torch.equal(vectors[0][0].values_N, values[0] + values[1])


async def test_vectors_of_several_kinds_are_reduced_side_by_side() -> None:
    floats = random_vectors(3, 50, torch.float32)
    integers = [torch.arange(10) * sign for sign in (1, -1, 2)]
    vectors = [
        [RingVector(0, f.clone(), Reduction.SUM), RingVector(2, i.clone(), Reduction.MAX)]
        for f, i in zip(floats, integers, strict=True)
    ]
    await all_reduce(vectors)
    for own in vectors:
        assert torch.equal(own[0].values_N, ring_sum(floats))
        assert torch.equal(own[1].values_N, torch.stack(integers).amax(0))


def ring_of_two(values_N: Tensor) -> tuple[Ring, RingInbox]:
    endpoint = MemoryNetwork().endpoint(PeerId("R0"))
    ring = Ring(endpoint, TAG, 0, [PeerId("R0"), PeerId("R1")], [RingVector(0, values_N, Reduction.SUM)], inline, 8)
    return ring, RingInbox(0, 1000)


def part(chunk: int, segment: int, values: Tensor, *, gather: bool = False, buffer: int = 0) -> RingPart:
    return RingPart(TAG.ballot, TAG.round, TAG.epoch, 0, gather, buffer, chunk, segment)


@pytest.mark.parametrize(
    ("sender", "message", "values"),
    [
        ("R1", part(0, 9, torch.zeros(2)), torch.zeros(2)),  # no such segment
        ("R1", part(5, 0, torch.zeros(2)), torch.zeros(2)),  # no such chunk
        ("R1", part(1, 0, torch.zeros(2)), torch.zeros(2)),  # the chunk whose sum starts here
        ("R1", part(0, 0, torch.zeros(2), gather=True), torch.zeros(2)),  # the own chunk, complete
        ("R1", part(0, 0, torch.zeros(2), buffer=1), torch.zeros(2)),  # no such vector
        ("R1", part(0, 0, torch.zeros(3)), torch.zeros(3)),  # another size
        ("R1", part(0, 0, torch.zeros(2)), torch.zeros(2, dtype=torch.float64)),  # another type
        ("R9", part(0, 0, torch.zeros(2)), torch.zeros(2)),  # not the member before
    ],
)
async def test_what_the_plan_does_not_have_is_refused(sender: str, message: RingPart, values: Tensor) -> None:
    ring, inbox = ring_of_two(torch.ones(8))
    inbox.receive(Received(PeerId(sender), message, (to_wire(values),)))
    with pytest.raises(RemoteProtocolError):
        await ring.run(inbox.open(TAG))


async def test_a_part_that_comes_twice_is_added_once() -> None:
    values_N = torch.ones(4)
    ring, inbox = ring_of_two(values_N)
    for message, values in [
        (part(0, 0, values_N), torch.tensor([5.0, 6.0])),
        (part(0, 0, values_N), torch.tensor([5.0, 6.0])),
        (part(1, 0, values_N, gather=True), torch.tensor([7.0, 8.0])),
    ]:
        inbox.receive(Received(PeerId("R1"), message, (to_wire(values),)))
    await ring.run(inbox.open(TAG))
    assert values_N.tolist() == [6.0, 7.0, 7.0, 8.0]


async def test_a_member_outside_the_ring_cannot_run_it() -> None:
    endpoint = MemoryNetwork().endpoint(PeerId("X"))
    with pytest.raises(LocalProtocolError, match="not once"):
        Ring(endpoint, TAG, 0, [PeerId("R0")], [], inline)
