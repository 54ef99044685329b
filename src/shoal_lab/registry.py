"""A registry without a DHT: what one peer announces, all who watch see at once."""

from __future__ import annotations

import math
from collections.abc import Callable

from shoal.clock import Clock
from shoal.control.membership import Membership, sequence_at
from shoal.control.records import OtherVersion, Record, VerifiedRecord, topic_of
from shoal.errors import InvariantViolation
from shoal.ids import PeerId


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
        self.is_hidden: Callable[[PeerId, PeerId], bool] = lambda _watcher, _peer: False

    def watch(self, watcher: PeerId | None = None) -> Membership:
        """Return a view of its own, kept up to date from now on."""
        membership = Membership(self._clock)
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
        for watcher, membership in self._watchers:
            if watcher is None or not self.is_hidden(watcher, peer):
                membership.update([opened])


class PeerRecords:
    """One peer's end of a `LocalRegistry`."""

    def __init__(self, registry: LocalRegistry, peer: PeerId) -> None:
        """Used by `LocalRegistry.of`."""
        self._registry = registry
        self._peer = peer

    def advertise(self, record: Record) -> None:
        """Announce a record in place of the last one of the same kind."""
        self._registry.announce(self._peer, record)
