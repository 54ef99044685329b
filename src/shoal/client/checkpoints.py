"""What a client has to do with checkpoints, which mirrors write: of which records they are wanted, what they have
beside states, and that there is one of the last record of a run that ends, while servers are there to give what it has.

    RunCounts (is_last) -> a mirror gets what it lacks, and writes -> LastKept, or the mirror is lost -> all may leave

Whoever stops a run expects that it goes on as if it had not been stopped. The mirrors need the servers for that, and
servers leave when the client has said its last word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

import anyio
import msgspec

from shoal.averaging.coordinator import RoundCoordinator
from shoal.averaging.journal import genesis_file
from shoal.client.ledger import Ledger
from shoal.client.resuming import KeptTotals
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.control.membership import Membership
from shoal.events.mirror import LastCheckpointAwaited, LastCheckpointLacks
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.swarm.keep_rule import KeepRule
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.mirror import LastKept, Mirrored, RunCounts
from shoal.wire.messages.round import Record

_SWAP_S: Final = 2.0
"""So long may servers take to say that they have swapped to a record that was just committed."""
_SAY_AFTER_S: Final = 4.0
_MOST_S: Final = 600.0
"""Without a word from a mirror that is there; then the run ends with the checkpoint before."""


@dataclass(eq=False, repr=False)
class CheckpointCounts:
    """The counts of the record that stands. A `transport.dispatch.Handler` that hears of mirrors, and comes before the
    coordinator, which they answer.

    Attributes:
        log_dir: of this client; has the run's record 0.
    """

    endpoint: Endpoint
    membership: Membership
    coordinator: RoundCoordinator
    ledger: Ledger
    log_dir: Path
    _last: RunCounts | None = None
    _told: set[PeerId] = field(default_factory=set[PeerId])

    def receive(self, event: Received) -> bool:
        """Tell a mirror that has come in the middle of a round what the others were told when it began."""
        has_answered, last = isinstance(event.message, Mirrored), self._last
        if has_answered and event.peer not in self._told and last is not None and self._still_stands(last):
            self._told.add(event.peer)
            self.endpoint.post(event.peer, last)
        return False

    def peer_lost(self, peer: PeerId) -> None:
        """If it was a mirror, its next start knows nothing."""
        self._told.discard(peer)

    def tell_mirrors(self) -> None:
        """Count anew, as a round has begun, and tell all mirrors."""
        self._last = None
        counts = self.standing()
        self._told = {mirror.peer for mirror in self.membership.view.mirrors}
        for peer in self._told:
            self.endpoint.post(peer, counts)

    def standing(self, *, is_last: bool = False) -> RunCounts:
        """Return what was counted when the round after the record began, or now if none has."""
        counts = self._last
        if counts is None or not self._still_stands(counts):
            counted = KeptTotals(self.ledger.totals, self.ledger.now_s()).encoded()
            counts = RunCounts(self.coordinator.record_hash, self._genesis, counted)
        self._last = counts
        return msgspec.structs.replace(counts, is_last=is_last)

    @cached_property
    def _genesis(self) -> bytes:
        """The file of D_0, which stays as it is: no later round depends on the disk that it is on."""
        return genesis_file(self.log_dir)

    def _still_stands(self, counts: RunCounts) -> bool:
        return counts.record_hash == self.coordinator.record_hash


class Checkpointing:
    """The rule of one client, and what users ask for.

    Args:
        membership: lists the mirrors, which write them.
    """

    def __init__(self, config: Config, clock: Clock, membership: Membership) -> None:
        self._membership = membership
        self._clock = clock
        self._rule = KeepRule.of(config)

    @property
    def has_mirrors(self) -> bool:
        """Whether somebody is there who writes them."""
        return bool(self._membership.view.mirrors)

    @property
    def is_asked(self) -> bool:
        """Whether a user wants one of the next record."""
        return self._rule.is_asked

    def ask(self) -> None:
        """A user wants one of the next record, whatever the rule says."""
        self._rule.is_asked = True

    def is_due(self, round: int) -> bool:
        """Whether one is wanted of a round's record: then each replica copies what its inner optimizer knows."""
        return self.has_mirrors and self._rule.is_due(round, self._clock.now_s())

    def recorded(self, record: Record) -> None:
        """A record stands."""
        if record.keep:
            self._rule.begun(record.round, self._clock.now_s())


@dataclass(eq=False, repr=False)
class LastCheckpoint:
    """The last checkpoint, as the client sees it. A `transport.dispatch.Handler`.

    Attributes:
        counts: have what goes into a checkpoint of the record that stands, beside states.
    """

    endpoint: Endpoint
    membership: Membership
    coordinator: RoundCoordinator
    ledger: Ledger
    counts: CheckpointCounts
    _awaited: set[PeerId] = field(default_factory=set[PeerId])
    _lacks: list[str] = field(default_factory=list[str])
    _changed: Signal = field(default_factory=Signal)

    def receive(self, event: Received) -> bool:
        """Take a mirror's word."""
        kept = event.message
        if not isinstance(kept, LastKept):
            return False
        if event.peer in self._awaited:
            self._lacks += [kept.lacks] if kept.lacks else []
            self._settle(event.peer)
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """A mirror that is lost writes nothing that is waited for."""
        if peer in self._awaited:
            self._lacks.append("its mirror was lost before it was written")
            self._settle(peer)

    async def left(self) -> None:
        """Return when the mirrors that are there have written what they can, or are silent for long."""
        with anyio.move_on_after(_SWAP_S):
            await self.coordinator.swapped()
        standing = self.coordinator.standing
        self._awaited = {mirror.peer for mirror in self.membership.view.mirrors}
        if standing is None or self.coordinator.holders is None or not self._awaited:
            return
        counts = self.counts.standing(is_last=True)
        for peer in self._awaited:
            self.endpoint.post(peer, counts)
        with anyio.move_on_after(_MOST_S):
            with anyio.move_on_after(_SAY_AFTER_S):
                await self._settled()
            if self._awaited:
                self.ledger.note(LastCheckpointAwaited(standing.record.round))
                await self._settled()
        if self._awaited:
            self._lacks.append(f"its mirror has said nothing for {_MOST_S:g} s")
        for lacks in self._lacks:
            self.ledger.note(LastCheckpointLacks(standing.record.round, lacks))

    def _settle(self, peer: PeerId) -> None:
        self._awaited.discard(peer)
        self._changed.notify()

    async def _settled(self) -> None:
        while self._awaited:
            await self._changed.wait()
