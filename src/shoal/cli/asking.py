"""One question to a run's client, by a command that takes no part in the run. It loads neither torch nor hivemind.

On the client's own host no key is needed: the mode of its Unix socket decides who may ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import anyio

from shoal.clock import Clock, Deadline, SystemClock
from shoal.identity import Identity
from shoal.ids import PeerId, RunId
from shoal.runtime.run_dir import RunNote
from shoal.transport.base import Endpoint, PeerLost, Received, TransportEvent
from shoal.transport.unix import open_unix_endpoint
from shoal.wire.messages import Message
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import AskStatus, RunStatus

Answer = TypeVar("Answer")

_AGAIN_S = 0.1


async def ask_here(
    note: RunNote, question: Message, kind: type[Answer], within_s: float, clock: Clock
) -> tuple[Answer | None, str]:
    """Return what the client of a run of this host answers, or why it says nothing.

    One that is just being started, or started again, does not listen yet: it is dialled again.
    """
    deadline = Deadline.after(clock, within_s)
    answer, problem = None, ""
    while True:
        async with open_unix_endpoint(
            peer_id=Identity.generate().peer_id, run_id=RunId(note.run_id), role="observer", path=None
        ) as endpoint:
            client = Hop(note.client, (f"unix:{note.socket}",))
            answer, problem = await ask(endpoint, client, question, kind, deadline.remaining_s())
        if answer is not None or deadline.remaining_s() <= _AGAIN_S:
            return answer, problem
        await clock.sleep_s(_AGAIN_S)


def statuses_here(clients: Sequence[RunNote], within_s: float) -> list[tuple[RunStatus | None, str]]:
    """Ask the clients of runs of this host how they are, all at once; see `ask_here`."""
    answers: dict[int, tuple[RunStatus | None, str]] = {}

    async def ask_one(place: int, note: RunNote) -> None:
        answers[place] = await ask_here(note, AskStatus(), RunStatus, within_s, SystemClock())

    async def ask_all() -> None:
        async with anyio.create_task_group() as tasks:
            for place, note in enumerate(clients):
                tasks.start_soon(ask_one, place, note)

    anyio.run(ask_all)
    return [answers[place] for place in range(len(clients))]


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
