"""A process of a host lets the others use its DHT node, over a Unix socket.

    connect ---> NodeState; StoreAsked -> NodeState, StoreAnswered; ReadAsked -> ReadAnswered, or NodeState before it

Something comes at once and says that the process is there: what is at hand, or else the state, and the answer may take
its time. What is stored is sealed by whom it is about, and what is read is verified by whoever has asked.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Protocol, TypeVar

import anyio
import anyio.abc
import msgspec

from shoal.clock import SystemClock
from shoal.control.record_checker import RecordChecker
from shoal.control.records import VerifiedRecord, require_small
from shoal.control.registry import Reachable
from shoal.errors import MALFORMED, LocalProtocolError, RecordRejected
from shoal.ids import PeerId
from shoal.runtime.frames import FrameReader, framed
from shoal.transport.unix import other_end

_MISUNDERSTOOD = *MALFORMED, LocalProtocolError
_MOST_VALUES = 4096
"""Of an answer: each has 8 KiB at most."""
_WORD_TIMEOUT_S = 5.0
"""A process that is not frozen says something at once."""
_NO_ROOM_PAUSE_S = 0.2
_ANSWER_TIMEOUT_S = 15.0
"""Of a node that asks others, which takes milliseconds, and seconds where peers are gone."""


class NodeState(msgspec.Struct, frozen=True, tag="state"):
    """How the node is now.

    Attributes:
        ahead_s: as `DhtNode.clock_difference_s`.
    """

    alive: bool
    maddrs: tuple[str, ...]
    ahead_s: float | None


class StoreAsked(msgspec.Struct, frozen=True, tag="store"):
    """Store this sealed record of that peer."""

    id: int
    topic: str
    value: bytes
    expires_unix_s: float
    peer: PeerId


class ReadAsked(msgspec.Struct, frozen=True, tag="read"):
    """Read these topics; see `DhtNode.found`."""

    id: int
    topics: tuple[str, ...]
    holders: int | None
    age_s: float


class StoreAnswered(msgspec.Struct, frozen=True, tag="stored"):
    """The answer to `StoreAsked`."""

    id: int
    taken: bool
    state: NodeState


class ReadAnswered(msgspec.Struct, frozen=True, tag="found"):
    """The answer to `ReadAsked`: topic, peer and sealed record of each."""

    id: int
    values: tuple[tuple[str, str, bytes], ...]
    state: NodeState


_Asked = StoreAsked | ReadAsked
_Told = NodeState | StoreAnswered | ReadAnswered
_Answer = TypeVar("_Answer", StoreAnswered, ReadAnswered)


class Node(Reachable, Protocol):
    """What is served of a `DhtNode`."""

    async def store(self, topic: str, value: bytes, expires_unix_s: float, peer: PeerId | None = None) -> bool:
        """Store a sealed record of a peer."""
        ...

    async def found(self, topics: tuple[str, ...], holders: int | None, age_s: float) -> list[tuple[str, str, bytes]]:
        """Return what stands under these topics, unverified."""
        ...

    def at_hand(
        self, topics: tuple[str, ...], holders: int | None, age_s: float
    ) -> list[tuple[str, str, bytes]] | None:
        """Return the same if nobody has to be asked for it; None: somebody has."""
        ...


@asynccontextmanager
async def node_served(node: Node, path: Path) -> AsyncGenerator[None]:
    """Serve a node of this process on a socket of mode 0600 until the context is left.

    Args:
        path: of the socket; one that is there is replaced.
    """
    async with (
        await anyio.create_unix_listener(path, mode=0o600) as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(_accept, listener, node, tasks)
        yield
        tasks.cancel_scope.cancel()


async def _accept(listener: anyio.abc.SocketListener, node: Node, tasks: anyio.abc.TaskGroup) -> None:
    """Serve who dials, until cancelled; where no more files may be opened, who dials waits until there is room."""
    while True:
        try:
            stream = await listener.accept()
        except anyio.BrokenResourceError:
            await SystemClock().sleep_s(_NO_ROOM_PAUSE_S)
        else:
            tasks.start_soon(_serve, node, stream)


def first_of_each(values: list[tuple[str, str, bytes]], most: int) -> tuple[tuple[str, str, bytes], ...]:
    """Return at most so many, of each topic as many as of any other: what stands under one hides none of another."""
    if len(values) <= most:
        return tuple(values)
    places = Counter[str]()
    ranked: list[tuple[int, tuple[str, str, bytes]]] = []
    for value in values:
        ranked.append((places[value[0]], value))
        places[value[0]] += 1
    ranked.sort(key=itemgetter(0))
    return tuple(value for _, value in ranked[:most])


def is_own_process(stream: anyio.abc.SocketStream) -> bool:
    """Whether the process at the other end belongs to the user of this one, as far as the kernel says."""
    _, user = other_end(stream.extra(anyio.abc.SocketAttribute.raw_socket))
    return user in (None, os.getuid())


async def _serve(node: Node, stream: anyio.abc.SocketStream) -> None:
    """Answer one process until it is gone, or says what nobody understands; those of other users are not answered."""
    if not is_own_process(stream):
        await stream.aclose()
        return
    asked, writing = FrameReader[_Asked](_Asked), anyio.Lock()

    async def tell(message: _Told) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with writing:
                await stream.send(framed(message))

    async def answer(question: _Asked) -> None:
        match question:
            case StoreAsked():
                taken = await node.store(question.topic, question.value, question.expires_unix_s, question.peer)
                await tell(StoreAnswered(question.id, taken, _state(node)))
            case ReadAsked():
                await tell_found(question, await node.found(question.topics, question.holders, question.age_s))

    async def tell_found(question: ReadAsked, values: list[tuple[str, str, bytes]]) -> None:
        # No more than a frame may have, whatever others have made the DHT hold.
        await tell(ReadAnswered(question.id, first_of_each(values, _MOST_VALUES), _state(node)))

    def at_hand(question: ReadAsked) -> list[tuple[str, str, bytes]] | None:
        # Without topics it is only asked how the node is.
        return node.at_hand(question.topics, question.holders, question.age_s) if question.topics else []

    async with stream, anyio.create_task_group() as tasks:
        with suppress(anyio.BrokenResourceError, anyio.EndOfStream, *_MISUNDERSTOOD, RecordRejected):
            await tell(_state(node))
            while True:
                takes_its_time = False
                for question in asked.feed(await stream.receive()):
                    if isinstance(question, ReadAsked) and (values := at_hand(question)) is not None:
                        await tell_found(question, values)
                        continue
                    if isinstance(question, StoreAsked):
                        require_small(question.topic, question.value)
                    tasks.start_soon(answer, question)
                    takes_its_time = True
                if takes_its_time:
                    # So who has asked knows that this process is there.
                    await tell(_state(node))
        tasks.cancel_scope.cancel()


async def where_served(path: Path) -> tuple[str, ...]:
    """Return the multiaddresses of the node that is served at a socket; empty: there is none, or it is silent."""
    with (
        anyio.move_on_after(_WORD_TIMEOUT_S),
        suppress(OSError, anyio.BrokenResourceError, anyio.EndOfStream, *_MISUNDERSTOOD),
    ):
        async with await anyio.connect_unix(path) as stream:
            told = FrameReader[_Told](_Told)
            while is_own_process(stream):
                for message in told.feed(await stream.receive()):
                    if isinstance(message, NodeState):
                        return message.maddrs
    return ()


def _state(node: Node) -> NodeState:
    return NodeState(node.alive, node.maddrs, node.clock_difference_s)


class RemoteNode:
    """The node of another process of this host, for one peer.

    Attributes:
        is_up: whether the connection stands, and the other end is not silent.
        is_silent: whether it has said nothing for so long that it is frozen.
    """

    def __init__(self, stream: anyio.abc.SocketStream, peer: PeerId, checker: RecordChecker) -> None:
        """Know nothing of it yet; `run` listens.

        Args:
            peer: whose records are stored.
        """
        self.is_up, self.is_silent = True, False
        self._stream = stream
        self._peer = peer
        self._checker = checker
        self._state: NodeState | None = None
        self._word = anyio.Event()  # the next one, or the end of the connection
        self._writing = anyio.Lock()
        self._ids = itertools.count()
        self._waiting: dict[int, anyio.Event] = {}
        self._answers: dict[int, StoreAnswered | ReadAnswered] = {}

    async def run(self) -> None:
        """Take what is told until the connection ends."""
        told = FrameReader[_Told](_Told)
        async with self._stream:
            try:
                with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, *_MISUNDERSTOOD):
                    while True:
                        for message in told.feed(await self._stream.receive()):
                            self._take(message)
            finally:
                self.is_up = False
                self._word.set()
                for waiting in self._waiting.values():
                    waiting.set()

    @property
    def is_known(self) -> bool:
        """Whether it has ever said how it is."""
        return self._state is not None

    @property
    def alive(self) -> bool:
        """Whether it can be used, and can reach others."""
        return self.is_up and self._state is not None and self._state.alive

    @property
    def maddrs(self) -> tuple[str, ...]:
        """Where others can join through it, as of when it was heard last."""
        return () if self._state is None else self._state.maddrs

    @property
    def clock_difference_s(self) -> float | None:
        return self._checker.clock_difference_s or (None if self._state is None else self._state.ahead_s)

    @property
    def clock_differences(self) -> Mapping[PeerId, tuple[float, str]]:
        return self._checker.clock_differences

    async def store(self, topic: str, value: bytes, expires_unix_s: float) -> bool:
        """Store a sealed record under a topic and this peer's id; see `DhtNode.store`."""
        require_small(topic, value)
        stored = await self._ask(lambda id: StoreAsked(id, topic, value, expires_unix_s, self._peer), StoreAnswered)
        return stored is not None and stored.taken

    async def get(self, topics: tuple[str, ...], holders: int | None, age_s: float = 0.0) -> tuple[VerifiedRecord, ...]:
        """Return all believable records under these topics; see `DhtNode.get`."""
        found = await self._ask(lambda id: ReadAsked(id, topics, holders, age_s), ReadAnswered)
        opened = (self._checker.accept(*value) for value in (() if found is None else found.values))
        return tuple(record for record in opened if record is not None)

    async def refresh(self) -> None:
        """Ask how it is now."""
        await self._ask(lambda id: ReadAsked(id, (), None, 0.0), ReadAnswered)

    async def heard(self) -> None:
        """Return when it says something; one that is silent for long is not there any more."""
        await self._heard(self._word)

    async def _heard(self, word: anyio.Event) -> None:
        with anyio.move_on_after(_WORD_TIMEOUT_S) as timer:
            await word.wait()
        if timer.cancelled_caught:
            self.is_up, self.is_silent = False, True
            await self._stream.aclose()

    async def _ask(self, question: Callable[[int], _Asked], kind: type[_Answer]) -> _Answer | None:
        """Return the answer to a question; None if there is none in time, or the connection ends before."""
        number = next(self._ids)
        answered = self._waiting[number] = anyio.Event()
        word = self._word  # the next one, which may come while the question is being sent
        try:
            with anyio.move_on_after(_ANSWER_TIMEOUT_S):
                async with self._writing:
                    await self._stream.send(framed(question(number)))
                await self._heard(word)
                if self.is_up:
                    await answered.wait()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return None
        finally:
            del self._waiting[number]
        answer = self._answers.pop(number, None)
        return answer if isinstance(answer, kind) else None

    def _take(self, message: _Told) -> None:
        self._word.set()
        self._word = anyio.Event()
        if isinstance(message, NodeState):
            self._state = message
            return
        self._state = message.state
        if (waiting := self._waiting.get(message.id)) is not None:
            self._answers[message.id] = message
            waiting.set()
