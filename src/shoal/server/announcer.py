"""Keeps a server's record in the registry true: its stage, the record it holds, its load."""

from __future__ import annotations

import msgspec

from shoal.averaging.member import RoundSwapped
from shoal.control.records import StageRecord
from shoal.control.registry import Registry
from shoal.server.replica import Replica


class Announcer:
    """Announces one replica."""

    def __init__(self, registry: Registry, record: StageRecord, replica: Replica) -> None:
        """Announce the replica at once; `run` follows its rounds.

        Args:
            registry: of this process.
            record: of this server, with its stage.
            replica: which serves now.
        """
        self._registry = registry
        self._record = msgspec.structs.replace(record, serving=True)
        self._replica = replica
        registry.advertise(self._record)

    async def run(self) -> None:
        """Announce each new record that the replica holds, until cancelled."""
        steps = 0
        async for event in self._replica.events:
            if not isinstance(event, RoundSwapped):
                continue
            worker = self._replica.worker
            steps += len(worker.log)
            self._record = msgspec.structs.replace(
                self._record, held_round=event.record.round, step=steps, load=float(worker.num_open)
            )
            self._registry.advertise(self._record)
