"""An endpoint under attack while it talks with a friend all the time, so that a disturbance is seen."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from tests.alongside import until
from tests.integration.transport.samples import ALICE, BOB, over_tcp, step

from shoal.errors import Offence
from shoal.transport.base import PeerLost, PeerUp, Received, TransportEvent
from shoal.transport.dispatch import Handler
from shoal.transport.limits import TransportLimits
from shoal.transport.peers import StreamEndpoint
from shoal.wire.messages.step import Opened


@dataclass
class Scene:
    """An endpoint that is attacked while it talks with a peer all the time.

    Attributes:
        target: the endpoint.
        others: its events that are not of the peer it talks with.
        exchanges: messages that went to the target and back.
    """

    target: StreamEndpoint
    others: list[TransportEvent] = field(default_factory=list[TransportEvent])
    exchanges: int = 0
    news: anyio.Event = field(default_factory=anyio.Event)

    def refused(self, offence: Offence) -> int:
        return self.target.metrics.counter("transport.refused", offence=offence.value).value

    async def until(self, holds: Any, what: str) -> None:
        with anyio.move_on_after(30):
            await until(holds)
            return
        raise AssertionError(f"{what}: {self.target.metrics.counts()}, {self.others}")

    async def has_refused(self, offence: Offence, count: int = 1) -> None:
        await self.until(lambda: self.refused(offence) >= count, f"{count} x {offence}")
        assert self.refused(offence) == count == self.target.counters["transport.refused"]

    async def goes_on(self) -> None:
        """Wait until the peer and the target have talked a good deal more."""
        wanted = self.exchanges + 50
        await self.until(lambda: self.exchanges >= wanted, "the others are disturbed")


@asynccontextmanager
async def talking(
    host: Any, answering: Callable[[StreamEndpoint], Handler] | None = None, **limits: Any
) -> AsyncIterator[Scene]:
    """Have a friend and the target talk; what others say is answered by `answering`, if it takes it."""
    friend, target = await host(ALICE), await host(BOB, limits=TransportLimits(**limits))
    scene = Scene(target)
    handler = None if answering is None else answering(target)
    friend.introduce(over_tcp(target))

    async def answer() -> None:
        async for event in target.events():
            if isinstance(event, Received) and event.peer == friend.peer_id:
                target.post(event.peer, event.message)
            elif handler is not None and isinstance(event, Received) and handler.receive(event):
                pass
            elif event != PeerUp(friend.peer_id):
                scene.others.append(event)

    async def talk() -> None:
        friend.post(target.peer_id, Opened(step()))
        async for event in friend.events():
            if isinstance(event, Received):
                scene.exchanges += 1
                friend.post(target.peer_id, Opened(step(scene.exchanges)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answer)
        tasks.start_soon(talk)
        await scene.goes_on()
        yield scene
        await scene.goes_on()
        assert not [e for e in scene.others if isinstance(e, PeerLost) and e.peer == friend.peer_id]
        tasks.cancel_scope.cancel()


def refusals(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record) for record in caplog.records if record.getMessage() == "transport.refused"]
