"""What a client's parts know of the swarm, for the machine that decides what comes next (`swarm.run_client`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.data_link import DataLink
from shoal.client.homes import Homes
from shoal.client.keeping import Keeping
from shoal.client.ledger import Ledger
from shoal.client.reassignment import Reassignment
from shoal.client.reports import Reports
from shoal.control.membership import Membership
from shoal.ids import PeerId
from shoal.swarm.round_effects import RoundReady
from shoal.swarm.view import SwarmView


class ClientFacts:
    """`swarm.run_effects.RunFacts` of one client."""

    def __init__(
        self,
        coordinator: RoundCoordinator,
        membership: Membership,
        homes: Homes,
        reassignment: Reassignment,
        keeping: Keeping,
        data: DataLink,
        reports: Reports,
        ledger: Ledger,
    ) -> None:
        self._coordinator = coordinator
        self._membership = membership
        self._homes = homes
        self._reassignment = reassignment
        self._keeping = keeping
        self._data = data
        self._reports = reports
        self._totals = ledger.totals

    @property
    def view(self) -> SwarmView:
        return self._membership.view

    @property
    def leads(self) -> bool:
        return self._coordinator.leads

    @property
    def ready(self) -> RoundReady | None:
        return self._coordinator.ready

    @property
    def holders(self) -> Mapping[PeerId, int] | None:
        return self._coordinator.holders

    @property
    def committed_round(self) -> int:
        return self._coordinator.committed_round

    @property
    def is_placing(self) -> bool:
        return self._reassignment.is_placing

    @property
    def is_handing_over(self) -> bool:
        return self._keeping.is_handing_over

    @property
    def is_letting_go(self) -> bool:
        return self._keeping.is_letting_go

    @property
    def stuck(self) -> Sequence[int]:
        return self._coordinator.stuck

    @property
    def is_unfed(self) -> bool:
        return not self._data.is_up

    @property
    def is_refused(self) -> bool:
        return self._reports.is_refused

    @property
    def unmirrored(self) -> frozenset[tuple[PeerId, int]]:
        return self._coordinator.unmirrored

    @property
    def durations_s(self) -> Sequence[float]:
        return self._totals.durations_s

    def usable(self, known: Mapping[PeerId, int]) -> SwarmView:
        return self._homes.usable(known)

    def is_own(self, ready: RoundReady, base: str) -> bool:
        record = self._coordinator.outcome(ready).record
        return record.ballot.peer == self._coordinator.ballot.peer and record.previous == base

    def is_evaluated(self, round: int) -> bool:
        return not self._totals.num_holdout or round in self._totals.progress.eval_losses
