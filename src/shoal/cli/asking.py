"""One question to a run's client, by a command that takes no part in the run. It loads neither torch nor hivemind."""

from __future__ import annotations

from typing import Generic, TypeVar

import anyio

from shoal.ids import PeerId
from shoal.transport.base import Endpoint, PeerLost, Received, TransportEvent
from shoal.wire.messages import Message
from shoal.wire.messages.base import Hop

Answer = TypeVar("Answer")


async def ask(
    endpoint: Endpoint, client: Hop, question: Message, kind: type[Answer], within_s: float
) -> tuple[Answer | None, str]:
    """Return what the client answers, or why it says nothing.

    Args:
        endpoint: only this call takes its events.
    """
    heard = _Heard(client.peer, kind, f"no answer within {within_s:.0f} s")
    endpoint.introduce(client)
    endpoint.post(client.peer, question)
    with anyio.move_on_after(within_s):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(endpoint.events().consume, heard.take)
            await heard.done.wait()
            tasks.cancel_scope.cancel()
    return heard.answer, heard.problem


class _Heard(Generic[Answer]):
    """What comes back from the client."""

    def __init__(self, client: PeerId, kind: type[Answer], problem: str) -> None:
        self.answer: Answer | None = None
        self.problem = problem
        self.done = anyio.Event()
        self._client = client
        self._kind = kind

    def take(self, event: TransportEvent) -> None:
        match event:
            case Received(peer, message) if peer == self._client and isinstance(message, self._kind):
                self.answer, self.problem = message, ""
                self.done.set()
            case PeerLost(peer, reason) if peer == self._client:
                self.problem = reason
                self.done.set()
            case _:
                pass
