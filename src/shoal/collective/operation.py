"""One operation of a group over an endpoint: the plan's moves, each piece added or stored as it comes.

    parts --> _Span --> on the thread that computes: own = received + own, or own = received --> posted on

Two tasks: one hands work to the computing thread, the other posts what that has finished, so that the next piece is
being added while the one before is posted, and further ones are received. A neighbour on the same host whose vector
lies in shared memory is told `RingReady` and reads it there; to any other one it is sent as `RingPart`.

Each sum is formed in one order (see `plan`), and everyone takes the root's bytes. Vectors are worked on in place and
side by side; N = elements of a vector, n = of a piece.

**Memory.** A sum that others read, or that is being sent without a copy, changes only when the complete piece comes
back, and that depends on what they have made of it. A complete piece does not change any more in this operation, nor
does a sum that does not come back; whoever reads those from shared memory says `RingTaken` when it has all, and `run`
returns after that, and when all else is sent. An operation that is cancelled leaves its memory lent, and `SharedMemory`
gives the next one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
from torch import Tensor

from shoal.codec.plain import PLAIN
from shoal.codec.raw import from_wire, to_wire
from shoal.collective.inbox import PartQueue, ReceivedPart
from shoal.collective.plan import CollectivePlan
from shoal.collective.shared_memory import SharedMemory
from shoal.collective.vectors import RingVector
from shoal.errors import MemberFault, RemoteProtocolError
from shoal.ids import PeerId
from shoal.runtime.waking import Mailbox
from shoal.transport.base import Endpoint
from shoal.wire.messages import Traffic
from shoal.wire.messages.collective import RingPart, RingReady, RingTaken

INLINE_BYTES = 1 << 18
"""Sums below this size take less time than handing them to a thread."""

SPAN_BYTES = 4 << 20
"""At most so much is read from shared memory at a time before the next member is told."""

Compute = Callable[[Callable[[], None]], Awaitable[None]]
"""Runs a function on the thread that computes and returns when it is done."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Consecutive segments of a chunk, and the values that a neighbour has sent or shows.

    Attributes:
        gather: The segments are complete.
        chunk: Index of the chunk.
        segments: Indices in the chunk.
        elements: The same segments, as indices in the vector.
        sender: The neighbour's place in the ring.
        is_encoded: They are as they travel; else they lie in its memory.
    """

    number: int
    gather: bool
    chunk: int
    segments: range
    elements: range
    sender: int
    received_n: Tensor
    is_encoded: bool


@dataclass(frozen=True, slots=True)
class _Piece:
    """Segments of the own vector that are to be passed on; `gather`: they are complete."""

    number: int
    gather: bool
    chunk: int
    segments: range


class GroupOperation:
    """One member's end of one operation.

    Args:
        tag: Of the group; on every part.
        members: In ring order, this endpoint's peer among them, each once.
        vectors: Each with what is to be done with it; the same numbers, sizes, dtypes, codecs, reductions and plans on
            all members.
        compute: Where large sums are formed, so that the event loop is not held up.
        memory: Where the vectors are that neighbours on the same host may read.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        tag: bytes,
        members: Sequence[PeerId],
        vectors: Sequence[tuple[RingVector, CollectivePlan]],
        compute: Compute,
        memory: SharedMemory,
    ) -> None:
        self._endpoint = endpoint
        self._tag = tag
        self._number = 0
        self._members = tuple(members)
        self._me = members.index(endpoint.peer_id)
        self._vectors = {vector.number: vector for vector, _ in vectors}
        self._plans = {vector.number: plan for vector, plan in vectors}
        self._wire_names = {number: str(v.wire_dtype).removeprefix("torch.") for number, v in self._vectors.items()}
        self._compute = compute
        self._memory = memory
        self._remaining = sum(plan.num_received(self._me) for plan in self._plans.values())
        self._taken: set[tuple[int, int, bool, int, int]] = set()
        self._added: Counter[tuple[int, int, int]] = Counter()
        self._early: list[_Span] = []
        self._finished = Mailbox[_Piece]()
        self._read_from: set[int] = set()
        self._lent_to: set[int] = set()
        self._sent_to: set[int] = set()

    async def run(self, parts: PartQueue) -> None:
        """Do this member's part of the plans; on return the vectors hold the result, and nobody reads them any more.

        Ends only so or by cancellation: whoever watches the members cancels it when one is lost.

        Raises:
            MemberFault: A member sent what the plan does not have.
        """
        if len(self._members) == 1 or not any(plan.num_elements for plan in self._plans.values()):
            return
        self._number = parts.number
        loan = self._memory.lend()
        failure: MemberFault | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._post_finished)
            try:
                await self._reduce(parts)
            except MemberFault as error:
                failure = error
                tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure
        while self._lent_to:
            self._spans(await anext(parts))  # only acknowledgements are left
        for member in self._sent_to:
            await self._endpoint.flushed(self._members[member])
        self._memory.take_back(loan, any(plan.hears_everyone(self._me) for plan in self._plans.values()))

    # -- receive and combine

    async def _reduce(self, parts: PartQueue) -> None:
        """Do everything but the last posts."""
        for number, plan in self._plans.items():
            for chunk in range(len(plan.chunks)):
                if plan.begins_with(self._me, chunk) and plan.num_segments(chunk):
                    self._finished.put(_Piece(number, not plan.sums, chunk, range(plan.num_segments(chunk))))
        while self._remaining:
            for span in self._spans(await anext(parts)):
                await self._apply(span)
        self._finished.close()
        for member in self._read_from:
            message = RingTaken(self._tag, self._number)
            self._endpoint.post(self._members[member], message, traffic=Traffic.PSEUDO_GRADIENTS)

    def _spans(self, part: ReceivedPart) -> list[_Span]:
        """What there is to do for a message: nothing for an acknowledgement, or for what has come before."""
        try:
            return self._checked(part)
        except RemoteProtocolError as error:
            raise MemberFault(str(error), part.sender) from error

    def _checked(self, part: ReceivedPart) -> list[_Span]:
        message = part.message
        sender = self._members.index(part.sender)
        if isinstance(message, RingTaken):
            if sender not in self._lent_to:
                raise RemoteProtocolError(f"{part.sender} gives back memory that it was not lent")
            self._lent_to.discard(sender)
            return []
        vector, plan = self._vectors.get(message.buffer), self._plans.get(message.buffer)
        if vector is None or plan is None:
            raise RemoteProtocolError(f"{part.sender} sent buffer {message.buffer} of a ring, unasked")
        count = message.count if isinstance(message, RingReady) else 1
        segments = range(message.segment, message.segment + count)
        try:
            elements = plan.span(message.chunk, segments)
        except ValueError as error:
            raise RemoteProtocolError(f"{part.sender}: {error}") from error
        allowed = (
            (plan.copies_from(self._me, message.chunk),) if message.gather else plan.children(self._me, message.chunk)
        )
        if sender not in allowed:
            raise RemoteProtocolError(
                f"{part.sender} sent chunk {message.chunk} of a ring, which is not its to send here"
            )
        received_n = self._received(part, vector, elements)
        keys = {(sender, message.buffer, message.gather, message.chunk, segment) for segment in segments}
        if keys <= self._taken:
            return []
        if keys & self._taken:
            raise RemoteProtocolError(f"{part.sender} sent some of segments {segments} of a ring again")
        self._taken |= keys
        if isinstance(message, RingReady) and (message.gather or not plan.gathers):
            self._read_from.add(sender)
        step = max(1, SPAN_BYTES // (plan.segment_elements * vector.values_N.element_size()))
        cuts = [segments[start : start + step] for start in range(0, count, step)]
        is_encoded = isinstance(message, RingPart)
        spans: list[_Span] = []
        for cut in cuts:
            within = plan.span(message.chunk, cut)
            own_n = received_n[within.start - elements.start : within.stop - elements.start]
            spans.append(_Span(message.buffer, message.gather, message.chunk, cut, within, sender, own_n, is_encoded))
        return spans

    def _received(self, part: ReceivedPart, vector: RingVector, elements: range) -> Tensor:
        """The values that a message carries or refers to, for these elements."""
        if isinstance(part.message, RingReady):
            process = self._endpoint.process_of(part.sender)
            num_elements = vector.values_N.numel()
            theirs_N = self._memory.look(part.sender, process, part.message.vector, num_elements, vector.values_N)
            return theirs_N[elements.start : elements.stop]
        tensor, dtype = part.tensor, self._wire_names[vector.number]
        if tensor is None or tensor.dtype != dtype or tensor.shape != (len(elements),):
            found = "no tensor" if tensor is None else f"{tensor.dtype}{tensor.shape}"
            raise RemoteProtocolError(f"{part.sender} sent {found} in a ring; {dtype}({len(elements)},) was expected")
        return from_wire(tensor)

    async def _apply(self, span: _Span) -> None:
        """Add or store a span, and those that have waited for it; what is finished is passed on."""
        vector, plan = self._vectors[span.number], self._plans[span.number]
        children = plan.children(self._me, span.chunk)
        keys = [(span.number, span.chunk, segment) for segment in span.segments]
        is_root = plan.root(span.chunk) == self._me
        if span.gather:
            await self._run(span, lambda: vector.store(span.elements, span.received_n, span.is_encoded))
            is_finished = True
        elif any(children[self._added[key]] != span.sender for key in keys):
            self._early.append(span)
            return
        else:
            is_finished = span.sender == children[-1]
            is_complete = is_root and is_finished
            await self._run(span, lambda: vector.add(span.elements, span.received_n, is_complete, span.is_encoded))
            self._added.update(keys)
        self._remaining -= len(span.segments)
        if is_finished:
            self._finished.put(_Piece(span.number, span.gather or is_root, span.chunk, span.segments))
            return
        early, self._early = self._early, []
        for waiting in early:
            await self._apply(waiting)

    async def _run(self, span: _Span, function: Callable[[], None]) -> None:
        try:
            if span.received_n.nbytes < INLINE_BYTES:
                function()
            else:
                await self._compute(function)
        except RemoteProtocolError as error:  # what has come is nothing that the codec makes
            raise MemberFault(str(error), self._members[span.sender]) from error

    # -- pass on

    async def _post_finished(self) -> None:
        async for piece in self._finished:
            await self._post(piece)

    async def _post(self, piece: _Piece) -> None:
        """Tell whoever comes next that segments are ready, or send them."""
        plan, vector = self._plans[piece.number], self._vectors[piece.number]
        parent = plan.parent(self._me, piece.chunk)
        targets = plan.copied_by(self._me, piece.chunk) if piece.gather else () if parent is None else (parent,)
        for target in targets:
            peer = self._members[target]
            reference = None
            if self._endpoint.process_of(peer) is not None:
                reference = self._memory.reference(vector.values_N)
            if reference is None:
                self._sent_to.add(target)
                for segment in piece.segments:
                    await self._send(peer, piece, segment, vector, plan.segment(piece.chunk, segment))
                continue
            if piece.gather or not plan.gathers:
                self._lent_to.add(target)
            message = RingReady(
                tag=self._tag,
                operation=self._number,
                gather=piece.gather,
                buffer=piece.number,
                chunk=piece.chunk,
                segment=piece.segments.start,
                count=len(piece.segments),
                vector=reference,
            )
            self._endpoint.post(peer, message, traffic=Traffic.PSEUDO_GRADIENTS)

    async def _send(self, peer: PeerId, piece: _Piece, segment: int, vector: RingVector, elements: range) -> None:
        encoded: list[Tensor] = []
        if vector.codec is PLAIN or len(elements) * vector.values_N.element_size() < INLINE_BYTES:
            encoded.append(vector.encoded(elements))
        else:
            await self._compute(lambda: encoded.append(vector.encoded(elements)))
        message = RingPart(
            tag=self._tag,
            operation=self._number,
            gather=piece.gather,
            buffer=piece.number,
            chunk=piece.chunk,
            segment=segment,
        )
        self._endpoint.post(peer, message, (to_wire(encoded[0]),), Traffic.PSEUDO_GRADIENTS)
        await self._endpoint.drained(peer)
