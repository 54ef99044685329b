"""Snapshots of other replicas that are kept here, and the one that a new generation of this replica goes on from.

boundary -> SnapshotOwner -> buddy                               as an owner (`snapshot_owner`)
OfferSnapshot -> SnapshotStore -> chunks -> kept, or dropped     as a buddy
AskSnapshot -> SnapshotSearch -> chunks -> take                  as the next generation of an owner
"""

from __future__ import annotations

import hmac
import logging
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import anyio
import msgspec
from torch import Tensor

from shoal.averaging.snapshot_owner import SnapshotOwner, SnapshotSettings
from shoal.averaging.snapshot_transfer import Incoming, send_content
from shoal.clock import Clock
from shoal.errors import RemoteProtocolError
from shoal.ids import PeerId
from shoal.swarm.snapshots import AskBuddy, Base, SearchEffects, SnapshotSearch, SnapshotStore, Take, buddies
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint, Received
from shoal.wire.messages.snapshot import (
    AskSnapshot,
    NoSnapshot,
    OfferSnapshot,
    Snapshot,
    SnapshotChunk,
    SnapshotKept,
    TakeSnapshot,
)

logger = logging.getLogger(__name__)

_SEARCH_S = 2.0
"""How long a new generation waits for a buddy that is silent."""
_FIRST_ROUND_S = 5.0
"""How long it waits for a whole snapshot before D_1, when others may wait for it."""

_decoder = msgspec.msgpack.Decoder(Snapshot)


class Resumable(NamedTuple):
    """What a new generation goes on from."""

    snapshot: Snapshot
    content: Tensor


class SnapshotExchange:
    """The snapshots of one server. A `transport.dispatch.Handler`.

    Args:
        owner: Sends the replica's own snapshots.
        generation: Which replica of this peer this is, counted from its first; None: not known.
        follows: The generation before served the same stage, so a buddy may have a snapshot of it.
        view: Returns the swarm as it is now.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        stage: int,
        *,
        owner: SnapshotOwner,
        settings: SnapshotSettings,
        generation: int | None,
        follows: bool,
        view: Callable[[], SwarmView],
        clock: Clock,
    ) -> None:
        self.owner = owner
        self._endpoint = endpoint
        self._stage = stage
        self._settings = settings
        self._generation = generation or 0
        self._view = view
        self._clock = clock
        self._store = SnapshotStore(stage, settings.room_bytes)
        self._incoming: dict[PeerId, Incoming] = {}
        self._whole: dict[PeerId, Incoming] = {}
        self._requests: deque[tuple[PeerId, str]] = deque()
        self._serving: set[PeerId] = set()
        self._search = SnapshotSearch(endpoint.peer_id, stage, self._generation, _SEARCH_S) if follows else None
        self._own: Incoming | None = None
        self._changed = anyio.Event()

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
            self._own = None
            self._notify()
        return Resumable(snapshot, own.content) if snapshot is not None and own is not None else None

    def recorded(self, round: int) -> None:
        """The replica holds the record of this round: older snapshots of others are of no use any more."""
        self._store.recorded(round)
        self._whole = {owner: kept for owner, kept in self._whole.items() if self._store.whole(owner) is not None}
        self._incoming = {owner: each for owner, each in self._incoming.items() if self._store.coming(owner)}

    # -- events

    def receive(self, event: Received) -> bool:
        """Take a message about snapshots; see `transport.dispatch.Handler`.

        Raises:
            RemoteProtocolError: The peer sends what is no snapshot, or more than it has offered.
        """
        peer, message = event.peer, event.message
        match message:
            case OfferSnapshot():
                self._offered(peer, message)
            case SnapshotChunk(digest):
                self._chunk(event, digest)
            case AskSnapshot(stage, generation):
                whole = self._whole.get(peer)
                kept = None if whole is None else (whole.snapshot.stage, whole.snapshot.generation)
                is_there = kept == (stage, generation)
                self._endpoint.post(peer, whole.offer if whole and is_there else NoSnapshot("", "there is none"))
            case TakeSnapshot() | NoSnapshot() | SnapshotKept():
                if not self.owner.answered(peer, message):
                    self._asked(peer, message)
            case _:
                return False
        self._notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """See `transport.dispatch.Handler`."""
        self.owner.peer_lost(peer)
        self._incoming.pop(peer, None)
        self._store.lost(peer)
        if self._search is not None:
            self._act(self._search.refused(peer, self._clock.now_s()))
        self._notify()

    def _asked(self, peer: PeerId, message: TakeSnapshot | NoSnapshot | SnapshotKept) -> None:
        """A new generation's message to its buddy, or the answer of one."""
        if isinstance(message, TakeSnapshot) and peer not in self._serving:
            self._serving.add(peer)
            self._requests.append((peer, message.digest))
        elif isinstance(message, NoSnapshot) and self._search is not None:
            self._act(self._search.refused(peer, self._clock.now_s()))

    def _offered(self, peer: PeerId, offer: OfferSnapshot) -> None:
        try:
            snapshot = _decoder.decode(offer.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"{peer} offers what is no snapshot: {error}") from error
        search, now_s = self._search, self._clock.now_s()
        if search is not None and snapshot.peer == self._endpoint.peer_id:
            is_own = hmac.compare_digest(self._settings.seal(offer.body), offer.seal)
            if not is_own:
                logger.warning("snapshot.forged", extra={"peer": peer})
            self._act(search.offered(peer, snapshot, now_s) if is_own else search.refused(peer, now_s))
            return
        self._incoming.pop(peer, None)
        reason = self._store.offered(peer, snapshot, len(offer.body))
        if not reason:
            self._incoming[peer] = Incoming(snapshot, offer)
        self._endpoint.post(peer, NoSnapshot(snapshot.digest, reason) if reason else TakeSnapshot(snapshot.digest))

    def _chunk(self, event: Received, digest: str) -> None:
        peer, search, own = event.peer, self._search, self._own
        if search is not None and own is not None and search.taking == (peer, own.snapshot):
            search.progressed(self._clock.now_s())
            if own.snapshot.digest == digest and own.add(event):
                self._act(search.received(own.digest, self._clock.now_s()))
            return
        incoming = self._incoming.get(peer)
        # What comes late is of a snapshot that has been given up.
        if incoming is None or incoming.snapshot.digest != digest or not incoming.add(event):
            return
        del self._incoming[peer]
        if self._store.completed(peer, incoming.digest):
            self._whole[peer] = incoming
            self._endpoint.post(peer, SnapshotKept(digest))
        else:
            self._endpoint.post(peer, NoSnapshot(digest, f"its content hashes to {incoming.digest}"))

    def _act(self, effects: SearchEffects) -> None:
        for effect in effects:
            match effect:
                case AskBuddy(peer):
                    self._endpoint.post(peer, AskSnapshot(self._stage, self._generation - 1))
                case Take(peer, snapshot):
                    self._own = Incoming(snapshot, OfferSnapshot(b"", b""))
                    self._endpoint.post(peer, TakeSnapshot(snapshot.digest))

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # -- work

    async def run(self) -> None:
        """Work until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.owner.run)
            if self._search is not None:
                tasks.start_soon(self._find, self._search)
            while True:
                while self._requests:
                    tasks.start_soon(self._serve, *self._requests.popleft())
                await self._changed.wait()

    async def _find(self, search: SnapshotSearch) -> None:
        found = buddies(self._view(), self._endpoint.hop, self._stage)
        for buddy in found:
            self._endpoint.introduce(buddy.hop)
        self._act(search.begin([buddy.peer for buddy in found], self._clock.now_s()))
        self._notify()
        while search.wake_at_s is not None:
            with anyio.move_on_after(search.wake_at_s - self._clock.now_s()):
                await self._changed.wait()
            if effects := search.tick(self._clock.now_s()):
                self._act(effects)
            if search.is_over:
                self._notify()
        logger.info("snapshot.searched", extra={"stage": self._stage, "asked": len(found)})

    async def _serve(self, peer: PeerId, digest: str) -> None:
        """Send a kept snapshot back to its owner."""
        whole = self._whole.get(peer)
        if whole is None or whole.snapshot.digest != digest:
            self._endpoint.post(peer, NoSnapshot(digest, "it is not here any more"))
        else:
            await send_content(self._endpoint, peer, digest, whole.content, lambda: self._whole.get(peer) is whole)
        self._serving.discard(peer)
