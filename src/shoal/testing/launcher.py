"""The launcher of a cluster, as its client knows it: starts trainers, and says which ones there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shoal.testing.process import Process


class ClusterLauncher:
    """Keeps the newest trainer of each slot.

    Attributes:
        trainers: by slot.
        losses: losses from the time without a client, for the client that is started again.
    """

    def __init__(self, start: Callable[[int, int], Process]) -> None:
        """Start nothing yet.

        Args:
            start: starts the trainer of a slot (first argument) with an incarnation (second).
        """
        self.trainers: dict[int, Process] = {}
        self.losses: list[dict[str, Any]] = []
        self._start = start
        self._incarnations: dict[int, int] = {}

    async def request(self, name: str, **fields: object) -> Mapping[str, Any]:
        """Start a trainer, or say which ones there are, as the launcher of a host does when its client asks."""
        if name == "adopt":
            trainers = [
                {"slot": slot, "incarnation": self._incarnations[slot], "running": process.running}
                for slot, process in self.trainers.items()
            ]
            return {"trainers": trainers, "lost": self.losses}
        slot, incarnation = fields.get("slot"), fields.get("incarnation")
        if name != "start_trainer" or not isinstance(slot, int) or not isinstance(incarnation, int):
            return {"error": f"a cluster knows no request {name!r} with {fields}"}
        if slot in self.trainers:
            self.trainers[slot].kill()
        self.trainers[slot], self._incarnations[slot] = self._start(slot, incarnation), incarnation
        return {}
