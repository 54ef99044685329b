"""Keeps a server's record in the registry true: its stage, the record it holds, its load."""

from __future__ import annotations

from typing import Protocol

import msgspec

from shoal.averaging.member import RoundSwapped
from shoal.control.records import Record, StageRecord
from shoal.server.replica import Replica


class Advertises(Protocol):
    """Where records are announced; `control.registry.Registry` is one."""

    def advertise(self, record: Record) -> None:
        """Announce a record in place of the one of the same kind."""
        ...


class Announcer:
    """Announces one replica."""

    def __init__(self, registry: Advertises, record: StageRecord, replica: Replica) -> None:
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
        async with self._replica.events as events:
            async for event in events:
                if isinstance(event, RoundSwapped):
                    self._announce(event.record.round)

    def _announce(self, held_round: int) -> None:
        worker = self._replica.worker
        self._record = msgspec.structs.replace(
            self._record, held_round=held_round, step=worker.num_committed, load=float(worker.num_open)
        )
        self._registry.advertise(self._record)
