"""Parts that arrive for the operations of a group: handed to theirs, kept for one that is about to begin, or dropped.

    receive --> tag of the open group ----> operation runs -----------> its PartQueue
            |                          '--> not begun here yet -------> kept, up to a limit
            |                          '--> ended --------------------> dropped
            '-> newer, its sender's newest -> its group opens later --> kept likewise
            '-> any other ------------------------------------------> dropped

A member may be told of a group later than its neighbour, whose parts then come first. Of each sender the parts of the
open group are kept, and those of the newest tag that it has named: when a peer already works at a newer one, its parts
for every group before are superseded. So who names a tag that is never opened is in nobody's way. What waits shares one
limit, and who has most of it loses all of his when that is passed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.runtime.waking import Mailbox
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


class PartQueue(Mailbox[ReceivedPart]):
    """The parts of one operation."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _Waiting:
    """What waits of one sender: parts of the open group, and of the newest group that it has named."""

    def __init__(self) -> None:
        self.parts: list[tuple[Age, ReceivedPart]] = []
        self.num_bytes = 0
        self._newest: Age | None = None

    def put(self, age: Age, part: ReceivedPart, open_age: Age | None) -> None:
        """Keep a part of the open group, or of a newer one that its sender has not left for a newer one still."""
        if age != open_age:
            if self._newest is not None and age < self._newest:
                return
            if self._newest is None or self._newest < age:
                self.take(lambda known, _: known != open_age)
                self._newest = age
        self.parts.append((age, part))
        self.num_bytes += _num_bytes(part)

    def take(self, is_wanted: Callable[[Age, ReceivedPart], bool]) -> list[ReceivedPart]:
        """Return some of the parts in their order; they wait no more."""
        wanted = [part for age, part in self.parts if is_wanted(age, part)]
        self.parts = [(age, part) for age, part in self.parts if not is_wanted(age, part)]
        self.num_bytes -= sum(map(_num_bytes, wanted))
        return wanted


class Arrivals:
    """What comes for the operations of one group.

    Args:
        take: Returns what has come for an operation before it began.
    """

    def __init__(self, members: Collection[PeerId], take: Callable[[int], Iterable[ReceivedPart]]) -> None:
        self._members = frozenset(members)
        self._take = take
        self._num_begun = 0
        self._running: dict[int, PartQueue] = {}

    def begin(self) -> PartQueue:
        """Begin the next operation: returns its parts, first those that were waiting."""
        parts = self._running[self._num_begun] = PartQueue(self._num_begun)
        for part in self._take(self._num_begun):
            parts.put(part)
        self._num_begun += 1
        return parts

    def end(self, number: int) -> None:
        """End an operation; what still arrives for it is dropped."""
        self._running.pop(number, None)

    def put(self, part: ReceivedPart) -> bool:
        """Take a part of any operation, if that runs or has ended; returns whether it is to wait.

        Raises:
            RemoteProtocolError: Its sender is no member.
        """
        if part.sender not in self._members:
            raise RemoteProtocolError(f"{part.sender} sent a part to a group of which it is no member")
        number = part.message.operation
        if number in self._running:
            self._running[number].put(part)
        return number >= self._num_begun


class GroupInbox:
    """All parts that arrive for one user of groups, which opens one group after the other.

    Args:
        age_of: Tells the age of a tag that a peer has sent; raises RemoteProtocolError if it is not one of this user's.

    Attributes:
        limit_bytes: How much may wait for operations that have not begun: as much as the others can send before they
            need something of this member.
    """

    def __init__(self, age_of: Callable[[bytes], Age], limit_bytes: int) -> None:
        self._age_of = age_of
        self.limit_bytes = limit_bytes
        self._tag: bytes | None = None
        self._age: Age | None = None
        self._open: Arrivals | None = None
        self._waiting: dict[PeerId, _Waiting] = {}

    def receive(self, event: Received) -> bool:
        """Take the part if the event is one; never blocks.

        Raises:
            RemoteProtocolError: Its tag is nobody's here, or that of a group without its sender; it has not one tensor;
                or more of its sender's arrives than may wait.
        """
        message = event.message
        if not isinstance(message, CollectiveMessage):
            return False
        if len(event.tensors) != isinstance(message, RingPart):
            raise RemoteProtocolError(f"{event.peer} sent a {type(message).__name__} with {len(event.tensors)} tensors")
        part = ReceivedPart(event.peer, message, event.tensors[0] if event.tensors else None)
        # Other bytes may say the same as the open group's tag.
        age = self._age if message.tag == self._tag and self._age is not None else self._age_of(message.tag)
        if age == self._age:
            if self._open is not None and self._open.put(part):
                self._keep(age, part)
        elif self._age is None or self._age < age:
            self._keep(age, part)
        return True

    def open(self, tag: bytes, members: Collection[PeerId]) -> Arrivals:
        """Begin the group of `tag` and end the one before it: returns what comes for it, and has come."""
        age = self._age_of(tag)
        self._tag, self._age = tag, age
        self._open = arrivals = Arrivals(members, lambda number: self._taken(arrivals, age, number))
        for waiting in self._waiting.values():
            waiting.take(lambda known, _: known < age)
        for stranger in self._waiting.keys() - set(members):
            self._waiting[stranger].take(lambda known, _: known == age)
        self._forget_who_has_nothing()
        return arrivals

    def close(self) -> None:
        """End the open group; what still arrives for it is dropped."""
        self._open = None
        for waiting in self._waiting.values():
            waiting.take(lambda known, _: known == self._age)
        self._forget_who_has_nothing()

    def _taken(self, arrivals: Arrivals, age: Age, number: int) -> Iterator[ReceivedPart]:
        """What has come for an operation of a group, if that is still open."""
        if arrivals is self._open:
            for waiting in self._waiting.values():
                yield from waiting.take(lambda known, part: known == age and part.message.operation == number)

    def _keep(self, age: Age, part: ReceivedPart) -> None:
        self._waiting.setdefault(part.sender, _Waiting()).put(age, part, self._age)
        num_parts = sum(len(waiting.parts) for waiting in self._waiting.values())
        num_bytes = sum(waiting.num_bytes for waiting in self._waiting.values())
        if num_bytes <= self.limit_bytes and num_parts <= MAX_WAITING:
            return
        most = max(self._waiting, key=lambda peer: (self._waiting[peer].num_bytes, len(self._waiting[peer].parts)))
        of_most = self._waiting.pop(most)
        if most == part.sender:
            said = f"{len(of_most.parts)} parts, {of_most.num_bytes} bytes"
            raise RemoteProtocolError(
                f"{most} sent {said} for operations that have not begun here; at most {self.limit_bytes} bytes in "
                f"{MAX_WAITING} parts are kept"
            )

    def _forget_who_has_nothing(self) -> None:
        self._waiting = {sender: waiting for sender, waiting in self._waiting.items() if waiting.parts}


def _num_bytes(part: ReceivedPart) -> int:
    return 0 if part.tensor is None else part.tensor.num_bytes
