"""A client puts down how things stand, so that it goes on from there when it is started again.

a round begins, its pipelines are formed -- Saved --> the diary
                                         '-- what was counted until then --> mirrors
"""

from __future__ import annotations

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.checkpoint_counts import CheckpointCounts
from shoal.client.counters import CounterTotals
from shoal.client.data_link import DataLink
from shoal.client.diary import Diary, Saved
from shoal.client.ledger import Ledger
from shoal.control.membership import Membership
from shoal.swarm.resumption import still_resumes
from shoal.swarm.run_effects import RoundPlan


class Saving:
    """Of one client; raises `StorageError` where the diary cannot be written."""

    def __init__(
        self,
        *,
        run_id: str,
        diary: Diary,
        ledger: Ledger,
        coordinator: RoundCoordinator,
        membership: Membership,
        data: DataLink,
        counters: CounterTotals,
        counts: CheckpointCounts,
    ) -> None:
        self._run_id = run_id
        self._diary = diary
        self._ledger = ledger
        self._coordinator = coordinator
        self._membership = membership
        self._data = data
        self._counters = counters
        self._counts = counts

    def round_begins(self, plan: RoundPlan, base: str) -> None:
        """Nobody has heard of this round, which is trained on top of the record with the hash `base`."""
        self._save(plan, base)
        if plan.round > 1:
            self._counts.tell_mirrors()

    def run_ends(self, base: str) -> None:
        """All rounds are trained; `base` is what the last one was trained on."""
        self._save(None, base)

    def _save(self, plan: RoundPlan | None, base: str) -> None:
        self._counters.settle()
        self._diary.save(
            Saved(
                run_id=self._run_id,
                totals=self._ledger.totals,
                generation=self._diary.generation,
                ballot_number=self._coordinator.ballot.number,
                plan=plan,
                is_finished=plan is None,
                recorded=self._data.recorded,
                servers=self._membership.servers,
                base=base,
                chain=self._data.chain,
                resumed=still_resumes(self._diary.saved.resumed, base),
            )
        )
