"""The launcher of a cluster, as its client knows it: starts trainers, and says which ones there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from shoal.runtime import launcher_messages as messages
from shoal_lab.process import Process


class ClusterLauncher:
    """Keeps the newest trainer of each slot.

    Attributes:
        trainers: by slot.
        losses: losses from the time without a client, for the client that is started again.
    """

    def __init__(self, start: Callable[[int, int], Process]) -> None:
        """Start nothing yet.

        Args:
            start: starts the trainer of a slot (first argument) with a generation (second).
        """
        self.trainers: dict[int, Process] = {}
        self.losses: list[messages.LostProcess] = []
        self._start = start
        self._generations: dict[int, int] = {}

    async def request(self, asked: messages.LauncherRequest[messages.Reply]) -> messages.Reply:
        """Start a trainer, or say which ones there are, as the launcher of a host does when its client asks."""
        reply: messages.AnyReply = messages.LauncherAnswer()
        match cast(messages.AnyRequest, asked):
            case messages.StartTrainer(slot, generation):
                if slot in self.trainers:
                    self.trainers[slot].kill()
                self.trainers[slot], self._generations[slot] = self._start(slot, generation), generation
            case messages.Adopt():
                running = [slot for slot, trainer in self.trainers.items() if trainer.running]
                reply = messages.Adoption(self._generations, running, self.losses)
            case other:
                reply = messages.LauncherAnswer(f"a cluster does not do this: {other}")
        return cast(messages.Reply, reply)
