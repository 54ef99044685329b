"""What a checkpoint of a record has beside states: what a client has counted, told to the mirrors that write it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.averaging.coordinator import RoundCoordinator
from shoal.averaging.journal import genesis_file
from shoal.client.ledger import Ledger
from shoal.client.resuming import KeptTotals
from shoal.control.membership import Membership
from shoal.transport.base import Endpoint
from shoal.wire.messages.mirror import RunCounts


class CheckpointCounts:
    """The counts of the record that stands."""

    def __init__(
        self, endpoint: Endpoint, membership: Membership, coordinator: RoundCoordinator, ledger: Ledger, log_dir: Path
    ) -> None:
        """Count nothing yet.

        Args:
            log_dir: of this client; has the run's record 0.
        """
        self._endpoint = endpoint
        self._membership = membership
        self._coordinator = coordinator
        self._ledger = ledger
        self._log_dir = log_dir
        self._last: RunCounts | None = None

    def tell_mirrors(self) -> None:
        """Count anew, as a round has begun, and tell all mirrors."""
        self._last = None
        counts = self.standing()
        for mirror in self._membership.view.mirrors:
            self._endpoint.post(mirror.peer, counts)

    def standing(self, *, is_last: bool = False) -> RunCounts:
        """Return what was counted when the round after the record began, or now if none has."""
        counts = self._last
        if counts is None or counts.record_hash != self._coordinator.record_hash:
            counted = KeptTotals(self._ledger.totals, self._ledger.now_s()).encoded()
            counts = RunCounts(self._coordinator.record_hash, genesis_file(self._log_dir), counted)
        self._last = counts
        return msgspec.structs.replace(counts, is_last=is_last)
