"""A client puts down how things stand, so that it goes on from there when it is started again.

a round begins, its pipelines are formed -- Saved --> the diary
                                         '-- what was counted until then --> mirrors
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.checkpoints import CheckpointCounts
from shoal.client.counters import CounterTotals
from shoal.client.data_link import DataLink
from shoal.client.diary import Diary, Saved
from shoal.client.ledger import Ledger
from shoal.client.needed_files import NeededFiles
from shoal.control.membership import Membership
from shoal.swarm.resumption import still_resumes
from shoal.swarm.run_effects import RoundPlan


@dataclass(kw_only=True, eq=False, repr=False)
class Saving:
    """Of one client; raises `StorageError` where the diary cannot be written."""

    run_id: str
    diary: Diary
    ledger: Ledger
    coordinator: RoundCoordinator
    membership: Membership
    data: DataLink
    counters: CounterTotals
    counts: CheckpointCounts
    needed: NeededFiles

    async def round_begins(self, plan: RoundPlan, base: str) -> None:
        """Nobody has heard of this round, which is trained on top of the record with the hash `base`."""
        await self.needed.written(partial(self._save, plan, base))
        if plan.round > 1:
            self.counts.tell_mirrors()

    async def run_ends(self, base: str) -> None:
        """All rounds are trained; `base` is what the last one was trained on."""
        await self.needed.written(partial(self._save, None, base))

    async def _save(self, plan: RoundPlan | None, base: str) -> None:
        self.counters.settle()
        self.diary.save(
            Saved(
                run_id=self.run_id,
                totals=self.ledger.totals,
                generation=self.diary.generation,
                ballot_number=self.coordinator.ballot.number,
                plan=plan,
                is_finished=plan is None,
                recorded=self.data.recorded,
                servers=self.membership.servers,
                base=base,
                chain=self.data.chain,
                marks=self.data.recorded_marks,
                resumed=still_resumes(self.diary.saved.resumed, base),
            )
        )
