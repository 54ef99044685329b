"""Where a replica's states come from and where they go, beside the rounds in which it takes part itself.

D_0 is computed by each replica.
record -> sync: the peers that hold its state        -> hold: newcomers get it from here
round begins -> resumable: a buddy's snapshot of it
record -> keep_inner: for checkpoints
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from shoal.averaging.inner_exchange import InnerExchange
from shoal.averaging.replica_state import Contribution, OuterState
from shoal.averaging.snapshot_exchange import Resumable, SnapshotExchange
from shoal.averaging.state_donor import StateDonor
from shoal.averaging.state_sync import StateSync
from shoal.swarm.snapshots import Base


@dataclass(eq=False, repr=False)
class StateSource:
    """What a `RoundMember` knows of all that: states come from peers and go to them.

    Attributes:
        snapshots: None: the run makes none.
        inner: None: what the inner optimizer knows is kept by nobody.
        is_behind: The replica has reason to believe that the run is further than D_0, whose state it has.
    """

    sync: StateSync
    donor: StateDonor
    snapshots: SnapshotExchange | None = None
    inner: InnerExchange | None = None
    _: KW_ONLY
    is_behind: bool = False

    @property
    def may_resume(self) -> bool:
        """Whether there may be a snapshot of a round under way: then the member begins its first round itself."""
        return self.snapshots is not None

    async def settled(self, base: Base) -> None:
        if self.snapshots is not None:
            await self.snapshots.settled(base)

    def resumable(self, base: Base) -> Resumable | None:
        return None if self.snapshots is None else self.snapshots.take(base)

    async def keep_inner(self, round: int, record_hash: str, *, is_wanted: bool) -> None:
        if self.inner is not None:
            await self.inner.keep(round, record_hash, is_wanted=is_wanted)

    def hold(self, round: int, record_hash: str, state: OuterState | None, average: Contribution | None) -> None:
        """The replica has gone to this record.

        Args:
            state: That the record names; its vectors do not change any more. None: the stage was restored from another.
            average: The ring's result in the record's round, if it is at hand; does not change any more either.
        """
        if self.snapshots is not None:
            self.snapshots.recorded(round)
        if state is not None:
            self.donor.hold(round, record_hash, state, average)
