"""Our endpoints in the benchmark: opened anew for each call, so that every repetition has a fresh connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import anyio
import numpy as np

from shoal.clock import SystemClock
from shoal.errors import ConnectionLost
from shoal.identity import Identity
from shoal.ids import PeerId, RunId, StepKey
from shoal.transport.base import PeerLost, Received
from shoal.transport.dispatch import dispatch
from shoal.transport.endpoint import open_endpoint
from shoal.transport.event_queue import EventQueue
from shoal.transport.peers import StreamEndpoint
from shoal.wire.messages import Hop, Traffic
from shoal.wire.messages.step import Abort, Forward, Refused
from shoal.wire.tensors import WireTensor
from shoal_lab.bench.link import linked_port
from shoal_lab.bench.measure import percentile
from shoal_lab.bench.transport_rendezvous import Rendezvous

_KEY: Final = StepKey(0, 0, 0, 0)
_PADDING: Final = "x" * 12
"""Makes a `Refused` with a time in it about 64 bytes long on the wire."""
_WARM_UP_TENSORS: Final = 2
_PAUSE_S: Final = 0.002
_TCP: Final = "tcp:"


class _Inbox:
    """The other end's messages, as `dispatch` hands them to the handlers of a role.

    Attributes:
        events: received and not answered.
        answer: takes messages at once, as handlers do; None: they go into `events`.
    """

    def __init__(self) -> None:
        self.events = EventQueue()
        self.answer: Callable[[Received], None] | None = None

    def receive(self, event: Received) -> bool:
        """Take any message."""
        if self.answer is None:
            self.events.put(event)
        else:
            self.answer(event)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """Say so to whoever waits for a message."""
        self.events.put(PeerLost(peer, "the other process of the benchmark has gone"))

    async def next(self) -> Received:
        """Return the next message.

        Raises:
            ConnectionLost: the other end has gone.
        """
        event = await anext(self.events)
        if isinstance(event, Received):
            return event
        raise ConnectionLost("the other process of the benchmark has gone")


_Work = Callable[[StreamEndpoint, _Inbox], Awaitable[float | None]]


class OurEnd:
    """One end."""

    def __init__(self, rendezvous: Rendezvous, link: str | None) -> None:
        """Open nothing yet.

        Args:
            link: between the ends on the path `tls`; None: loopback alone.
        """
        self._rendezvous = rendezvous
        self._link = link
        self._receives = rendezvous.is_first
        self._clock = SystemClock()
        own, other = b"receiver", b"sender"
        if not self._receives:
            own, other = other, own
        self._identity = Identity(own.ljust(32, b"\0"))
        self._other = Identity(other.ljust(32, b"\0")).peer_id

    def rate(self, path: str, size_bytes: int, count: int) -> float | None:
        """Send so many tensors; return GB/s at the sender, once the receiver has taken them all."""

        async def work(endpoint: StreamEndpoint, inbox: _Inbox) -> float | None:
            if self._receives:
                for number in range(count + 1):
                    await inbox.next()
                    if number in (0, count):
                        endpoint.post(self._other, Abort(_KEY))
                return None
            tensor = WireTensor("uint8", (size_bytes,), np.ones(size_bytes, dtype=np.uint8).data)
            endpoint.post(self._other, Forward(_KEY, 0), (tensor,), Traffic.ACTIVATIONS)
            await inbox.next()
            begun_s = self._clock.now_s()
            for _ in range(count):
                endpoint.post(self._other, Forward(_KEY, 0), (tensor,), Traffic.ACTIVATIONS)
                await endpoint.drained(self._other)
            await inbox.next()
            return size_bytes * count / 1e9 / (self._clock.now_s() - begun_s)

        return self._run(path, work)

    def round_trip(self, path: str, count: int) -> float | None:
        """Send a message of 64 bytes there and back so often; return the mean in microseconds.

        Both ends answer from their handler, as a stage answers the one before it.
        """

        async def work(endpoint: StreamEndpoint, inbox: _Inbox) -> float | None:
            num_received = 0

            def answer(event: Received) -> None:
                nonlocal num_received
                num_received += 1
                if self._receives or num_received < count:
                    endpoint.post(event.peer, event.message)
                if num_received == count:
                    inbox.events.put(event)

            inbox.answer = answer
            begun_s = self._clock.now_s()
            if not self._receives:
                endpoint.post(self._other, Refused(_KEY, "x" * 23))
            await inbox.next()
            return None if self._receives else (self._clock.now_s() - begun_s) / count * 1e6

        return self._run(path, work)

    def overtaking(self, path: str, size_bytes: int, count: int) -> float | None:
        """Say 64 bytes now and then while large tensors are sent; return the 99th percentile in ms."""

        async def work(endpoint: StreamEndpoint, inbox: _Inbox) -> float | None:
            if not self._receives:
                await self._send_both(endpoint, size_bytes, count)
                await inbox.next()
                return None
            took_ms: list[float] = []
            num_tensors = 0
            while num_tensors < count:
                event = await inbox.next()
                num_tensors += len(event.tensors)
                if isinstance(event.message, Refused) and num_tensors >= _WARM_UP_TENSORS:
                    said_s = float(event.message.reason.removeprefix(_PADDING))
                    took_ms.append((self._clock.now_s() - said_s) * 1e3)
            endpoint.post(self._other, Abort(_KEY))
            return percentile(took_ms, 0.99)

        return self._run(path, work)

    async def _send_both(self, endpoint: StreamEndpoint, size_bytes: int, count: int) -> None:
        tensor = WireTensor("uint8", (size_bytes,), np.ones(size_bytes, dtype=np.uint8).data)

        async def talk() -> None:
            while True:
                endpoint.post(self._other, Refused(_KEY, f"{_PADDING}{self._clock.now_s():.6f}"))
                await self._clock.sleep_s(_PAUSE_S)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(talk)
            for _ in range(count):
                endpoint.post(self._other, Forward(_KEY, 0), (tensor,), Traffic.ACTIVATIONS)
                await endpoint.flushed(self._other)
            tasks.cancel_scope.cancel()

    def _run(self, path: str, work: _Work) -> float | None:
        """Have an endpoint with a connection over the path (`plain`, `tls`) do the work."""

        async def run() -> float | None:
            endpoint = open_endpoint(
                identity=self._identity,
                run_id=RunId("benchmark"),
                role="benchmark",
                unix_path=self._rendezvous.folder / f"{self._receives}.sock",
                swarm_key=b"benchmark".ljust(32, b"\0"),
                tcp=("127.0.0.1", 0),
            )
            async with endpoint:
                scheme = "unix:" if path == "plain" else _TCP
                own = next(address for address in endpoint.addresses if address.startswith(scheme))
                if not self._receives:
                    return await self._send(endpoint, self._rendezvous.share("ours", ""), work)
                link = self._link if scheme == _TCP else None
                with _behind(link, own) as address:
                    self._rendezvous.share("ours", address)
                    return await self._receive(endpoint, work)

        return anyio.run(run, backend_options={"use_uvloop": True})

    async def _send(self, endpoint: StreamEndpoint, address: str, work: _Work) -> float | None:
        endpoint.introduce(Hop(self._other, (address,)))
        async with _dispatched(endpoint) as inbox:
            endpoint.post(self._other, Abort(_KEY))
            await inbox.next()
            result = await work(endpoint, inbox)
            await endpoint.flushed(self._other)
            return result

    async def _receive(self, endpoint: StreamEndpoint, work: _Work) -> float | None:
        async with _dispatched(endpoint) as inbox:
            await inbox.next()
            endpoint.post(self._other, Abort(_KEY))
            result = await work(endpoint, inbox)
            # What it has said last is under way until the sender has heard it and closes.
            async for event in inbox.events:
                if isinstance(event, PeerLost):
                    break
            return result


@asynccontextmanager
async def _dispatched(endpoint: StreamEndpoint) -> AsyncGenerator[_Inbox, None]:
    """Give the inbox of an endpoint."""
    inbox = _Inbox()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(dispatch, endpoint, (inbox,))
        yield inbox
        tasks.cancel_scope.cancel()


@contextmanager
def _behind(link: str | None, address: str) -> Generator[str, None, None]:
    """Give the address that leads to this one over a link, if there is one."""
    if link is None:
        yield address
        return
    host, _, port = address.removeprefix(_TCP).rpartition(":")
    with linked_port(link, int(port)) as linked:
        yield f"{_TCP}{host}:{linked}"
