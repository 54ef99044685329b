"""What a checkpoint of a record has beside states: what a client has counted, told to the mirrors that write it."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shoal.averaging.coordinator import RoundCoordinator
from shoal.averaging.journal import genesis_file
from shoal.client.ledger import Ledger
from shoal.client.resuming import KeptTotals
from shoal.control.membership import Membership
from shoal.ids import PeerId
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.mirror import Mirrored, RunCounts


class CheckpointCounts:
    """The counts of the record that stands. A `transport.dispatch.Handler` that hears of mirrors, and comes before the
    coordinator, which they answer."""

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
        self._told: set[PeerId] = set()

    def receive(self, event: Received) -> bool:
        """Tell a mirror that has come in the middle of a round what the others were told when it began."""
        has_answered, last = isinstance(event.message, Mirrored), self._last
        if has_answered and event.peer not in self._told and last is not None and self._still_stands(last):
            self._told.add(event.peer)
            self._endpoint.post(event.peer, last)
        return False

    def peer_lost(self, peer: PeerId) -> None:
        """If it was a mirror, its next start knows nothing."""
        self._told.discard(peer)

    def tell_mirrors(self) -> None:
        """Count anew, as a round has begun, and tell all mirrors."""
        self._last = None
        counts = self.standing()
        self._told = {mirror.peer for mirror in self._membership.view.mirrors}
        for peer in self._told:
            self._endpoint.post(peer, counts)

    def standing(self, *, is_last: bool = False) -> RunCounts:
        """Return what was counted when the round after the record began, or now if none has."""
        counts = self._last
        if counts is None or not self._still_stands(counts):
            counted = KeptTotals(self._ledger.totals, self._ledger.now_s()).encoded()
            counts = RunCounts(self._coordinator.record_hash, genesis_file(self._log_dir), counted)
        self._last = counts
        return msgspec.structs.replace(counts, is_last=is_last)

    def _still_stands(self, counts: RunCounts) -> bool:
        return counts.record_hash == self._coordinator.record_hash
