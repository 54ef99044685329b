"""Tensors of a step that come before the step: what a replica sends on may overtake the trainer's Open to the next one.

Whoever is connected could send such a tensor, so there is a bound on how much is held, and nothing is held for a step
that may not be opened any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from shoal.ids import PeerId, StepKey
from shoal.swarm.microbatch_pass import Payload
from shoal.swarm.step_replica import StepReplica

MAX_HELD_BYTES = 128 << 20
"""Of all senders together. What is more is refused, and the step tried again without haste."""
MAX_HELD = 1024
"""Messages of all senders together."""

Content = TypeVar("Content")
"""The tensors of a message, which only the driver knows."""


@dataclass(frozen=True, slots=True)
class EarlyPayload(Generic[Content]):
    """A message, its tensors, and who has sent them."""

    sender: PeerId
    message: Payload
    content: Content
    num_bytes: int


class EarlyPayloads(Generic[Content]):
    """Those of one replica.

    A trainer opens an attempt when the one before is over. So of one sender and trainer only the newest attempt is held
    that the sender has named, and none that is older than the last one that the trainer has opened.

    Args:
        machine: knows which attempts are open, and which may still be opened.
    """

    def __init__(self, machine: StepReplica) -> None:
        self._machine = machine
        self._held: list[EarlyPayload[Content]] = []

    def hold(self, early: EarlyPayload[Content]) -> bool:
        """Keep it until its attempt is opened; False: that is not awaited, or there is no room."""
        key, sender = early.message.key, early.sender
        if not self._machine.awaits(key):
            return False
        self._held = [
            other
            for other in self._held
            if other.sender != sender or other.message.key.trainer != key.trainer or other.message.key >= key
        ]
        num_bytes = early.num_bytes + sum(other.num_bytes for other in self._held)
        if num_bytes > MAX_HELD_BYTES or len(self._held) >= MAX_HELD:
            return False
        self._held.append(early)
        return True

    def take(self, key: StepKey) -> list[EarlyPayload[Content]]:
        """The trainer wanted to open this attempt: return what is due now. Older attempts of its trainer are over."""
        step = self._machine.open.get(key)
        due = [early for early in self._held if early.message.key == key]
        self._held = [
            early for early in self._held if early.message.key.trainer != key.trainer or early.message.key > key
        ]
        return [] if step is None else [early for early in due if step.pass_of(early.sender, early.message)]

    def lost(self, sender: PeerId) -> None:
        """The connection to a sender has ended: its trainer is told, and aborts the attempt."""
        self._held = [early for early in self._held if early.sender != sender]

    def clear(self) -> None:
        """No attempt of before may be opened any more."""
        self._held = []
