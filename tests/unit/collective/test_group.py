"""The operations of a group beside a plain computation: the same bits on every member, wherever it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import anyio
import anyio.lowlevel
import pytest
import torch
from tests.reference.diloco import central_sum, handed_on, tree_sum
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

from shoal.codec.base import NO_STATE, CodecState, Encoded
from shoal.codec.cast import BF16
from shoal.codec.raw import to_wire
from shoal.collective.group import Group
from shoal.collective.inbox import GroupInbox
from shoal.collective.plan import Collective, even_lengths
from shoal.collective.shared_memory import SharedMemory
from shoal.collective.vectors import Reduction, RingVector
from shoal.errors import LocalProtocolError, MemberFault
from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.transport.memory import MemoryNetwork
from shoal.wire.messages import Message
from shoal.wire.messages.collective import RingPart, RingReady

everywhere = pytest.mark.parametrize("hosts", [APART, TOGETHER, MIXED], ids=["apart", "together", "mixed"])
every_collective = pytest.mark.parametrize("collective", list(Collective), ids=[each.value for each in Collective])
LENGTHS = [[7], [5, 0], [0, 40, 1], [33, 33, 0, 34], [1, 0, 2, 0, 90], [0, 0, 0]]
each_lengths = pytest.mark.parametrize("lengths", LENGTHS, ids=str)


def chunk_sum(contributions: Sequence[Tensor], collective: Collective, root: int, wire: torch.dtype | None) -> Tensor:
    """The sum of a chunk as it is formed at its root."""
    n = len(contributions)
    if collective is Collective.RING:
        following = [contributions[(root + step) % n] for step in range(1, n + 1)]
        total = following[0]
        for contribution in following[1:]:
            total = handed_on(total, wire) + contribution
        return handed_on(total, wire) if n > 1 else total
    from_root = [contributions[(root + place) % n] for place in range(n)]
    return (tree_sum if collective is Collective.TREE else central_sum)(from_root, wire)


@everywhere
@every_collective
@each_lengths
async def test_each_member_gets_its_part_of_the_sum_in_the_agreed_order(
    lengths: list[int], collective: Collective, hosts: Sequence[int]
) -> None:
    n, values = len(lengths), random_vectors(len(lengths), sum(lengths))
    counts = [torch.arange(n) * (place + 1) for place in range(n)]
    found: dict[int, list[Tensor]] = {}

    async def work(member: Member) -> None:
        own = values[member.place]
        values_N, cast_N, counts_N = member.shared(own, own, counts[member.place])
        vectors = [RingVector(0, values_N), RingVector(1, cast_N, codec=BF16), RingVector(3, counts_N, Reduction.MAX)]
        parts = await member.group().reduce_scatter(vectors, [lengths, lengths, [1] * n])
        found[member.place] = [part.clone() for part in parts]
        values_N.fill_(77)  # nobody reads it any more

    await together(n, work, hosts=hosts, choose=fixed(collective))
    for root, part in enumerate(torch.stack(values).split(lengths, dim=1)):
        assert torch.equal(found[root][0], chunk_sum(list(part), collective, root, None))
        assert torch.equal(found[root][1], chunk_sum(list(part), collective, root, torch.bfloat16))
        assert found[root][2].tolist() == [root * n]


@everywhere
@every_collective
@each_lengths
async def test_everybody_gets_what_each_member_has(
    lengths: list[int], collective: Collective, hosts: Sequence[int]
) -> None:
    values = random_vectors(1, sum(lengths), torch.float64)[0].split(lengths)
    places = torch.arange(len(lengths), dtype=torch.uint8)
    found: dict[int, list[list[list[float]]]] = {}

    async def work(member: Member) -> None:
        parts = [part if place == member.place else part * 0 for place, part in enumerate(values)]
        values_N, places_N = member.shared(torch.cat(parts), places * (places == member.place))
        vectors = [RingVector(0, values_N), RingVector(1, places_N)]
        gathered = await member.group().all_gather(vectors, [lengths, [1] * len(lengths)])
        found[member.place] = [[part.tolist() for part in parts] for parts in gathered]
        values_N.fill_(77)

    await together(len(lengths), work, hosts=hosts, choose=fixed(collective))
    expected = [[part.tolist() for part in values], [[place] for place in range(len(lengths))]]
    assert found == {place: expected for place in range(len(lengths))}


@everywhere
@every_collective
@pytest.mark.parametrize("num_members", [1, 2, 3, 4, 5])
async def test_everybody_gets_what_the_root_has(num_members: int, collective: Collective, hosts: Sequence[int]) -> None:
    sizes = (0, 1, 101)
    values = [random_vectors(num_members, size) for size in sizes]
    for root in range(num_members):
        found: list[list[Tensor]] = []

        async def work(member: Member, root: int = root, found: list[list[Tensor]] = found) -> None:
            own = member.shared(*(of_members[member.place] for of_members in values))
            vectors = [RingVector(number, values_N) for number, values_N in enumerate(own)]
            await member.group().broadcast(vectors, member.peers[root])
            found.append([values_N.clone() for values_N in own])
            own[-1].fill_(77)  # nobody reads it any more

        await together(num_members, work, hosts=hosts, choose=fixed(collective))
        assert len(found) == num_members
        for own in found:
            assert all(torch.equal(each, values[index][root]) for index, each in enumerate(own))


async def test_around_a_ring_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    values = random_vectors(3, 100)
    found: list[list[Tensor]] = []

    async def work(member: Member) -> None:
        group, (once_N, twice_N) = member.group(), member.shared(values[member.place], values[member.place])
        await group.all_reduce([RingVector(0, once_N, codec=BF16)])
        await group.reduce_scatter([RingVector(0, twice_N, codec=BF16)])
        await group.all_gather([RingVector(0, twice_N)])
        found.append([once_N.clone(), twice_N.clone()])

    await together(3, work, hosts=MIXED)
    assert all(torch.equal(vector, found[0][0]) for vectors in found for vector in vectors)


@everywhere
async def test_several_operations_run_at_once_and_each_has_its_own_result(hosts: Sequence[int]) -> None:
    n, num_operations = 4, 6
    values = [random_vectors(n, 150 + 31 * number) for number in range(num_operations)]
    found: dict[int, list[Tensor]] = {}

    async def work(member: Member) -> None:
        group = member.group()
        own = member.shared(*(of_members[member.place] for of_members in values))
        async with anyio.create_task_group() as tasks:
            for number, values_N in enumerate(own):
                tasks.start_soon((group.all_reduce, group.reduce_scatter)[number % 2], [RingVector(0, values_N)])
                if number % 3 == member.place:
                    await anyio.lowlevel.checkpoint()  # members are not equally far
        found[member.place] = [values_N.clone() for values_N in own]
        assert not member.memory.is_lent

    await together(n, work, hosts=hosts)
    for number, of_members in enumerate(values):
        lengths = even_lengths(of_members[0].numel(), n)
        chunks = torch.stack(of_members).split(lengths, dim=1)
        expected = [chunk_sum(list(chunk), Collective.RING, root, None) for root, chunk in enumerate(chunks)]
        for place in range(n):
            result = found[place][number].split(lengths)
            mine = range(n) if number % 2 == 0 else [place]
            assert all(torch.equal(result[root], expected[root]) for root in mine)


@everywhere
@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
async def test_members_go_on_without_one_that_is_lost_in_an_operation(name: str, hosts: Sequence[int]) -> None:
    n, victim = 4, PeerId("R1")
    network, lost = MemoryNetwork(seed=3), anyio.Event()
    values = [torch.full((60,), float(place)) for place in range(n)]
    found: dict[int, Tensor] = {}

    def kill(source: PeerId, _target: PeerId, message: Message) -> None:
        if source == victim and isinstance(message, RingPart | RingReady):
            network.before_delivery = None
            network.kill(victim)
            lost.set()

    network.before_delivery = kill

    async def operate(member: Member, tag: bytes, peers: Sequence[PeerId]) -> Tensor:
        [values_N] = member.shared(values[member.place])
        group, vectors = member.group(tag, peers), [RingVector(0, values_N)]
        match name:
            case "all_reduce":
                await group.all_reduce(vectors)
            case "reduce_scatter":
                return (await group.reduce_scatter(vectors))[0]
            case "all_gather":
                await group.all_gather(vectors)
            case _:
                await group.broadcast(vectors, victim if victim in peers else peers[0])
        return values_N

    async def work(member: Member) -> None:
        with anyio.move_on_after(60) as scope:
            async with anyio.create_task_group() as tasks:

                async def end() -> None:
                    await lost.wait()
                    tasks.cancel_scope.cancel()

                tasks.start_soon(end)
                await operate(member, b"1", member.peers)
                await anyio.sleep_forever()
        assert not scope.cancelled_caught
        if member.peers[member.place] != victim:
            survivors = [peer for peer in member.peers if peer != victim]
            found[member.place] = (await operate(member, b"2", survivors)).clone()

    await together(n, work, hosts=hosts, network=network)
    lengths = even_lengths(60, 3)
    expected = {
        "all_reduce": [[5.0] * 60] * 3,
        "reduce_scatter": [[5.0] * length for length in lengths],
        "all_gather": [[0.0] * 20 + [2.0] * 20 + [3.0] * 20] * 3,
        "broadcast": [[0.0] * 60] * 3,
    }
    assert [found[place].tolist() for place in (0, 2, 3)] == expected[name]


async def test_late_parts_of_what_has_ended_change_nothing_and_are_not_kept() -> None:
    results: list[list[float]] = []

    async def work(member: Member) -> None:
        group, other = member.group(), member.peers[1 - member.place]
        for number in range(3):
            values_N = torch.ones(4)
            await group.all_reduce([RingVector(0, values_N)])
            results.append(values_N.tolist())
            for gather, chunk in ((False, member.place), (True, 1 - member.place)):
                for tag, operation in ((TAG, number), (TAG, 0), (b"before", 3)):
                    late = RingPart(tag, operation, gather, 0, chunk, 0)
                    member.inbox.receive(Received(other, late, (to_wire(torch.full((2,), 9.0)),)))
        assert not group._arrivals._running
        assert not member.inbox._waiting

    await together(2, work)
    assert results == [[2.0] * 4] * 6


async def test_a_member_that_sends_what_no_plan_has_is_named() -> None:
    me, other = PeerId("R0"), PeerId("R1")
    for kind in ("reduce_scatter", "all_gather"):
        network = MemoryNetwork()
        member = Member(0, [me, other], network.endpoint(me), GroupInbox(bytes, 1000), SharedMemory(), 64, RING)
        # The complete chunk of this member comes from nobody, and a sum is not formed in a gather.
        gather = kind == "reduce_scatter"
        part = RingPart(TAG, 0, gather, 0, 1, 0)
        member.inbox.receive(Received(other, part, (to_wire(torch.zeros(2)),)))
        group = member.group()
        with pytest.raises(MemberFault, match="not its to send") as caught:
            await getattr(group, kind)([RingVector(0, torch.zeros(4))])
        assert caught.value.peer == other


class BlockCodec:
    """8 bits a value and the largest of each block of four, with what rounding has left out as its state."""

    is_elementwise: ClassVar[bool] = False
    name = "blocks"

    def wire_dtypes(self, dtype: torch.dtype) -> tuple[torch.dtype, ...]:
        return (torch.uint8, torch.float32)

    def initial_state(self, num_elements: int) -> CodecState:
        return (torch.zeros(num_elements),)

    def encode(self, values_N: Tensor, state: CodecState = NO_STATE) -> Encoded:
        owed_N = values_N + state[0] if state else values_N
        blocks_B4 = torch.nn.functional.pad(owed_N, (0, -len(owed_N) % 4)).view(-1, 4)
        largest_B = blocks_B4.abs().amax(1).clamp(min=1e-30)
        codes_N = (blocks_B4 / largest_B[:, None] * 127).round().add(128).to(torch.uint8).flatten()[: len(owed_N)]
        tensors = (codes_N, largest_B)
        return Encoded(tensors, (owed_N - self.decode(tensors),))

    def decode(self, tensors: tuple[Tensor, ...], out_N: Tensor | None = None) -> Tensor:
        codes_N, largest_B = tensors
        scales_N = largest_B.repeat_interleave(4)[: len(codes_N)]
        values_N = (codes_N.to(torch.float32) - 128) / 127 * scales_N
        return values_N if out_N is None else out_N.copy_(values_N)

    def rounded(self, values_N: Tensor) -> Tensor:
        return self.decode(self.encode(values_N).tensors)


@pytest.mark.parametrize("num_elements", [0, 1, 4, 4003])
async def test_what_a_codec_encodes_once_a_round_is_gathered_and_gives_everybody_the_same_sum(
    num_elements: int,
) -> None:
    n, num_rounds, codec = 3, 3, BlockCodec()
    values = random_vectors(n, num_elements)
    found: dict[int, list[Tensor]] = {place: [] for place in range(n)}

    async def work(member: Member) -> None:
        group, state = member.group(), codec.initial_state(num_elements)
        for _ in range(num_rounds):
            tensors, state = codec.encode(values[member.place], state)
            # Members do not know how long each other's tensors are, as with a codec whose size depends on the values.
            own = torch.zeros(n, len(tensors), dtype=torch.int64)
            own[member.place] = torch.tensor([len(each) for each in tensors])
            await group.all_gather([RingVector(0, own.flatten())])
            lengths = own.T.tolist()
            room = member.shared(*(torch.empty(sum(e), dtype=t.dtype) for e, t in zip(lengths, tensors, strict=True)))
            for whole, each, tensor in zip(room, lengths, tensors, strict=True):
                whole.split(each)[member.place].copy_(tensor)
            vectors = [RingVector(number, whole) for number, whole in enumerate(room)]
            parts = await group.all_gather(vectors, lengths)
            total_N = torch.zeros(num_elements)
            for of_member in zip(*parts, strict=True):
                total_N += codec.decode(of_member)
            found[member.place].append(total_N)

    await together(n, work, hosts=MIXED)
    states = [codec.initial_state(num_elements)] * n
    for number in range(num_rounds):
        total_N = torch.zeros(num_elements)
        for place in range(n):
            tensors, states[place] = codec.encode(values[place], states[place])
            total_N += codec.decode(tensors)
        assert all(torch.equal(found[place][number], total_N) for place in range(n))


def test_a_sum_on_its_way_takes_no_codec_that_is_not_element_wise_nor_values_that_it_cannot_cast() -> None:
    with pytest.raises(LocalProtocolError, match="blocks cannot encode a sum on its way"):
        RingVector(0, torch.zeros(8), codec=BlockCodec())
    with pytest.raises(LocalProtocolError, match="int64 cannot be cast to bf16"):
        RingVector(0, torch.zeros(8, dtype=torch.int64), codec=BF16)


@pytest.mark.parametrize("lengths", [[4], [3, 4], [9, -1]])
async def test_lengths_that_do_not_fit_their_vector_are_refused(lengths: list[int]) -> None:
    async def work(member: Member) -> None:
        group, vectors = member.group(), [RingVector(5, torch.zeros(8))]
        for operation in (group.reduce_scatter, group.all_gather):
            with pytest.raises(LocalProtocolError, match="of the 8 of vector 5"):
                await operation(vectors, [lengths])

    await together(2, work)


async def test_what_is_not_summed_takes_no_codec_and_only_a_member_can_broadcast() -> None:
    async def work(member: Member) -> None:
        group, cast = member.group(), [RingVector(0, torch.zeros(8), codec=BF16)]
        with pytest.raises(LocalProtocolError, match="encode it by bf16"):
            await group.all_gather(cast)
        with pytest.raises(LocalProtocolError, match="encode it by bf16"):
            await group.broadcast(cast, member.peers[0])
        with pytest.raises(LocalProtocolError, match="X is no member"):
            await group.broadcast([RingVector(0, torch.zeros(8))], PeerId("X"))

    await together(2, work)


def test_a_member_outside_the_group_cannot_take_part() -> None:
    endpoint = MemoryNetwork().endpoint(PeerId("X"))
    with pytest.raises(LocalProtocolError, match="not once"):
        Group(endpoint, [PeerId("R0")], TAG, GroupInbox(bytes, 1000), inline)


def test_a_tag_that_no_message_takes_is_refused_at_home() -> None:
    endpoint = MemoryNetwork().endpoint(PeerId("R0"))
    with pytest.raises(LocalProtocolError, match="a tag of 257 bytes"):
        Group(endpoint, [PeerId("R0")], bytes(257), GroupInbox(bytes, 1000), inline)


async def test_vectors_of_one_number_are_refused_or_one_would_go_for_the_other() -> None:
    endpoint = MemoryNetwork().endpoint(PeerId("R0"))
    group = Group(endpoint, [PeerId("R0")], TAG, GroupInbox(bytes, 1000), inline)
    with pytest.raises(LocalProtocolError, match=r"one number: \[3, 3\]"):
        await group.all_reduce([RingVector(3, torch.ones(2)), RingVector(3, torch.ones(2))])
