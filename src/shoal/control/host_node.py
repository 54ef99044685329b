"""The DHT node of a host: one of its processes has it and serves the others, which need no p2pd of their own.

    join ---> the node of the process that listens at the socket
       |-- nobody does, and the lock is free: a node of its own, which it serves from then on
       '-- somebody is silent, so it is frozen: the same at the next place

Monitor and scout, which start first, have a node in any case. When the one that serves is gone, whoever notices that
first takes its place. The lock is the kernel's, on a file beside the socket, and ends with its process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.abc

from shoal.clock import Backoff, Clock, Deadline
from shoal.control.dht import DhtNode, is_peer_maddr
from shoal.control.maddrs import peer_in
from shoal.control.node_service import RemoteNode, is_own_process, node_served, where_served
from shoal.control.peers_file import MAX_LISTED
from shoal.control.record_checker import RecordChecker
from shoal.control.records import VerifiedRecord
from shoal.errors import BootstrapError
from shoal.events.base import emit
from shoal.events.registry import DhtTakenOver
from shoal.ids import PeerId
from shoal.runtime.file_locks import lock

logger = logging.getLogger(__name__)

_MOST_PLACES = 4
"""So many processes may be frozen one after the other."""
_START_PATIENCE_S = 30.0
"""Another process that has the lock may take so long to start its node: it may try initial peers that are gone."""


class NodePlace:
    """Where the processes of a host meet: a socket, and the lock of the one that listens at it."""

    def __init__(self, directory: Path, number: int = 0) -> None:
        """Hold nothing.

        Args:
            directory: private, with a short path; all roles of a launcher have their sockets in it.
            number: 0 but where the processes at lower places are frozen.
        """
        self.number = number
        self.socket_path = directory / f"dht_{number}"
        self._lock_path = directory / f"dht_{number}.lock"
        self._descriptor: int | None = None

    def hold(self) -> bool:
        """Return whether this process serves the node from now on: no other one does."""
        if self._descriptor is not None:
            return True
        with suppress(BlockingIOError):
            self._descriptor = lock(self._lock_path, waits=False)
        return self._descriptor is not None

    def release(self) -> None:
        """Let another process serve."""
        if self._descriptor is not None:
            self.socket_path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None


@asynccontextmanager
async def served(node: DhtNode, place: NodePlace) -> AsyncGenerator[None]:
    """Serve a node of this process to the others of the host, unless one of them serves its own."""
    if not place.hold():
        yield
        return
    try:
        async with node_served(node, place.socket_path):
            yield
    finally:
        place.release()


async def beside(place: NodePlace, clock: Clock) -> tuple[str, ...]:
    """Before this process has a node of its own: take the lock, or return where the node of the process is that has it.

    Without that the two would not find each other on a host that is a swarm by itself.
    """
    deadline, backoff = Deadline.after(clock, _START_PATIENCE_S), Backoff(first_s=0.1, max_s=1.0)
    while not place.hold():
        maddrs = await where_served(place.socket_path)
        if maddrs or deadline.expired():
            return maddrs
        await backoff.wait(clock)
    return ()


@dataclass(eq=False, repr=False)
class HostNode:
    """The node of this host, for one peer: a `registry.RecordStore`. Use it as a context.

    It can be used until the context is left, also while what is in it is cancelled: a peer says last that it is gone.

    Attributes:
        directory: see `NodePlace`.
        peer: whose records are stored.
        checker: verifies what the node of another process has read.
        start: starts a node of this process, which joins those whose multiaddresses it is given first, and looks
            for the others, which may be gone.
        initial: multiaddresses of the first nodes, that of this host among them where it is one.
        known: returns those at which nodes of the swarm were last.
        on_own: is told where a node of this process is.
    """

    directory: Path
    peer: PeerId
    checker: RecordChecker
    clock: Clock
    start: Callable[[Sequence[str], Sequence[str]], Awaitable[DhtNode]]
    initial: Sequence[str]
    known: Callable[[], Sequence[str]]
    on_own: Callable[[tuple[str, ...]], None]

    def __post_init__(self) -> None:
        self._places = [NodePlace(self.directory, number) for number in range(_MOST_PLACES)]
        self._tasks = anyio.create_task_group()
        self._work: set[anyio.CancelScope] = set()
        self._node: RemoteNode | DhtNode | None = None
        self._patience: dict[int, Deadline] = {}  # by place, with another process that is about to serve there

    async def join(self, within_s: float) -> None:
        """Find the node, or have one.

        Raises:
            BootstrapError: neither in time.
        """
        deadline, backoff = Deadline.after(self.clock, within_s), Backoff(first_s=0.1, max_s=1.0)
        while True:
            try:
                await self.revive()
            except BootstrapError:
                if deadline.expired():
                    raise
                await backoff.wait(self.clock)
            else:
                return

    @property
    def alive(self) -> bool:
        """Whether the node can reach others."""
        return self._node is not None and self._node.alive

    @property
    def maddrs(self) -> tuple[str, ...]:
        """Where others can join through the node, as of when it was heard of last."""
        return () if self._node is None else self._node.maddrs

    @property
    def clock_difference_s(self) -> float | None:
        return None if self._node is None else self._node.clock_difference_s

    @property
    def clock_differences(self) -> Mapping[PeerId, tuple[float, str]]:
        return {} if self._node is None else self._node.clock_differences

    async def store(self, topic: str, value: bytes, expires_unix_s: float) -> bool:
        """Store a sealed record under a topic and this peer's id; see `DhtNode.store`."""
        return self._node is not None and await self._node.store(topic, value, expires_unix_s)

    async def get(self, topics: tuple[str, ...], holders: int | None, age_s: float = 0.0) -> tuple[VerifiedRecord, ...]:
        """Return all believable records under these topics; see `DhtNode.get`."""
        return () if self._node is None else await self._node.get(topics, holders, age_s)

    async def revive(self) -> None:
        """See to it that there is a node that is alive.

        Raises:
            BootstrapError: there is none yet.
        """
        node = self._node
        if isinstance(node, DhtNode):
            await node.revive()
        elif node is not None and node.is_up:
            await node.refresh()
        else:
            await self._find()
        if not self.alive:
            raise BootstrapError("the DHT node of this host reaches nobody yet")

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        for scope in tuple(self._work):
            scope.cancel()
        self._tasks.cancel_scope.cancel()
        return await self._tasks.__aexit__(kind, error, trace)

    async def _find(self) -> None:
        """Use the node of another process or have one, at the first place whose process is not frozen.

        Raises:
            BootstrapError: there is none yet.
        """
        for place in self._places:
            stream = await _dialled(place)
            if stream is not None:
                if await self._speaks(stream):
                    return
            elif place.hold():
                await self._take_over(place)
                return
            elif not self._is_patience_over(place):
                raise BootstrapError("the DHT node of this host is being started by another process")
        raise BootstrapError(f"{len(self._places)} processes of this host have a DHT node, and all of them are frozen")

    def _is_patience_over(self, place: NodePlace) -> bool:
        patience = self._patience.setdefault(place.number, Deadline.after(self.clock, _START_PATIENCE_S))
        return patience.expired()

    async def _speaks(self, stream: anyio.abc.SocketStream) -> bool:
        """Use the node of a process, unless it is frozen.

        Raises:
            BootstrapError: it ends.
        """
        node = RemoteNode(stream, self.peer, self.checker)
        self._tasks.start_soon(self._listen, node)
        await node.heard()
        if node.is_known:
            self._node, self._patience = node, {}
        elif not node.is_silent:
            raise BootstrapError("the process that had the DHT node of this host has just ended")
        return node.is_known

    async def _listen(self, node: RemoteNode) -> None:
        with self._until_left():
            await node.run()

    @contextmanager
    def _until_left(self) -> Generator[None]:
        """Do something until the context is left."""
        with anyio.CancelScope(shield=True) as scope:
            self._work.add(scope)
            try:
                yield
            finally:
                self._work.discard(scope)

    def _gone(self, place: NodePlace) -> set[str]:
        """The peers that are looked for and not waited for: whose node it was, and first peers that may be gone too."""
        before, initial, named = (set(map(peer_in, each)) for each in (self.maddrs, self.initial, self.known()))
        if place.number:
            # Whoever is frozen was there first.
            return before | initial
        return before if self._node is None else before | (initial - named)

    async def _take_over(self, place: NodePlace) -> None:
        """Have a node, and serve it.

        Raises:
            BootstrapError: p2pd does not start.
        """
        gone = self._gone(place)
        everybody = [*filter(is_peer_maddr, dict.fromkeys((*self.maddrs, *self.known(), *self.initial)))][:MAX_LISTED]
        known = [maddr for maddr in everybody if peer_in(maddr) not in gone]
        sought = [maddr for maddr in everybody if peer_in(maddr) in gone]
        try:
            await self._tasks.start(self._have, place, known, sought)
        except BootstrapError:
            place.release()
            raise
        except OSError as error:
            place.release()
            raise BootstrapError(f"the DHT node of this host cannot be served: {error}") from error

    async def _have(
        self,
        place: NodePlace,
        known: Sequence[str],
        sought: Sequence[str],
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        with self._until_left():
            async with await self.start(known, sought) as node, served(node, place):
                self.on_own(node.maddrs)
                self._node = node
                emit(logger, DhtTakenOver(list(node.maddrs)))
                task_status.started()
                await anyio.Event().wait()


async def _dialled(place: NodePlace) -> anyio.abc.SocketStream | None:
    """Connect to the process that serves its node; None: nobody listens.

    Raises:
        BootstrapError: it is a process of another user.
    """
    try:
        stream = await anyio.connect_unix(place.socket_path)
    except OSError:
        return None
    if not is_own_process(stream):
        await stream.aclose()
        raise BootstrapError(f"a process of another user listens at {place.socket_path}")
    return stream
