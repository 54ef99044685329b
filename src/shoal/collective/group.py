"""Members that compute together: the operations of one group, from all-reduce to broadcast.

    Group(members, tag) --> all_reduce | reduce_scatter | all_gather | broadcast --> plan --> GroupOperation

All members begin the same operations in the same order; several may run at once. The same contributions give the same
bits on all members, whoever shares memory with whom: `plan` says in which order sums are formed. Operations work in
place, so vectors that neighbours on the same host are to read lie in `SharedMemory`, all from one call.

A group does not change and does not judge: when a member is lost, or sends what no plan has, its operations cannot end.
Whoever watches the members cancels them, and goes on with a group of another tag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shoal.codec.plain import PLAIN
from shoal.collective.inbox import GroupInbox
from shoal.collective.operation import Compute, GroupOperation
from shoal.collective.plan import SEGMENT_BYTES, Collective, CollectivePlan, choose_collective, even_lengths
from shoal.collective.shared_memory import SharedMemory
from shoal.collective.vectors import RingVector
from shoal.errors import LocalProtocolError
from shoal.ids import PeerId
from shoal.transport.base import Endpoint
from shoal.wire.messages.collective import MAX_TAG_BYTES


class Group:
    """One member's end of a group; it opens the inbox, which ends the group before.

    Every operation returns when its result is there and nobody reads the vectors any more. Those of an operation have
    different numbers, and the same numbers, sizes, dtypes, codecs and reductions on all members.

    Args:
        members: In ring order, this endpoint's peer among them, each once.
        tag: The same on all members, and that of no other group.
        compute: Where large sums are formed, so that the event loop is not held up.
        memory: Where the vectors are that neighbours on the same host may read; without it everything is sent.
        segment_bytes: How much travels in one frame; the same on all members.
        choose: The collective for a vector of so many bytes and so many members; the same on all members.

    Raises:
        LocalProtocolError: This endpoint's peer is not in the group, or no message takes the tag.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        members: Sequence[PeerId],
        tag: bytes,
        inbox: GroupInbox,
        compute: Compute,
        *,
        memory: SharedMemory | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        choose: Callable[[int, int], Collective] = choose_collective,
    ) -> None:
        if members.count(endpoint.peer_id) != 1:
            raise LocalProtocolError(f"{endpoint.peer_id} is not once in a group of {len(members)}")
        if len(tag) > MAX_TAG_BYTES:
            raise LocalProtocolError(f"a tag of {len(tag)} bytes; no message takes more than {MAX_TAG_BYTES}")
        self._endpoint = endpoint
        self._members = tuple(members)
        self._tag = tag
        self._arrivals = inbox.open(tag, self._members)
        self._compute = compute
        self._memory = memory or SharedMemory()
        self._segment_bytes = segment_bytes
        self._choose = choose

    async def all_reduce(self, vectors: Sequence[RingVector]) -> None:
        """Reduce vectors: everybody ends with the whole sums (or maxima).

        Raises:
            MemberFault: A member sent what the plan does not have.
        """
        n = len(self._members)
        await self._run(
            [(v, CollectivePlan.all_reduce(self._along(v), n, v.values_N.numel(), self._segment(v))) for v in vectors]
        )

    async def reduce_scatter(
        self, vectors: Sequence[RingVector], lengths: Sequence[Sequence[int]] | None = None
    ) -> list[Tensor]:
        """Reduce vectors, of which each member ends with a part.

        Args:
            vectors: Their other parts have arbitrary values afterwards.
            lengths: Of the members' parts of each vector, in ring order; without it they are as even as can be.

        Returns:
            The own part of each vector, in its place.

        Raises:
            LocalProtocolError: Lengths do not fit their vector.
            MemberFault: A member sent what the plan does not have.
        """
        plans = [
            CollectivePlan.reduce_scatter(self._along(vector), each, self._segment(vector))
            for vector, each in zip(vectors, self._lengths(vectors, lengths), strict=True)
        ]
        await self._run(list(zip(vectors, plans, strict=True)))
        me = self._members.index(self._endpoint.peer_id)
        return [vector.piece(plan.chunks[me]) for vector, plan in zip(vectors, plans, strict=True)]

    async def all_gather(
        self,
        vectors: Sequence[RingVector],
        lengths: Sequence[Sequence[int]] | None = None,
        collective: Collective | None = None,
    ) -> list[list[Tensor]]:
        """Give everybody what each member has.

        What a codec has encoded, one vector for each of its tensors, is gathered so; where members cannot know how long
        the others' are, they gather the lengths before.

        Args:
            vectors: With the own part in its place, and room for the others'. They travel as they are.
            lengths: Of the members' parts of each vector, in ring order; without it they are as even as can be.
            collective: Along what they travel, the same on all members; CENTRAL: everybody sends his own to everybody.
                Without it each vector's is chosen.

        Returns:
            The parts of each vector, in ring order and in their places.

        Raises:
            LocalProtocolError: Lengths do not fit their vector, or one has a codec.
            MemberFault: A member sent what the plan does not have.
        """
        _check_plain(vectors)
        plans = [
            CollectivePlan.all_gather(collective or self._along(vector), each, self._segment(vector))
            for vector, each in zip(vectors, self._lengths(vectors, lengths), strict=True)
        ]
        await self._run(list(zip(vectors, plans, strict=True)))
        return [[v.piece(chunk) for chunk in plan.chunks] for v, plan in zip(vectors, plans, strict=True)]

    async def broadcast(self, vectors: Sequence[RingVector], root: PeerId) -> None:
        """Give everybody the vectors of one member, as they are.

        Raises:
            LocalProtocolError: The root is no member, or a vector has a codec.
            MemberFault: A member sent what the plan does not have.
        """
        _check_plain(vectors)
        if root not in self._members:
            raise LocalProtocolError(f"{root} is no member of the group and cannot broadcast")
        n, place = len(self._members), self._members.index(root)
        await self._run(
            [
                (v, CollectivePlan.broadcast(self._along(v), n, place, v.values_N.numel(), self._segment(v)))
                for v in vectors
            ]
        )

    async def _run(self, vectors: Sequence[tuple[RingVector, CollectivePlan]]) -> None:
        if len({vector.number for vector, _ in vectors}) < len(vectors):
            raise LocalProtocolError(f"two vectors have one number: {[vector.number for vector, _ in vectors]}")
        parts = self._arrivals.begin()
        try:
            operation = GroupOperation(self._endpoint, self._tag, self._members, vectors, self._compute, self._memory)
            await operation.run(parts)
        finally:
            self._arrivals.end(parts.number)

    def _along(self, vector: RingVector) -> Collective:
        return self._choose(vector.values_N.nbytes, len(self._members))

    def _segment(self, vector: RingVector) -> int:
        return max(1, self._segment_bytes // vector.values_N.element_size())

    def _lengths(
        self, vectors: Sequence[RingVector], lengths: Sequence[Sequence[int]] | None
    ) -> Sequence[Sequence[int]]:
        n = len(self._members)
        if lengths is None:
            return [even_lengths(vector.values_N.numel(), n) for vector in vectors]
        for vector, each in zip(vectors, lengths, strict=True):
            if len(each) != n or min(each) < 0 or sum(each) != vector.values_N.numel():
                raise LocalProtocolError(
                    f"{n} members cannot have parts of {list(each)} elements of the {vector.values_N.numel()} of "
                    f"vector {vector.number}"
                )
        return lengths


def _check_plain(vectors: Sequence[RingVector]) -> None:
    for vector in vectors:
        if vector.codec is not PLAIN:
            raise LocalProtocolError(f"vector {vector.number} is not summed: encode it by {vector.codec.name} before")
