"""One ring all-reduce over an endpoint: the plan's moves, each part added or stored as it comes.

All members end with the same bits: each sum is formed in one order (see `plan`), and everyone takes the owner's bytes.
Vectors are reduced in place and side by side; N = elements of a vector.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.codec.raw import from_wire, to_wire
from shoal.collective.inbox import Part, Parts, RingTag
from shoal.collective.plan import SEGMENT_BYTES, RingPlan
from shoal.errors import LocalProtocolError, RemoteProtocolError
from shoal.ids import PeerId
from shoal.transport.base import Endpoint
from shoal.wire.messages import Traffic
from shoal.wire.messages.round import RingPart

INLINE_BYTES = 1 << 18
"""Sums below this size take less time than handing them to a thread."""

Compute = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function on the thread that computes and returns when it is done."""


class Reduction(enum.Enum):
    """How contributions are combined."""

    SUM = "sum"
    MAX = "max"


@dataclass(frozen=True, slots=True)
class RingVector:
    """A vector to be reduced in place.

    Attributes:
        number: What it is in `RingPart.buffer`.
        values_N: This member's contribution, later the result: contiguous, on the CPU, used by nobody else meanwhile.
        reduction: The same on all members.
    """

    number: int
    values_N: Tensor
    reduction: Reduction


class Ring:
    """One member's end of one all-reduce.

    Args:
        endpoint: Sends to the next member.
        tag: Of the view; on every part.
        stage: Of the view.
        members: In ring order, this endpoint's peer among them, each once.
        vectors: The same numbers, sizes, dtypes and reductions on all members.
        compute: Where large sums are formed, so that the event loop is not held up.
        segment_bytes: How much travels in one frame; the same on all members.

    Raises:
        LocalProtocolError: This endpoint's peer is not in the ring, or a vector cannot be reduced.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tag: RingTag,
        stage: int,
        members: Sequence[PeerId],
        vectors: Sequence[RingVector],
        compute: Compute,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        if members.count(endpoint.peer_id) != 1:
            raise LocalProtocolError(f"{endpoint.peer_id} is not once in the ring {tag}")
        for vector in vectors:
            values_N = vector.values_N
            if values_N.dim() != 1 or not values_N.is_contiguous() or values_N.device.type != "cpu":
                raise LocalProtocolError(f"vector {vector.number} of ring {tag} is not a contiguous CPU vector")
        self._endpoint = endpoint
        self._tag = tag
        self._stage = stage
        self._me = members.index(endpoint.peer_id)
        self._next = members[(self._me + 1) % len(members)]
        self._previous = members[self._me - 1]
        self._vectors = {vector.number: vector for vector in vectors}
        self._plans = {
            vector.number: RingPlan(
                len(members), vector.values_N.numel(), max(1, segment_bytes // vector.values_N.element_size())
            )
            for vector in vectors
        }
        self._compute = compute
        self._taken: set[tuple[int, bool, int, int]] = set()

    async def run(self, parts: Parts) -> None:
        """Reduce the vectors with the other members; on return they hold the result, the same bits on all members.

        Ends only with the result or by cancellation: whoever watches the members cancels it when one is lost.

        Raises:
            RemoteProtocolError: A member sent what the plan does not have.
        """
        remaining = sum(plan.num_received(self._me) for plan in self._plans.values())
        if remaining == 0:
            return
        for number, plan in self._plans.items():
            chunk = plan.first_chunk(self._me)
            for segment in range(plan.num_segments(chunk)):
                await self._send(number, False, chunk, segment)
        while remaining:
            remaining -= await self._take(await parts.take())

    async def _take(self, part: Part) -> int:
        """Add or store one part and pass it on; returns 1, or 0 for a part that was taken before."""
        message = part.message
        own_n, reduction = self._check(part)
        key = (message.buffer, message.gather, message.chunk, message.segment)
        if key in self._taken:
            return 0
        self._taken.add(key)
        received_n = from_wire(part.tensor)
        plan = self._plans[message.buffer]
        if message.gather:
            own_n.copy_(received_n)
            if plan.passes_gather(self._me, message.chunk):
                await self._send(message.buffer, True, message.chunk, message.segment)
            return 1

        def combine() -> None:
            # received + own, in this order (see `plan`); in place, because the sum replaces the contribution.
            if reduction is Reduction.SUM:
                torch.add(received_n, own_n, out=own_n)
            else:
                torch.maximum(received_n, own_n, out=own_n)

        if part.tensor.data.nbytes < INLINE_BYTES:
            combine()
        else:
            await self._compute(combine)
        gather = plan.ends_reduce(self._me, message.chunk)
        await self._send(message.buffer, gather, message.chunk, message.segment)
        return 1

    def _check(self, part: Part) -> tuple[Tensor, Reduction]:
        """Returns the own segment that the part is for."""
        message = part.message
        vector = self._vectors.get(message.buffer)
        if part.sender != self._previous or vector is None:
            raise RemoteProtocolError(f"{part.sender} sent buffer {message.buffer} in ring {self._tag}, unasked")
        plan = self._plans[message.buffer]
        # Nobody sends a member the chunk whose sum starts there, nor its own chunk once it is complete.
        never = self._me if message.gather else plan.first_chunk(self._me)
        try:
            elements = plan.segment(message.chunk, message.segment)
        except ValueError as error:
            raise RemoteProtocolError(f"{part.sender}: {error}") from error
        own_n = vector.values_N[elements.start : elements.stop]
        dtype = str(own_n.dtype).removeprefix("torch.")
        if message.chunk == never or part.tensor.dtype != dtype or part.tensor.shape != (len(elements),):
            raise RemoteProtocolError(
                f"{part.sender} sent {part.tensor.dtype}{part.tensor.shape} as segment {message.segment} of chunk "
                f"{message.chunk} in ring {self._tag}; {dtype}({len(elements)},) was expected"
            )
        return own_n, vector.reduction

    async def _send(self, number: int, gather: bool, chunk: int, segment: int) -> None:
        """Send a segment of the own vector as it is now.

        The memory is sent without a copy. It changes again only when the complete segment comes back, and that depends
        on the bytes sent here: they have left by then.
        """
        elements = self._plans[number].segment(chunk, segment)
        message = RingPart(
            ballot=self._tag.ballot,
            round=self._tag.round,
            epoch=self._tag.epoch,
            stage=self._stage,
            gather=gather,
            buffer=number,
            chunk=chunk,
            segment=segment,
        )
        tensor = to_wire(self._vectors[number].values_N[elements.start : elements.stop])
        self._endpoint.post(self._next, message, (tensor,), Traffic.PSEUDO_GRADIENTS)
        await self._endpoint.drained(self._next)
