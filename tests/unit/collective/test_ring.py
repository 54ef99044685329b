"""All-reduce over an in-memory network: the bits of a plain sum in the agreed order, on every member."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import pytest
import torch
from tests.reference.diloco import agreed_sum, central_sum, ring_sum, tree_sum
from torch import Tensor

from shoal.codec.raw import to_wire
from shoal.collective.inbox import RingInbox, RingTag
from shoal.collective.plan import Collective, choose_collective
from shoal.collective.ring import Ring
from shoal.collective.shared_memory import SharedMemory
from shoal.collective.vectors import Reduction, RingVector
from shoal.errors import LocalProtocolError, RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.transport.base import Received
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import Traffic
from shoal.wire.messages.control import Heartbeat
from shoal.wire.messages.round import RingPart

pytestmark = pytest.mark.anyio
TAG = RingTag(1, Ballot(1, PeerId("C"), 1), 0)


async def inline(function: Callable[[], None]) -> None:
    function()
    await anyio.lowlevel.checkpoint()


def fixed(collective: Collective) -> Callable[[int, int], Collective]:
    return lambda _num_bytes, _num_members: collective


RING = fixed(Collective.RING)


async def all_reduce(
    contributions: Sequence[Sequence[RingVector]],
    segment_bytes: int = 64,
    choose: Callable[[int, int], Collective] = RING,
    hosts: Sequence[int] | None = None,
) -> list[MemoryEndpoint]:
    """With `hosts` (one for each member), those of a host lend each other their vectors. Everyone knows the others."""
    network = MemoryNetwork(seed=0)
    peers = [PeerId(f"R{index}") for index in range(len(contributions))]
    if hosts is not None:
        host_of = dict(zip(peers, hosts, strict=True))
        network.is_one_host = lambda here, there: host_of[here] == host_of[there]
    endpoints = [network.endpoint(peer) for peer in peers]
    memories = [SharedMemory() for _ in peers]
    for endpoint in endpoints:
        for other in endpoints:
            endpoint.introduce(other.hop)
            if other is not endpoint:
                endpoint.post(other.peer_id, Heartbeat())

    async def serve(endpoint: MemoryEndpoint, inbox: RingInbox) -> None:
        async for event in endpoint.events():
            if isinstance(event, Received):
                inbox.receive(event)

    async def run(index: int, inbox: RingInbox, vectors: Sequence[RingVector]) -> None:
        memory = memories[index]
        shared = memory.vectors([(v.values_N.numel(), v.values_N.dtype) for v in vectors])
        for copy_N, vector in zip(shared, vectors, strict=True):
            copy_N.copy_(vector.values_N)
        copies = [RingVector(v.number, c, v.reduction, v.wire) for v, c in zip(vectors, shared, strict=True)]
        ring = Ring(
            endpoints[index],
            TAG,
            0,
            peers,
            copies,
            inline,
            memory=memory,
            segment_bytes=segment_bytes,
            choose=choose,
        )
        await ring.run(inbox.open(TAG))
        for copy_N, vector in zip(shared, vectors, strict=True):
            vector.values_N.copy_(copy_N)
            copy_N.fill_(77)  # nobody reads it any more

    async with anyio.create_task_group() as servers:
        inboxes = [RingInbox(0, 10**7) for _ in endpoints]
        for endpoint, inbox in zip(endpoints, inboxes, strict=True):
            servers.start_soon(serve, endpoint, inbox)
        async with anyio.create_task_group() as rings:
            for index, (inbox, vectors) in enumerate(zip(inboxes, contributions, strict=True)):
                rings.start_soon(run, index, inbox, vectors)
        servers.cancel_scope.cancel()
    for memory in memories:
        memory.close()
    return endpoints


def random_vectors(num_members: int, num_elements: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(num_members)
    return [torch.randn(num_elements, generator=generator, dtype=dtype) for _ in range(num_members)]


SUMS = {Collective.RING: ring_sum, Collective.TREE: tree_sum, Collective.CENTRAL: central_sum}
APART = [0, 1, 2, 3, 4, 5, 6, 7]
TOGETHER = [0] * 8
MIXED = [0, 0, 1, 1, 0, 1, 1, 0]


@pytest.mark.parametrize("hosts", [APART, TOGETHER, MIXED])
@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("collective", list(Collective))
@pytest.mark.parametrize(
    ("num_members", "num_elements"), [(1, 5), (2, 7), (3, 100), (4, 101), (5, 3), (7, 300), (3, 0)]
)
async def test_every_member_ends_with_the_sum_in_the_agreed_order_wherever_it_runs(
    num_members: int, num_elements: int, collective: Collective, wire: torch.dtype | None, hosts: Sequence[int]
) -> None:
    values = random_vectors(num_members, num_elements, torch.float32)
    expected = SUMS[collective](values, wire)
    vectors = [[RingVector(0, value.clone(), Reduction.SUM, wire)] for value in values]
    await all_reduce(vectors, choose=fixed(collective), hosts=hosts[:num_members])
    for [vector] in vectors:
        assert torch.equal(vector.values_N, expected)


@pytest.mark.parametrize("num_members", [2, 3, 4])
async def test_members_that_choose_by_themselves_follow_the_reference(num_members: int) -> None:
    small = random_vectors(num_members, 1000, torch.float64)
    large = random_vectors(num_members, 40_000, torch.float32)
    vectors = [
        [RingVector(0, a.clone(), Reduction.SUM), RingVector(1, b.clone(), Reduction.SUM)]
        for a, b in zip(small, large, strict=True)
    ]
    await all_reduce(vectors, segment_bytes=1000, choose=choose_collective, hosts=MIXED[:num_members])
    for own in vectors:
        assert torch.equal(own[0].values_N, agreed_sum(small))
        assert torch.equal(own[1].values_N, agreed_sum(large))


async def test_members_of_one_host_send_no_values() -> None:
    vectors = [[RingVector(0, value, Reduction.SUM)] for value in random_vectors(2, 100_000, torch.float32)]
    for hosts, is_small in ((TOGETHER, True), (APART, False)):
        endpoints = await all_reduce(vectors, segment_bytes=10_000, hosts=hosts[:2])
        sent_bytes = sum(endpoint.sent_bytes[Traffic.PSEUDO_GRADIENTS] for endpoint in endpoints)
        assert (sent_bytes < 20_000) is is_small


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
    members, vectors = [PeerId("R0"), PeerId("R1")], [RingVector(0, values_N, Reduction.SUM)]
    ring = Ring(endpoint, TAG, 0, members, vectors, inline, segment_bytes=8, choose=fixed(Collective.RING))
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


async def test_a_ring_ends_only_when_nobody_reads_its_vectors_any_more() -> None:
    network = MemoryNetwork()
    network.is_one_host = lambda _here, _there: True
    peers = [PeerId("R0"), PeerId("R1")]
    endpoints, memories = [network.endpoint(peer) for peer in peers], [SharedMemory(), SharedMemory()]
    endpoints[0].introduce(endpoints[1].hop)
    endpoints[0].post(peers[1], Heartbeat())
    reads, ended = anyio.Event(), anyio.Event()
    may_read = anyio.Event()
    num_calls = 0

    async def slow(function: Callable[[], None]) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:  # it has added to its own chunk, and copies the other one
            reads.set()
            await may_read.wait()
        function()

    async def serve(index: int, inbox: RingInbox) -> None:
        async for event in endpoints[index].events():
            if isinstance(event, Received):
                inbox.receive(event)

    results: list[Tensor] = []

    async def run(index: int, inbox: RingInbox) -> None:
        [values_N] = memories[index].vectors([(400_000, torch.float32)])
        values_N.fill_(index + 1.0)
        compute, vectors = (inline, slow)[index], [RingVector(0, values_N, Reduction.SUM)]
        await Ring(endpoints[index], TAG, 0, peers, vectors, compute, memory=memories[index]).run(inbox.open(TAG))
        results.append(values_N.clone())
        values_N.fill_(77.0)
        if index == 0:
            ended.set()

    async with anyio.create_task_group() as tasks:
        for index in range(2):
            inbox = RingInbox(0, 10**7)
            tasks.start_soon(serve, index, inbox)
            tasks.start_soon(run, index, inbox)
        await reads.wait()
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert not ended.is_set()
        may_read.set()
        await ended.wait()
        while len(results) < 2:
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert all(result.unique().tolist() == [3.0] for result in results)
    for memory in memories:
        memory.close()
