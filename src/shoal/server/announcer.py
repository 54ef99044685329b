"""Keeps a server's record in the registry true: its stage, the record it holds, its load."""

from __future__ import annotations

from typing import Protocol

import msgspec

from shoal.control.records import Record, StageRecord
from shoal.server.replica import LocalReplica


class Advertises(Protocol):
    """Where records are announced; `control.registry.Registry` is one, a swarm in one process has another."""

    def advertise(self, record: Record) -> None:
        """Announce a record in place of the one of the same kind."""
        ...


class Announcer:
    """Announces what one server hosts."""

    def __init__(self, registry: Advertises, record: StageRecord) -> None:
        """Announce nothing yet.

        Args:
            record: of this server; the announcer fills in what concerns the replica.
        """
        self._registry = registry
        self._record = record

    @property
    def pinned(self) -> bool:
        """Whether the server's user has given it its stage."""
        return self._record.pinned

    def announce(self, replica: LocalReplica, *, serving: bool = True) -> None:
        """Announce a replica as it is now.

        Args:
            serving: the replica may be used; False while it is being left or loaded.
        """
        self._record = msgspec.structs.replace(
            self._record,
            stage=replica.stage,
            base_round=replica.member.offered_round,
            step=replica.worker.num_committed,
            load=float(replica.worker.num_open),
            serving=serving,
            cap=replica.worker.cap,
        )
        self._registry.advertise(self._record)
