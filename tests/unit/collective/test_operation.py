"""All-reduce over an in-memory network: the bits of a plain sum in the agreed order, on every member."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import pytest
import torch
from tests.alongside import alongside, until
from tests.linux_calls import needs
from tests.reference.diloco import agreed_sum, central_sum, ring_sum, tree_sum
from tests.unit.collective.members import (
    APART,
    MIXED,
    RING,
    TAG,
    TOGETHER,
    Member,
    fixed,
    inline,
    random_vectors,
    together,
)
from torch import Tensor

from shoal.codec.base import Codec
from shoal.codec.raw import to_wire
from shoal.codec.registry import CODECS
from shoal.collective.group import Group
from shoal.collective.inbox import GroupInbox
from shoal.collective.plan import Collective, choose_collective
from shoal.collective.shared_memory import SharedMemory
from shoal.collective.vectors import Reduction, RingVector
from shoal.errors import MemberFault
from shoal.ids import PeerId
from shoal.runtime.linux_calls import LinuxCall
from shoal.transport.base import Received
from shoal.transport.memory import MemoryEndpoint, MemoryNetwork
from shoal.wire.messages import Traffic
from shoal.wire.messages.collective import RingPart
from shoal.wire.messages.control import Heartbeat


async def all_reduce(
    contributions: Sequence[Sequence[RingVector]],
    segment_bytes: int = 64,
    choose: Callable[[int, int], Collective] = RING,
    hosts: Sequence[int] = APART,
) -> list[MemoryEndpoint]:
    """Reduce these vectors, of each member some, in their place."""

    async def work(member: Member) -> None:
        vectors = contributions[member.place]
        shared = member.shared(*(vector.values_N for vector in vectors))
        copies = [RingVector(v.number, c, v.reduction, v.codec) for v, c in zip(vectors, shared, strict=True)]
        await member.group().all_reduce(copies)
        for copy_N, vector in zip(shared, vectors, strict=True):
            vector.values_N.copy_(copy_N)
            copy_N.fill_(77)  # nobody reads it any more

    return await together(len(contributions), work, hosts=hosts, segment_bytes=segment_bytes, choose=choose)


def wire_of(codec: Codec) -> torch.dtype | None:
    """As what float32 travels, for the reference; None is itself."""
    [dtype] = codec.wire_dtypes(torch.float32)
    return None if dtype == torch.float32 else dtype


SUMS = {Collective.RING: ring_sum, Collective.TREE: tree_sum, Collective.CENTRAL: central_sum}


@pytest.mark.parametrize("hosts", [APART, TOGETHER, MIXED])
@pytest.mark.parametrize("codec", list(CODECS.values()), ids=list(CODECS))
@pytest.mark.parametrize("collective", list(Collective))
@pytest.mark.parametrize(
    ("num_members", "num_elements"), [(1, 5), (2, 7), (3, 100), (4, 101), (5, 3), (7, 300), (3, 0)]
)
async def test_every_member_ends_with_the_sum_in_the_agreed_order_wherever_it_runs(
    num_members: int, num_elements: int, collective: Collective, codec: Codec, hosts: Sequence[int]
) -> None:
    values = random_vectors(num_members, num_elements, torch.float32)
    expected = SUMS[collective](values, wire_of(codec))
    vectors = [[RingVector(0, value.clone(), Reduction.SUM, codec)] for value in values]
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


_needs_memory = needs(LinuxCall.MEMFD, "vectors are sent")


@_needs_memory
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


def group_of_two() -> tuple[Group, GroupInbox]:
    inbox = GroupInbox(bytes, 1000)
    endpoint, members = MemoryNetwork().endpoint(PeerId("R0")), [PeerId("R0"), PeerId("R1")]
    return Group(endpoint, members, TAG, inbox, inline, segment_bytes=8, choose=RING), inbox


def part(chunk: int, segment: int, values: Tensor, *, gather: bool = False, buffer: int = 0) -> RingPart:
    return RingPart(TAG, 0, gather, buffer, chunk, segment)


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
    ],
)
async def test_what_the_plan_does_not_have_is_refused(sender: str, message: RingPart, values: Tensor) -> None:
    group, inbox = group_of_two()
    inbox.receive(Received(PeerId(sender), message, (to_wire(values),)))
    with pytest.raises(MemberFault) as caught:
        await group.all_reduce([RingVector(0, torch.ones(8))])
    assert caught.value.peer == sender


async def test_a_part_that_comes_twice_is_added_once() -> None:
    values_N = torch.ones(4)
    group, inbox = group_of_two()
    for message, values in [
        (part(0, 0, values_N), torch.tensor([5.0, 6.0])),
        (part(0, 0, values_N), torch.tensor([5.0, 6.0])),
        (part(1, 0, values_N, gather=True), torch.tensor([7.0, 8.0])),
    ]:
        inbox.receive(Received(PeerId("R1"), message, (to_wire(values),)))
    await group.all_reduce([RingVector(0, values_N)])
    assert values_N.tolist() == [6.0, 7.0, 7.0, 8.0]


@_needs_memory
@pytest.mark.parametrize(("name", "slow_call"), [("all_reduce", 2), ("reduce_scatter", 1)])
async def test_an_operation_ends_only_when_nobody_reads_its_vectors_any_more(name: str, slow_call: int) -> None:
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
        if num_calls == slow_call:  # it adds to its own chunk, or after that copies the other one
            reads.set()
            await may_read.wait()
        function()

    async def serve(index: int, inbox: GroupInbox) -> None:
        async for event in endpoints[index].events():
            if isinstance(event, Received):
                inbox.receive(event)

    results: list[Tensor] = []

    async def run(index: int, inbox: GroupInbox) -> None:
        [values_N] = memories[index].vectors([(400_000, torch.float32)])
        values_N.fill_(index + 1.0)
        compute, vectors = (inline, slow)[index], [RingVector(0, values_N, Reduction.SUM)]
        group = Group(endpoints[index], peers, TAG, inbox, compute, memory=memories[index])
        parts = await getattr(group, name)(vectors)
        results.append((parts[0] if parts else values_N).clone())
        values_N.fill_(77.0)
        if index == 0:
            ended.set()

    async with alongside() as tasks:
        for index in range(2):
            inbox = GroupInbox(bytes, 10**7)
            tasks.start_soon(serve, index, inbox)
            tasks.start_soon(run, index, inbox)
        await reads.wait()
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        assert not ended.is_set()
        may_read.set()
        await ended.wait()
        await until(lambda: len(results) >= 2)
    assert all(result.unique().tolist() == [3.0] for result in results)
    for memory in memories:
        memory.close()
