"""Handlers behind real sockets: called from the loop's read callback, and told of a loss after everything else."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import anyio
from tests.alongside import alongside
from tests.integration.transport.samples import step, tensor

from shoal.ids import PeerId
from shoal.transport.base import Received
from shoal.transport.dispatch import dispatch
from shoal.transport.peers import StreamEndpoint
from shoal.wire.messages import Traffic
from shoal.wire.messages.step import Abort, Forward


@dataclass
class Handler:
    """Notes what it is told, and in which task; ends the connection at the message it is to find too much."""

    endpoint: StreamEndpoint
    too_much: int = -1
    told: list[int | str] = field(default_factory=list[int | str])
    tasks: set[object] = field(default_factory=set[object])
    lost: anyio.Event = field(default_factory=anyio.Event)

    def receive(self, event: Received) -> bool:
        assert isinstance(event.message, Abort | Forward)
        self.tasks.add(asyncio.current_task())
        self.told.append(event.message.key.number)
        if self.told[-1] == self.too_much:
            self.endpoint.disconnect(event.peer, "too much")
        return True

    def peer_lost(self, peer: PeerId) -> None:
        self.told.append("lost")
        self.lost.set()


async def test_a_handler_that_has_nothing_queued_is_called_without_a_turn_of_the_loop(ends: Any) -> None:
    a, b = ends
    handler = Handler(b)
    async with alongside() as tasks:
        tasks.start_soon(dispatch, b, (handler,))
        await anyio.wait_all_tasks_blocked()
        a.post(b.peer_id, Abort(step(0)))
        a.post(b.peer_id, Forward(step(1), 0), (tensor(100_000),), Traffic.ACTIVATIONS)
        await a.flushed(b.peer_id)
        a.disconnect(b.peer_id, "that was all")
        await handler.lost.wait()
    assert handler.told == [0, 1, "lost"]
    assert None in handler.tasks


async def test_after_the_loss_of_a_peer_nothing_comes_of_the_connection_that_the_handler_ended(ends: Any) -> None:
    a, b = ends
    handler = Handler(b, too_much=2)
    async with alongside() as tasks:
        tasks.start_soon(dispatch, b, (handler,))
        await anyio.wait_all_tasks_blocked()
        for number in range(50):
            a.post(b.peer_id, Abort(step(number)))
        await handler.lost.wait()
        await anyio.wait_all_tasks_blocked()
    *numbers, last = handler.told
    assert last == "lost"
    assert numbers == list(range(len(numbers))), "what was read before comes before, in order"
    assert len(numbers) > 2
