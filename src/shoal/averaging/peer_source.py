"""The `StateSource` of a server: other replicas of its stage, and buddies that keep snapshots."""

from __future__ import annotations

from shoal.averaging.replica_state import Contribution, OuterState
from shoal.averaging.snapshot_exchange import SnapshotExchange
from shoal.averaging.state_donor import StateDonor
from shoal.averaging.state_source import Resumable, Successor, TakeState
from shoal.averaging.state_sync import StateSync
from shoal.swarm.round_effects import Fetch
from shoal.swarm.snapshots import Base
from shoal.wire.messages.round import StageHashes


class PeerSource:
    """States come from peers and go to them.

    Args:
        snapshots: None: the run makes none.
    """

    def __init__(self, sync: StateSync, donor: StateDonor, snapshots: SnapshotExchange | None = None) -> None:
        self.sync = sync
        self.donor = donor
        self._snapshots = snapshots

    def follow(self, order: Fetch) -> bool:
        """See `StateSource`."""
        return self.sync.follow(order)

    async def fetch(
        self,
        order: Fetch,
        template: OuterState,
        base: tuple[OuterState, StageHashes] | None,
        successor: Successor,
        take: TakeState,
    ) -> Fetch:
        """See `StateSource`."""
        return await self.sync.fetch(order, template, base, successor, take)

    @property
    def may_resume(self) -> bool:
        """See `StateSource`."""
        return self._snapshots is not None

    async def settled(self, base: Base) -> None:
        """See `StateSource`."""
        if self._snapshots is not None:
            await self._snapshots.settled(base)

    def resumable(self, base: Base) -> Resumable | None:
        """See `StateSource`."""
        return None if self._snapshots is None else self._snapshots.take(base)

    @property
    def is_followed(self) -> bool:
        """See `StateSource`."""
        return self.donor.is_followed

    def hold(self, round: int, record_hash: str, state: OuterState | None, average: Contribution | None) -> None:
        """See `StateSource`."""
        if self._snapshots is not None:
            self._snapshots.recorded(round)
        if state is not None:
            self.donor.hold(round, record_hash, state, average)

    def release(self) -> None:
        """See `StateSource`."""
        self.donor.release()
