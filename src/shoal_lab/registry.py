"""A registry without a DHT: what one peer announces, all who watch see soon."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Final

from shoal.clock import Clock
from shoal.control.membership import Membership, sequence_at
from shoal.control.records import OtherVersion, Record, VerifiedRecord, topic_of
from shoal.errors import InvariantViolation
from shoal.ids import PeerId
from shoal.swarm.view import SwarmView

_GATHERING_S: Final = 6e-6
"""For each two of those who watch: what is announced within so long is told to all of them together, as a poll of the
DHT brings it, since that costs the square of how many they are. One by one, a round of 400 would take its cube."""


def _hears_all(_watcher: PeerId, _peer: PeerId) -> bool:
    return False


class LocalRegistry:
    """The records of all peers of a cluster. They do not expire: lost connections take peers out of a view.

    Attributes:
        is_hidden: whether a watcher does not hear what a peer announces; by default it hears all. Tests replace it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sequence = 0
        self._records: dict[tuple[PeerId, str], VerifiedRecord] = {}
        self._watchers: list[tuple[PeerId | None, Membership]] = []
        self._announced: list[VerifiedRecord] = []
        self._whole, self._not_in_whole = Membership(clock), list[VerifiedRecord]()
        self.is_hidden: Callable[[PeerId, PeerId], bool] = _hears_all

    @property
    def common_view(self) -> SwarmView | None:
        """What all see who have lost nobody; None: some do not hear what others announce."""
        if self.is_hidden is not _hears_all:
            return None
        if self._not_in_whole:
            self._whole.update(self._not_in_whole)
            self._not_in_whole.clear()
        return self._whole.view

    def watch(self, watcher: PeerId | None = None) -> Membership:
        """Return a view of its own, kept up to date from now on."""
        membership = _Watcher(self._clock, self)
        membership.update(o for o in self._records.values() if watcher is None or not self.is_hidden(watcher, o.peer))
        self._watchers.append((watcher, membership))
        return membership

    def announce_all(self) -> None:
        """Everybody announces once more what was announced last, as production does every ten seconds."""
        for opened in list(self._records.values()):
            if not isinstance(opened.record, OtherVersion):
                self.announce(opened.peer, opened.record)

    def of(self, peer: PeerId) -> PeerRecords:
        """Return where a peer announces itself."""
        return PeerRecords(self, peer)

    def announce(self, peer: PeerId, record: Record) -> None:
        """Put a record in place of the peer's last one of the same kind.

        Raises:
            InvariantViolation: a `GoneRecord`.
        """
        topic = topic_of(record)
        if topic is None:
            raise InvariantViolation("peers of a cluster leave by closing their connections")
        self._sequence = max(self._sequence + 1, sequence_at(self._clock.unix_s()))
        opened = VerifiedRecord(topic, peer, self._sequence, math.inf, record)
        self._records[peer, topic] = opened
        self._not_in_whole.append(opened)
        if not self._announced:
            asyncio.get_running_loop().call_later(_GATHERING_S * len(self._watchers) ** 2, self.tell)
        self._announced.append(opened)

    def tell(self) -> None:
        """Tell all who watch what was announced since they were told last."""
        announced, self._announced = self._announced, []
        for watcher, membership in list(self._watchers):
            membership.update(o for o in announced if watcher is None or not self.is_hidden(watcher, o.peer))


class _Watcher(Membership):
    """Who has lost nobody sees what all others see, which is put together once."""

    def __init__(self, clock: Clock, registry: LocalRegistry) -> None:
        super().__init__(clock)
        self._registry = registry

    def lost(self, peer: PeerId) -> None:
        # What the peer has announced before may have a later number than this moment, and does not bring it back.
        self._registry.tell()
        super().lost(peer)

    def _built(self) -> SwarmView:
        common = None if self._lost else self._registry.common_view
        return super()._built() if common is None else common


class PeerRecords:
    """One peer's end of a `LocalRegistry`."""

    def __init__(self, registry: LocalRegistry, peer: PeerId) -> None:
        """Used by `LocalRegistry.of`."""
        self._registry = registry
        self._peer = peer

    def advertise(self, record: Record) -> None:
        """Announce a record in place of the last one of the same kind."""
        self._registry.announce(self._peer, record)
