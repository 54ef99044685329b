"""Snapshots of other replicas that are kept here, and the one that a new generation of this replica goes on from.

boundary -> SnapshotOwner -> buddy                               as an owner (`snapshot_owner`)
OfferSnapshot -> SnapshotStore -> content -> kept, or dropped    as a buddy
AskSnapshot -> SnapshotSearch -> content -> take                 as the next generation of an owner

Contents are got as those of states are (`contents`): by a buddy from the owner, by a new generation from its buddies.
"""

from __future__ import annotations

import hmac
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import NamedTuple

import anyio
import msgspec
from torch import Tensor

from shoal.averaging.contents import Contents
from shoal.averaging.digest_fetch import DigestFetch, offered
from shoal.averaging.snapshot_owner import SnapshotOwner, SnapshotSettings
from shoal.errors import MALFORMED, RemoteProtocolError
from shoal.events.base import emit
from shoal.events.state import SnapshotForged, SnapshotSearched
from shoal.ids import PeerId
from shoal.runtime.waking import Mailbox, Signal
from shoal.swarm.snapshots import AskBuddy, Base, SnapshotSearch, SnapshotStore, Take, buddies
from shoal.swarm.view import SwarmView
from shoal.transport.base import Received
from shoal.transport.drive import drive
from shoal.wire.messages.snapshot import AskSnapshot, NoSnapshot, OfferSnapshot, Snapshot, SnapshotKept

logger = logging.getLogger(__name__)

SEARCH_S = 2.0
"""How long a new generation waits for a buddy that is silent."""
_FIRST_ROUND_S = 5.0
"""How long it waits for a whole snapshot before D_1, when others may wait for it."""

_decoder = msgspec.msgpack.Decoder(Snapshot)


class Resumable(NamedTuple):
    """What a new generation goes on from."""

    snapshot: Snapshot
    content: Tensor


class SnapshotFetch(DigestFetch):
    """A snapshot whose content is on its way, or here.

    Args:
        heard: is told of each chunk that has come.
    """

    def __init__(
        self,
        contents: Contents,
        snapshot: Snapshot,
        offer: OfferSnapshot,
        givers: Callable[[], Collection[PeerId]],
        heard: Callable[[], None] = lambda: None,
    ) -> None:
        self.snapshot = snapshot
        self.offer = offer
        super().__init__(contents, snapshot.name, snapshot.num_bytes, givers, heard)


@dataclass(eq=False, repr=False)
class SnapshotExchange:
    """The snapshots of one server. A `transport.dispatch.Handler`.

    Attributes:
        generation: Which replica of this peer this is, counted from its first; None: not known.
        follows: The generation before served the same stage, so a buddy may have a snapshot of it.
        view: Returns the swarm as it is now.
    """

    contents: Contents
    stage: int
    _: KW_ONLY
    owner: SnapshotOwner
    settings: SnapshotSettings
    generation: int | None
    follows: bool
    view: Callable[[], SwarmView]

    def __post_init__(self) -> None:
        self._endpoint = self.contents.endpoint
        self._clock = self.contents.clock
        self._generation = self.generation or 0
        self._store = SnapshotStore(self.stage, self.settings.room_bytes)
        self._whole: dict[PeerId, SnapshotFetch] = {}
        self._coming: dict[PeerId, SnapshotFetch] = {}
        me = self.contents.endpoint.peer_id
        self._search = SnapshotSearch(me, self.stage, self._generation, SEARCH_S) if self.follows else None
        self._own: SnapshotFetch | None = None
        self._jobs = Mailbox[Callable[[], Coroutine[None, None, None]]]()
        self._changed = Signal()

    # -- a new generation

    async def settled(self, base: Base) -> None:
        """Return when the snapshot that continues this state is here, or will not come."""
        if self._search is not None:
            with anyio.move_on_after(_FIRST_ROUND_S if base.round == 0 else math.inf):
                while not self._search.is_settled(base):
                    await self._changed.wait()

    def take(self, base: Base) -> Resumable | None:
        """The replica begins to train from this state: return the snapshot that continues it, if there is one, once."""
        if self._search is None:
            return None
        snapshot, own = self._search.take(base), self._own
        if self._search.is_over and self._search.found is None:
            if own is not None:
                own.cancel()
            self._own = None
            self._changed.notify()
        return Resumable(snapshot, own.content) if snapshot is not None and own is not None else None

    def recorded(self, round: int) -> None:
        """The replica holds the record of this round: snapshots of the rounds before are of no use any more."""
        self.owner.recorded()
        self._store.recorded(round)
        for owner, coming in list(self._coming.items()):
            if self._store.coming(owner) is None:
                coming.cancel()
                del self._coming[owner]
        for owner, kept in list(self._whole.items()):
            if self._store.whole(owner) is None:
                del self._whole[owner]
                self._drop(kept)

    # -- events

    def receive(self, event: Received) -> bool:
        """Take a message about snapshots; see `transport.dispatch.Handler`.

        Raises:
            RemoteProtocolError: The peer offers what is no snapshot.
        """
        peer, message = event.peer, event.message
        match message:
            case OfferSnapshot():
                self._offered(peer, message)
            case AskSnapshot(stage, generation):
                whole = self._whole.get(peer)
                kept = None if whole is None else (whole.snapshot.stage, whole.snapshot.generation)
                is_there = kept == (stage, generation)
                self._endpoint.post(peer, whole.offer if whole and is_there else NoSnapshot("", "there is none"))
            case NoSnapshot() | SnapshotKept():
                if not self.owner.answered(peer, message) and isinstance(message, NoSnapshot):
                    self._has_none(peer)
            case _:
                return False
        self._changed.notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        self.owner.peer_lost(peer)
        self._give_up(peer)
        self._has_none(peer)
        self._changed.notify()

    def _has_none(self, buddy: PeerId) -> None:
        if self._search is not None:
            self._act(self._search.lost(buddy, self._clock.now_s()))

    def _offered(self, peer: PeerId, offer: OfferSnapshot) -> None:
        try:
            snapshot = _decoder.decode(offer.body)
        except MALFORMED as error:
            raise RemoteProtocolError(f"{peer} offers what is no snapshot: {error}") from error
        search, now_s = self._search, self._clock.now_s()
        if search is not None and snapshot.peer == self._endpoint.peer_id:
            is_own = hmac.compare_digest(self.settings.seal(offer.body), offer.seal)
            if not is_own:
                emit(logger, SnapshotForged(peer))
            self._act(search.receive(peer, snapshot if is_own else None, now_s))
            return
        self._give_up(peer)
        reason = self._store.offered(peer, snapshot, len(offer.body))
        if reason:
            self._endpoint.post(peer, NoSnapshot(snapshot.digest, reason))
            return
        coming = self._coming[peer] = SnapshotFetch(self.contents, snapshot, offer, lambda: (peer,))
        self._jobs.put(partial(self._keep, peer, coming))

    def _give_up(self, owner: PeerId) -> None:
        """What is coming from an owner does not come to its end."""
        coming = self._coming.pop(owner, None)
        if coming is not None:
            coming.cancel()
        self._store.lost(owner)

    def _act(self, effects: Sequence[AskBuddy | Take]) -> None:
        for effect in effects:
            match effect:
                case AskBuddy(peer):
                    self._endpoint.post(peer, AskSnapshot(self.stage, self._generation - 1))
                case Take(snapshot):
                    self._jobs.put(partial(self._take, snapshot))
        self._changed.notify()

    # -- work

    async def run(self) -> None:
        """Work until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.owner.run)
            if self._search is not None:
                tasks.start_soon(self._find, self._search)
            async for job in self._jobs:
                tasks.start_soon(job)

    async def _keep(self, owner: PeerId, coming: SnapshotFetch) -> None:
        """Get the content of an owner's snapshot, and keep it in place of the one before."""
        is_here = await self.contents.fetch(coming)
        if self._coming.get(owner) is not coming:
            return
        digest = coming.snapshot.digest
        if not is_here:
            self._give_up(owner)
            self._endpoint.post(owner, NoSnapshot(digest, "its content is not what was said, or gone"))
            return
        del self._coming[owner]
        self._store.completed(owner)
        before = self._whole.get(owner)
        self._whole[owner] = coming
        self.contents.offer(coming.name, offered(coming.content, hashes=coming.machine.offer))
        if before is not None:
            self._drop(before)
        self._endpoint.post(owner, SnapshotKept(digest))

    def _drop(self, kept: SnapshotFetch) -> None:
        """Give a content no more, unless it is that of another replica as well."""
        if all(other.name != kept.name for other in self._whole.values()):
            self.contents.drop(kept.name)

    async def _find(self, search: SnapshotSearch) -> None:
        found = buddies(self.view(), self._endpoint.hop, self.stage)
        for buddy in found:
            self._endpoint.introduce(buddy.hop)
        self._act(search.begin([buddy.peer for buddy in found], self._clock.now_s()))
        await drive(search, self._clock, self._changed, self._act, until=lambda: search.is_over)
        if self._own is not None:
            self._own.cancel()
        emit(logger, SnapshotSearched(self.stage, len(found)))

    async def _take(self, snapshot: Snapshot) -> None:
        """Get the content of a snapshot of the generation before, in place of another one that nobody gives."""
        search = self._search
        if search is None:
            return
        if self._own is not None:
            self._own.cancel()
        offer, heard = OfferSnapshot(b"", b""), lambda: search.progressed(self._clock.now_s())
        own = self._own = SnapshotFetch(self.contents, snapshot, offer, lambda: search.givers, heard)
        is_right = await self.contents.fetch(own)
        if search.taking is snapshot:
            self._act(search.fetched(is_right, self._clock.now_s()))
