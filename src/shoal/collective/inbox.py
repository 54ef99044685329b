"""Parts of rings that have arrived: handed to their ring, kept for one that is about to start, or dropped.

A member may be told of a view later than its predecessor in the ring, whose parts then come first. Only parts of the
highest tag are kept: when a peer already works at a higher one, every lower view is superseded.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import anyio

from shoal.errors import RemoteProtocolError
from shoal.ids import Ballot, PeerId
from shoal.transport.base import Received
from shoal.wire.messages.round import RingPart, RingReady, RingTaken
from shoal.wire.tensors import WireTensor


class RingTag(NamedTuple):
    """Which ring of a stage a part belongs to; compared field by field, the highest is the newest."""

    round: int
    ballot: Ballot
    epoch: int


MAX_WAITING = 1 << 16
"""The most messages that wait for a ring that has not started: more than the first chunk of any stage has segments."""

RingMessage = RingPart | RingReady | RingTaken
"""What members of a ring say to each other."""


class ReceivedPart(NamedTuple):
    """One message of a ring as it arrived, with its tensor if it is a RingPart."""

    sender: PeerId
    message: RingMessage
    tensor: WireTensor | None


class PartQueue:
    """The parts of one ring, in the order in which they came. The ring takes each once, so their number is bounded."""

    def __init__(self) -> None:
        self._parts: deque[ReceivedPart] = deque()
        self._arrived = anyio.Event()

    def __len__(self) -> int:
        return len(self._parts)

    def put(self, part: ReceivedPart) -> None:
        """Append a part; never waits."""
        self._parts.append(part)
        self._arrived.set()

    async def take(self) -> ReceivedPart:
        """Return the next part, when there is one."""
        while not self._parts:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._parts.popleft()


class RingInbox:
    """All parts that arrive at one replica.

    Args:
        stage: The replica's stage; parts of another one are a mistake of their sender.
        limit_bytes: How much may wait for a ring that has not started: as much as the replica's own vectors have, since
            without its contribution a ring comes no further than that.
    """

    def __init__(self, stage: int, limit_bytes: int) -> None:
        self._stage = stage
        self._limit_bytes = limit_bytes
        self._open: RingTag | None = None
        self._parts: PartQueue | None = None
        self._waiting_tag: RingTag | None = None
        self._waiting: list[ReceivedPart] = []
        self._waiting_bytes = 0

    def receive(self, event: Received) -> bool:
        """Take the part if the event is one; never blocks.

        Raises:
            RemoteProtocolError: It is for another stage, has not one tensor, or more arrives than a ring has.
        """
        message = event.message
        if not isinstance(message, RingMessage):
            return False
        if message.stage != self._stage or len(event.tensors) != isinstance(message, RingPart):
            raise RemoteProtocolError(
                f"{event.peer} sent a ring part with {len(event.tensors)} tensors for stage {message.stage}, this is "
                f"stage {self._stage}"
            )
        tag = RingTag(message.round, message.ballot, message.epoch)
        part = ReceivedPart(event.peer, message, event.tensors[0] if event.tensors else None)
        if tag == self._open and self._parts is not None:
            self._parts.put(part)
        elif not self._is_superseded(tag):
            self._keep(tag, part)
        return True

    def open(self, tag: RingTag) -> PartQueue:
        """Start the ring of `tag` and end the one before it: returns its parts, first those that were waiting."""
        self._open, self._parts = tag, PartQueue()
        if self._waiting_tag is not None and self._waiting_tag <= tag:
            if self._waiting_tag == tag:
                for part in self._waiting:
                    self._parts.put(part)
            self._forget()
        return self._parts

    def close(self) -> None:
        """End the open ring; what still arrives for it is dropped."""
        self._parts = None

    def _is_superseded(self, tag: RingTag) -> bool:
        ended = self._open is not None and tag <= self._open
        return ended or (self._waiting_tag is not None and tag < self._waiting_tag)

    def _keep(self, tag: RingTag, part: ReceivedPart) -> None:
        if tag != self._waiting_tag:
            self._forget()
            self._waiting_tag = tag
        self._waiting_bytes += 0 if part.tensor is None else part.tensor.num_bytes
        if self._waiting_bytes > self._limit_bytes or len(self._waiting) >= MAX_WAITING:
            said = f"{len(self._waiting) + 1} parts, {self._waiting_bytes} bytes"
            self._forget()
            raise RemoteProtocolError(
                f"{part.sender} sent {said} for a ring that has not started here; at most {self._limit_bytes} bytes "
                f"in {MAX_WAITING} parts are kept"
            )
        self._waiting.append(part)

    def _forget(self) -> None:
        self._waiting_tag, self._waiting, self._waiting_bytes = None, [], 0
