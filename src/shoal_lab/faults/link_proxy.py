"""A TCP proxy that makes loopback a link of your choice: it stands between a dialler and a listener.

    async with LinkProxy(("127.0.0.1", port), parse_link("20mbit,150ms")) as proxy:
        dialler.introduce(Hop(listener.peer_id, (proxy.address,)))

    state of each direction, `Flow`:    state of the link:

    PASS -- hold() --> HOLD             up -- cut() --> connections closed or reset, new ones reset at once
    PASS -- drop() --> DROP             up <- heal() -- cut
    PASS <-- heal() -- HOLD, DROP

What happens to the bytes is decided by one `LinkModel` for each direction, which all connections share. The proxy's own
buffers and segments are kept as small as a router's, so that what waits, waits in the model's queue or at the sender.
Not emulated: the time that the TCP handshake itself takes, and how senders slow down after losses.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self

import anyio

from shoal.clock import Clock, SystemClock
from shoal_lab.faults.link import PACKET_BYTES, PERFECT, Direction, Link, LinkConditions
from shoal_lab.faults.link_lane import Flow, Lane, Way
from shoal_lab.faults.link_model import LinkModel

_SOCKET_BUFFER_BYTES: Final = 64 * 1024
_BACKLOG: Final = 16


class LinkProxy:
    """An asynchronous context manager; all methods are called on its event loop's thread."""

    def __init__(self, target: tuple[str, int], link: Link = PERFECT, clock: Clock | None = None) -> None:
        """Open nothing yet.

        Args:
            target: IPv4 address and port of the listener.
        """
        self._target = target
        self._clock: Clock = clock or SystemClock()
        self._ways = {
            direction: Way(LinkModel(link.conditions(direction), f"{link.seed}/{direction.name}"))
            for direction in Direction
        }
        self._listener = _small_socket()
        self._tasks = anyio.create_task_group()
        self._pairs: set[_Pair] = set()
        self._is_cut = False

    async def __aenter__(self) -> Self:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(_BACKLOG)
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._accept)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._tasks.cancel_scope.cancel()
        try:
            if isinstance(exc, Exception):
                # The task group would wrap it in a group, although it is none of its tasks that failed.
                await self._tasks.__aexit__(None, None, None)
                return False
            return await self._tasks.__aexit__(exc_type, exc, traceback)
        finally:
            self._listener.close()

    @property
    def port(self) -> int:
        """The port to dial, on 127.0.0.1."""
        return int(self._listener.getsockname()[1])

    @property
    def address(self) -> str:
        """Where to dial, as endpoints write it."""
        return f"tcp:127.0.0.1:{self.port}"

    def model(self, direction: Direction) -> LinkModel:
        """Return what decides about a direction."""
        return self._ways[direction].model

    async def taken(self, direction: Direction, num_bytes: int) -> None:
        """Return when the link has taken so many bytes of this direction, over all connections."""
        way = self._ways[direction]
        while way.taken_bytes < num_bytes:
            await way.news.wait()

    def taken_bytes(self, direction: Direction) -> int:
        """Return how many bytes of this direction the link has taken, dropped ones among them."""
        return self._ways[direction].taken_bytes

    def change(self, conditions: LinkConditions, *directions: Direction) -> None:
        """Make these directions (both, if none is named) like that."""
        for way in self._named(directions):
            way.model.change(conditions)

    def hold(self, *directions: Direction) -> None:
        """Let nothing through, as when a cable is out: what is sent arrives after `heal`."""
        for way in self._named(directions):
            way.set_flow(Flow.HOLD)

    def drop(self, *directions: Direction) -> None:
        """Take bytes of these directions and lose them, without a word to either side."""
        for way in self._named(directions):
            way.set_flow(Flow.DROP)

    def cut(self, *, reset: bool = False) -> None:
        """End all connections, with a reset or by closing them; what is under way is lost. New ones are refused."""
        self._is_cut = True
        for pair in self._pairs:
            pair.end(reset=reset)

    def heal(self) -> None:
        """Let everything through again, and new connections be made."""
        self._is_cut = False
        for way in self._ways.values():
            way.set_flow(Flow.PASS)

    def _named(self, directions: tuple[Direction, ...]) -> list[Way]:
        return [self._ways[direction] for direction in directions or tuple(Direction)]

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(self._listener)
            near.setblocking(False)
            if self._is_cut:
                _reset(near)
            else:
                self._tasks.start_soon(self._connect, near)

    async def _connect(self, near: socket.socket) -> None:
        """Carry one connection until both its directions have ended, or somebody ends it."""
        pair = _Pair()
        self._pairs.add(pair)
        outward, inward = self._ways[Direction.OUTWARD], self._ways[Direction.INWARD]
        far = _small_socket()
        try:
            with pair.scope:
                await outward.left(Flow.HOLD, Flow.DROP)
                await asyncio.get_running_loop().sock_connect(far, self._target)
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with anyio.create_task_group() as tasks:
                    for source, sink, way in ((near, far, outward), (far, near, inward)):
                        lane = Lane(source, sink, way, self._clock, pair.end)
                        tasks.start_soon(lane.read)
                        tasks.start_soon(lane.write)
        except OSError:
            pair.reset = True  # the listener cannot be reached
        finally:
            self._pairs.discard(pair)
            for end in (near, far):
                _reset(end) if pair.reset else end.close()


@dataclass(eq=False, repr=False)
class _Pair:
    """One connection through the proxy, which is two sockets."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    reset: bool = False

    def end(self, *, reset: bool) -> None:
        self.reset = reset
        self.scope.cancel()


def _small_socket() -> socket.socket:
    """Return a socket whose other end sends in Ethernet's segments and does not get far ahead of what is read."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    opened.setblocking(False)
    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, PACKET_BYTES)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BUFFER_BYTES)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER_BYTES)
    return opened


def _reset(end: socket.socket) -> None:
    """Close so that the other end gets a reset instead of an end of the stream."""
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
