"""Parts that arrive for the operations of a group: handed to theirs, kept for one that is about to begin, or dropped.

    receive --> tag of the open group ----> operation runs -----------> its PartQueue
            |                          '--> not begun here yet -------> kept, up to a limit
            |                          '--> ended --------------------> dropped
            '-> newest tag of all --------> its group opens later ----> kept likewise, for one tag
            '-> any other ------------------------------------------> dropped

A member may be told of a quorum later than its neighbour, whose parts then come first. Only parts of the open group and
of the newest tag are kept: when a peer already works at a newer one, every group before it is superseded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import anyio

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.wire.messages.collective import CollectiveMessage, RingPart
from shoal.wire.tensors import WireTensor

MAX_WAITING = 1 << 16
"""The most messages that wait for what has not begun: more than the first chunk of any stage has segments."""


class Age(Protocol):
    """What tells which of two tags is the newer one: the greater."""

    def __lt__(self, other: Any, /) -> bool: ...


class ReceivedPart(NamedTuple):
    """One message of an operation as it arrived, with its tensor if it is a RingPart."""

    sender: PeerId
    message: CollectiveMessage
    tensor: WireTensor | None


class PartQueue:
    """The parts of one operation, in the order in which they came. Each is taken once, so their number is bounded.

    Attributes:
        number: Of the operation.
    """

    def __init__(self, number: int) -> None:
        self.number = number
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


class Arrivals:
    """What has come for the operations of one group.

    Args:
        age: Of its tag.
        limit_bytes: How much may wait for operations that have not begun.
    """

    def __init__(self, age: Age, limit_bytes: int) -> None:
        self.age = age
        self._limit_bytes = limit_bytes
        self._num_begun = 0
        self._running: dict[int, PartQueue] = {}
        self._early: dict[int, list[ReceivedPart]] = {}
        self._num_early = self._early_bytes = 0

    def begin(self) -> PartQueue:
        """Begin the next operation: returns its parts, first those that were waiting."""
        parts = self._running[self._num_begun] = PartQueue(self._num_begun)
        for part in self._early.pop(self._num_begun, ()):
            self._num_early -= 1
            self._early_bytes -= _num_bytes(part)
            parts.put(part)
        self._num_begun += 1
        return parts

    def end(self, number: int) -> None:
        """End an operation; what still arrives for it is dropped."""
        self._running.pop(number, None)

    def put(self, part: ReceivedPart) -> None:
        """Take a part of any operation.

        Raises:
            RemoteProtocolError: More waits than may; all of it is dropped.
        """
        number = part.message.operation
        if number in self._running:
            self._running[number].put(part)
        elif number >= self._num_begun:
            self._keep(number, part)

    def _keep(self, number: int, part: ReceivedPart) -> None:
        self._num_early += 1
        self._early_bytes += _num_bytes(part)
        if self._early_bytes > self._limit_bytes or self._num_early > MAX_WAITING:
            said = f"{self._num_early} parts, {self._early_bytes} bytes"
            self._early.clear()
            self._num_early = self._early_bytes = 0
            raise RemoteProtocolError(
                f"{part.sender} sent {said} for operations that have not begun here; at most {self._limit_bytes} bytes "
                f"in {MAX_WAITING} parts are kept"
            )
        self._early.setdefault(number, []).append(part)


class GroupInbox:
    """All parts that arrive for one user of groups, which opens one group after the other.

    Args:
        age_of: Tells the age of a tag that a peer has sent; raises RemoteProtocolError if it is not one of this user's.
        limit_bytes: How much may wait for operations that have not begun, of each group: as much as the others can
            send before they need something of this member.
    """

    def __init__(self, age_of: Callable[[bytes], Age], limit_bytes: int) -> None:
        self._age_of = age_of
        self._limit_bytes = limit_bytes
        self._tag: bytes | None = None
        self._age: Age | None = None
        self._open: Arrivals | None = None
        self._newer: Arrivals | None = None

    def receive(self, event: Received) -> bool:
        """Take the part if the event is one; never blocks.

        Raises:
            RemoteProtocolError: Its tag is nobody's here, it has not one tensor, or more arrives than may wait.
        """
        message = event.message
        if not isinstance(message, CollectiveMessage):
            return False
        if len(event.tensors) != isinstance(message, RingPart):
            raise RemoteProtocolError(f"{event.peer} sent a {type(message).__name__} with {len(event.tensors)} tensors")
        arrivals = self._of(message.tag)
        if arrivals is not None:
            arrivals.put(ReceivedPart(event.peer, message, event.tensors[0] if event.tensors else None))
        return True

    def open(self, tag: bytes) -> Arrivals:
        """Begin the group of `tag` and end the one before it: returns what comes for it, and has come."""
        self._tag, self._age = tag, self._age_of(tag)
        self._open = arrivals = Arrivals(self._age, self._limit_bytes)
        if self._newer is not None and not self._age < self._newer.age:
            if self._newer.age == self._age:
                self._open = arrivals = self._newer
            self._newer = None
        return arrivals

    def close(self) -> None:
        """End the open group; what still arrives for it is dropped."""
        self._open = None

    def _of(self, tag: bytes) -> Arrivals | None:
        """Where parts of a tag go; None if they are of no use."""
        if tag == self._tag:
            return self._open
        age = self._age_of(tag)
        if self._age is not None and not self._age < age:
            # Other bytes may say the same.
            return self._open if age == self._age else None
        if self._newer is None or self._newer.age < age:
            self._newer = Arrivals(age, self._limit_bytes)
        return self._newer if age == self._newer.age else None


def _num_bytes(part: ReceivedPart) -> int:
    return 0 if part.tensor is None else part.tensor.num_bytes
