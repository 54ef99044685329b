"""The swarm's view of this process: what the registry says, corrected at once by what the data plane sees.

Roles wait on it (`changed`, `wait_for`); they never poll. A peer whose connection ended is out of the view at once,
whatever its record says, until it is connected again or signs a record that is younger than the loss. One that is
connected stays in the view if its record expires as well: where the DHT is slow or gone, a run goes on as it is. One
whose record has expired is back by it with the next connection: after a cut the DHT may take much longer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

from shoal.clock import Clock
from shoal.control.records import MAX_TTL_S, OtherVersion, StageRecord, VerifiedRecord
from shoal.control.view_builder import build_view, label_of
from shoal.events.registry import PeerOtherVersion
from shoal.ids import PeerId
from shoal.log import FloodGate
from shoal.runtime.waking import Signal
from shoal.swarm.view import PeerLabel, SwarmView
from shoal.wire.handshake import version_misfit

logger = logging.getLogger(__name__)

_MAX_LABELS = 4096
"""A peer must not fill this process's memory: beyond, what was seen first is forgotten."""
_MAX_EXPIRED = 1024
"""Likewise: of so many peers that are gone it is known where they were."""
_MAX_RECORDS = 8192
"""Nor keep it busy with records under names without end: beyond, who comes waits until others have gone."""


class Membership:
    """An observable `SwarmView`.

    Attributes:
        view: what is known now.
        clock_differences: by how much (seconds) the clocks of peers are ahead of this host's whose records are refused
            for it, and what those peers are called; see `RecordStore.clock_differences`.
        other_versions: peers whose records are of another version of the protocol, and of which; not in the view.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[tuple[PeerId, str], VerifiedRecord] = {}
        self._expired: dict[tuple[PeerId, str], VerifiedRecord] = {}
        self._lost: dict[PeerId, int] = {}
        self._connected: set[PeerId] = set()
        self.view = SwarmView()
        self._labels: dict[PeerId, PeerLabel] = {}
        self._changed = Signal()
        self.other_versions: dict[PeerId, int] = {}
        self.clock_differences: Mapping[PeerId, tuple[float, str]] = {}
        self._gate = FloodGate(logger, clock)
        self._num_eager = 0
        self._has_asked = Signal()

    @property
    def servers(self) -> tuple[VerifiedRecord, ...]:
        """The records of the servers that are in the view."""
        found = [opened for opened in self._records.values() if isinstance(opened.record, StageRecord)]
        return tuple(opened for opened in found if opened.sequence > self._lost.get(opened.peer, -1))

    def is_announced(self, peer: PeerId, since_unix_s: float = 0.0) -> bool:
        """Whether a peer announces itself as a server, also one that is lost to this process.

        Args:
            since_unix_s: it has to have done so after this time; who is connected need not.
        """
        oldest = 0 if peer in self._connected else sequence_at(since_unix_s)
        of_servers = (opened for opened in self._records.values() if isinstance(opened.record, StageRecord))
        return any(opened.peer == peer and opened.sequence > oldest for opened in of_servers)

    def clocks(self, differences: Mapping[PeerId, tuple[float, str]]) -> None:
        """Learn whose clocks differ; used by the registry."""
        if differences.keys() != self.clock_differences.keys():
            self.clock_differences = dict(differences)
            self._changed.notify()

    async def changed(self) -> SwarmView:
        """Wait for the next change; return the new view."""
        await self._changed.wait()
        return self.view

    async def wait_for(self, predicate: Callable[[SwarmView], bool]) -> SwarmView:
        """Wait, while the registry is asked often, until the view fulfils `predicate`; return that view."""
        with self.eager():
            while not predicate(self.view):
                await self.changed()
        return self.view

    @contextmanager
    def eager(self) -> Generator[None]:
        """Have the registry asked often inside of this context, because somebody waits for others to appear."""
        self._num_eager += 1
        self._has_asked.notify()
        try:
            yield
        finally:
            self._num_eager -= 1

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for a change that only the registry can tell."""
        return self._num_eager > 0

    async def until_awaited(self) -> None:
        """Wait until somebody waits; used by the registry."""
        if not self.awaited:
            await self._has_asked.wait()

    @property
    def next_expiry_unix_s(self) -> float:
        """When the next record expires if it is not renewed; infinite if there is none."""
        now_unix_s = self._clock.unix_s()
        # Those of connected peers that have expired already are not waited for.
        return min(
            (o.expires_unix_s for o in self._records.values() if o.expires_unix_s > now_unix_s), default=math.inf
        )

    def update(self, records: Iterable[VerifiedRecord]) -> None:
        """Add verified records, and put away the expired ones of peers that are not connected; used by the registry."""
        for opened in records:
            known = self._records.get((opened.peer, opened.topic))
            if known.sequence < opened.sequence if known is not None else self._has_room_for(opened.peer):
                self._records[opened.peer, opened.topic] = opened
        now_unix_s = self._clock.unix_s()
        known = self._expired | self._records
        self._records = {
            (peer, topic): opened
            for (peer, topic), opened in self._records.items()
            if opened.expires_unix_s > now_unix_s or peer in self._connected
        }
        expired = [each for each in known.items() if each[0] not in self._records]
        self._expired = dict(expired[-_MAX_EXPIRED:])
        self._forget_losses(now_unix_s)
        self._note_other_versions()
        self._note_labels()
        self._rebuild()

    def lost(self, peer: PeerId) -> None:
        """Take a peer out of the view: the connection with it ended."""
        self.unlinked(peer)
        # A record that the peer signed just before it died may still be on its way here: sequence numbers are times.
        known = [opened.sequence for (owner, _), opened in self._records.items() if owner == peer]
        self._lost[peer] = max([sequence_at(self._clock.unix_s()), *known])
        self._rebuild()

    def unlinked(self, peer: PeerId) -> None:
        """The connection with a peer ended, and it is looked for: its record is believed until it expires."""
        self._connected.discard(peer)

    def found(self, peer: PeerId) -> None:
        """Believe a peer's records, also expired ones, until it is lost: there is a connection with it."""
        self._connected.add(peer)
        expired = {each: self._expired.pop(each) for each in [*self._expired] if each[0] == peer}
        self._records = expired | self._records
        if self._lost.pop(peer, None) is not None or expired:
            self._rebuild()

    def _has_room_for(self, peer: PeerId) -> bool:
        """Whether a record under another topic is taken of a peer."""
        is_full = len(self._records) >= _MAX_RECORDS
        return not is_full or peer in self._connected or any(owner == peer for owner, _ in self._records)

    def _forget_losses(self, now_unix_s: float) -> None:
        """Forget those that no record can be alive from before: also peers are lost that somebody has made up."""
        owners = {owner for owner, _ in self._records}
        oldest = sequence_at(now_unix_s - 2 * MAX_TTL_S)
        self._lost = {peer: at for peer, at in self._lost.items() if at > oldest or peer in owners}

    def _note_other_versions(self) -> None:
        """Name a peer of another version when it appears, since it can only be upgraded by people."""
        found = {o.peer: o.record.version for o in self._records.values() if isinstance(o.record, OtherVersion)}
        for peer, version in found.items():
            if self.other_versions.get(peer) != version:
                self._gate.emit(PeerOtherVersion(peer, f"it {version_misfit(version)}"), peer)
        self.other_versions = found

    def _note_labels(self) -> None:
        """Remember what all are called, also after they are gone."""
        labels = dict(self._labels)
        for opened in sorted(self._records.values(), key=lambda o: o.sequence):
            if (label := label_of(opened.record)) is not None:
                labels.pop(opened.peer, None)
                labels[opened.peer] = label
        self._labels = dict(list(labels.items())[-_MAX_LABELS:])

    def _built(self) -> SwarmView:
        believed = (o for o in self._records.values() if o.sequence > self._lost.get(o.peer, -1))
        return build_view(believed, self._labels)

    def _rebuild(self) -> None:
        view = self._built()
        if view != self.view:
            self.view = view
            self._changed.notify()


def sequence_at(unix_s: float) -> int:
    """Return the smallest sequence number of a record that is signed at this time: milliseconds, so that restarts
    and several topics of one peer stay in order."""
    return int(unix_s * 1000)
