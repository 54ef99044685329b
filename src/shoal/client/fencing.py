"""Settles what a lost trainer has left behind: every live replica refuses it from now on, and says what it had done.

Fence to every live replica, repeated -> Fenced from each, until none of them is in doubt any more -> Settled

A replica that is lost meanwhile is not waited for. One that is silent is waited for until its connection is given up,
which is bounded; see docs/protocol.md, "The training step".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import anyio

from shoal.clock import Clock, Deadline
from shoal.ids import PeerId, StepKey
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.step import Fence, Fenced

logger = logging.getLogger(__name__)

_REPEAT_S = 0.1
_DOUBT_S = 1.0
"""How long replicas may take to settle a step among themselves; what is in doubt then is left to the record."""
_SILENCE_S = 5.0
"""A frozen replica has lost its connection by then."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What the incarnations below the fenced one have done in this round.

    Attributes:
        committed: attempts that some replica has applied.
        in_doubt: attempts whose fate the record will tell.
        complete: every live replica has answered; otherwise there may be more.
    """

    committed: frozenset[StepKey]
    in_doubt: frozenset[StepKey]
    complete: bool


class Fencing:
    """The client's side of `Fence`. A `transport.dispatch.Handler`."""

    def __init__(self, *, endpoint: Endpoint, clock: Clock, replicas: Callable[[], Collection[PeerId]]) -> None:
        """Fence nobody yet.

        Args:
            endpoint: of the client.
            clock: for repetitions.
            replicas: all that live now.
        """
        self._endpoint = endpoint
        self._clock = clock
        self._replicas = replicas
        self._answers: dict[int, dict[PeerId, Fenced]] = {}
        self._changed = anyio.Event()

    def receive(self, event: Received) -> bool:
        """Take answers."""
        if not isinstance(event.message, Fenced):
            return False
        for slot in event.message.incarnations:
            if slot in self._answers:
                self._answers[slot][event.peer] = event.message
        self._notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """It is not waited for any more."""
        self._notify()

    async def settle(self, slot: int, lowest: int) -> Settled:
        """Have every incarnation of a slot's trainer below `lowest` refused everywhere, and return what it has done."""
        answers = self._answers[slot] = {}
        begun_s = self._clock.now_s()
        patience = Deadline.after(self._clock, _SILENCE_S)
        try:
            while True:
                for peer in self._replicas():
                    self._endpoint.post(peer, Fence({slot: lowest}))
                again = Deadline.after(self._clock, _REPEAT_S)
                while not again.expired() and not _is_settled(answers, self._replicas()):
                    changed = self._changed
                    with anyio.move_on_after(again.remaining_s()):
                        await changed.wait()
                complete = answers.keys() >= set(self._replicas())
                tired = self._clock.now_s() - begun_s > _DOUBT_S
                if _is_settled(answers, self._replicas()) or (complete and tired) or patience.expired():
                    break
        finally:
            del self._answers[slot]
        keys = [answer.committed for answer in answers.values()]
        committed = frozenset(key for each in keys for key in each if key.trainer == slot)
        doubts = frozenset(key for answer in answers.values() for key in answer.in_doubt if key.trainer == slot)
        settled = Settled(committed, doubts - committed, complete)
        logger.info(
            "trainer.fenced",
            extra={
                "slot": slot,
                "lowest": lowest,
                "committed": len(settled.committed),
                "in_doubt": len(settled.in_doubt),
                "complete": complete,
                "after_s": round(self._clock.now_s() - begun_s, 3),
            },
        )
        return settled

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _is_settled(answers: dict[PeerId, Fenced], replicas: Collection[PeerId]) -> bool:
    return answers.keys() >= set(replicas) and not any(answer.in_doubt for answer in answers.values())
