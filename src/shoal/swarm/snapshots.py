"""Snapshots on a buddy: who keeps whose, what a buddy keeps, what a replica that was started again goes on from. Pure.

A snapshot is a replica at one step boundary. Whoever goes on from it is, to everybody else, a replica that was cut off
right after this boundary and is back: the protocols of step and round know such a one already. That only holds if
nobody was told anything else in between. So these are the rules, and a simulation breaks if one is left out:

- It is used on top of exactly the state that it was trained from: that record, those hashes.
- It is that of the generation right before. One before that may have steps that the generation between has denied.
- None of its steps may have been denied by the generation that goes on from it (`AttemptLedger.resume`).
- Its content has the hash that its owner has sealed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from shoal.ids import PeerId
from shoal.swarm.view import Replica, SwarmView, hosts_of
from shoal.wire.messages.base import Hop
from shoal.wire.messages.round import StageHashes
from shoal.wire.messages.snapshot import Snapshot

CHUNK_BYTES = 1 << 18
"""Size of a chunk of a snapshot: what a step's tensor may have to wait for."""
MAX_ASKED = 4
"""Buddies that may have a snapshot: the next one is offered it when one does not take it."""


def is_due(num_commits: int, every_steps: int, cut_after: int | None = None) -> bool:
    """Whether a snapshot is made after so many commits of a round.

    Args:
        cut_after: where the replica is cut (`cut_rule`). From there on it consists of more than a snapshot has.
    """
    is_whole = cut_after is None or num_commits < cut_after
    return is_whole and every_steps > 0 and num_commits > 0 and num_commits % every_steps == 0


def buddies(view: SwarmView, me: Hop, stage: int) -> tuple[Replica, ...]:
    """The servers that may keep snapshots of a replica, best first; everybody computes the same from the same view.

    They serve other stages, so that no stage loses a replica and its snapshot to one death. Those on other hosts come
    first; then each owner has an order of its own, which keeps the load even and hardly changes when somebody comes or
    goes.
    """
    mine = hosts_of(me)

    def rank(replica: Replica) -> tuple[bool, bytes]:
        is_elsewhere = bool(mine) and bool(replica.hosts) and mine.isdisjoint(replica.hosts)
        return not is_elsewhere, hashlib.sha256(f"{me.peer} {replica.peer}".encode()).digest()

    others = (replica for replica in view.replicas if replica.stage != stage and replica.peer != me.peer)
    return tuple(sorted(others, key=rank)[:MAX_ASKED])


@dataclass(frozen=True, slots=True)
class Base:
    """The state that a round is trained from: a record, and the bytes that stand for it in one stage."""

    round: int
    record_hash: str
    hashes: StageHashes


def continues(snapshot: Snapshot, base: Base) -> bool:
    """Whether a snapshot was trained from this state."""
    return Base(snapshot.round, snapshot.record_hash, snapshot.hashes) == base


@dataclass(frozen=True, slots=True)
class _OwnerSnapshots:
    """Of one owner, with the sizes of the offers that say what they are."""

    whole: Snapshot | None = None
    whole_bytes: int = 0
    incoming: Snapshot | None = None
    incoming_bytes: int = 0


class SnapshotStore:
    """What a buddy keeps: of each owner the newest whole snapshot, and the one that is coming.

    Args:
        room_bytes: the most that the buddy keeps.
    """

    def __init__(self, stage: int, room_bytes: int) -> None:
        self._stage = stage
        self._room_bytes = room_bytes
        self._round = 0
        self._kept: dict[PeerId, _OwnerSnapshots] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes of all that is kept and coming."""
        return sum(kept.whole_bytes + kept.incoming_bytes for kept in self._kept.values())

    def offered(self, owner: PeerId, snapshot: Snapshot, offer_bytes: int = 0) -> str:
        """Consider an owner's offer; returns why it is refused, or "". An unfinished snapshot of that owner is dropped.

        Args:
            offer_bytes: memory for the offer itself, beside the content.
        """
        self.lost(owner)
        kept = self._kept.get(owner, _OwnerSnapshots())
        if snapshot.peer != owner:
            return "it is not the sender's own"
        if snapshot.stage == self._stage:
            return "its stage is served here"
        # Older ones are of no use, and later ones would not be dropped with the next record.
        if not self._round <= snapshot.round <= self._round + 1:
            return f"it is of the round after record {snapshot.round}, this server holds record {self._round}"
        # Both are there until the new one is whole.
        size, free = snapshot.num_bytes + offer_bytes, self._room_bytes - self.used_bytes
        if size > free:
            return f"it has {size} bytes, and there is room for {free}"
        self._kept[owner] = replace(kept, incoming=snapshot, incoming_bytes=size)
        return ""

    def completed(self, owner: PeerId) -> None:
        """All of what was coming is here, and has the hash that was said: it is kept now, as the only one."""
        kept = self._kept.get(owner, _OwnerSnapshots())
        if kept.incoming is not None:
            self._kept[owner] = _OwnerSnapshots(kept.incoming, kept.incoming_bytes)

    def lost(self, owner: PeerId) -> None:
        """What is coming from an owner does not come to its end."""
        kept = self._kept.pop(owner, _OwnerSnapshots())
        if kept.whole is not None:
            self._kept[owner] = _OwnerSnapshots(kept.whole, kept.whole_bytes)

    def coming(self, owner: PeerId) -> Snapshot | None:
        """What is coming from an owner."""
        return self._kept.get(owner, _OwnerSnapshots()).incoming

    def whole(self, owner: PeerId) -> Snapshot | None:
        """What is kept of an owner."""
        return self._kept.get(owner, _OwnerSnapshots()).whole

    def recorded(self, round: int) -> None:
        """The record of a round is here: what was trained before it is in it, or lost."""
        self._round = max(self._round, round)
        for owner, kept in list(self._kept.items()):
            if kept.incoming is not None and kept.incoming.round < self._round:
                self.lost(owner)
            if kept.whole is not None and kept.whole.round < self._round:
                left = self._kept.pop(owner, _OwnerSnapshots())
                if left.incoming is not None:
                    self._kept[owner] = replace(left, whole=None, whole_bytes=0)


# -- effects


@dataclass(frozen=True, slots=True)
class AskBuddy:
    """Ask a buddy for a snapshot of the generation before."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Take:
    """Get the content from those who offer it, `SnapshotSearch.givers`, and report `fetched`."""

    snapshot: Snapshot


SearchEffects = list[AskBuddy | Take]


class SnapshotSearch:
    """How a replica that was started again finds the newest snapshot of the generation before.

    asking --all have answered, or are silent--> taking --its hash is right--> found
                                                   '-- wrong, or all who have it are lost or silent
                                                       --> the next best, or nothing

    Args:
        patience_s: how long the search waits for a silent buddy.

    Attributes:
        taking: the snapshot whose content is on its way.
        found: the snapshot whose content is here.
        wake_at_s: when to call `tick` (monotonic); infinite when the search is over.
    """

    def __init__(self, peer: PeerId, stage: int, generation: int, patience_s: float) -> None:
        self._peer, self._stage, self._generation = peer, stage, generation
        self._patience_s = patience_s
        self._asked: set[PeerId] = set()
        self._offers: dict[PeerId, Snapshot] = {}
        self.taking: Snapshot | None = None
        self.found: Snapshot | None = None
        self.is_over = False
        self.wake_at_s = math.inf

    @property
    def givers(self) -> frozenset[PeerId]:
        """Who offers what is being taken."""
        return frozenset(peer for peer, snapshot in self._offers.items() if snapshot == self.taking)

    def is_settled(self, base: Base) -> bool:
        """Whether nothing that continues this state is on its way any more."""
        return self.is_over or (self.taking is not None and not continues(self.taking, base))

    def take(self, base: Base) -> Snapshot | None:
        """The replica begins to train from this state: what was found, if it continues that. Only once.

        A state from before the one that it continues is only on the way to that.
        """
        best = self.found or self.taking
        if best is not None and best.round > base.round:
            return None
        found = self.found
        self._end(None)
        return found if found is not None and continues(found, base) else None

    def begin(self, peers: Collection[PeerId], now_s: float) -> SearchEffects:
        """Ask these buddies."""
        self._asked = set(peers)
        self.wake_at_s = now_s + self._patience_s
        return [*(AskBuddy(peer) for peer in peers), *self._go_on(now_s)]

    def receive(self, peer: PeerId, message: Snapshot | None, now_s: float) -> SearchEffects:
        """A buddy has a snapshot, whose seal is this peer's own; None: it has none, or not any more."""
        of = None if message is None else (message.peer, message.stage, message.generation)
        if message is None or of != (self._peer, self._stage, self._generation - 1):
            return self.lost(peer, now_s)
        if peer not in self._asked:
            return []
        self._offers[peer] = message
        return self._go_on(now_s)

    def lost(self, peer: PeerId, now_s: float) -> SearchEffects:
        """Nothing is to be had of a buddy any more."""
        if peer not in self._asked:
            return []
        self._asked.discard(peer)
        self._offers.pop(peer, None)
        if not self.givers:
            self.taking = None
        return self._go_on(now_s)

    def progressed(self, now_s: float) -> None:
        """A part of the content has come."""
        self.wake_at_s = now_s + self._patience_s

    def fetched(self, is_right: bool, now_s: float) -> SearchEffects:
        """All of the content is here, and has the hash that was sealed, or nobody gives that."""
        if self.taking is None:
            return []
        if is_right:
            self._end(self.taking)
            return []
        effects: SearchEffects = []
        for peer in sorted(self.givers):
            effects += self.lost(peer, now_s)
        return effects

    def tick(self, now_s: float) -> SearchEffects:
        """Time has passed: who is silent is waited for no longer."""
        if now_s < self.wake_at_s:
            return []
        silent = self._asked - self._offers.keys() if self.taking is None else self.givers
        self.wake_at_s = now_s + self._patience_s
        effects: SearchEffects = []
        for peer in sorted(silent):
            effects += self.lost(peer, now_s)
        return effects

    def _go_on(self, now_s: float) -> SearchEffects:
        if self.is_over or self.taking is not None or self._asked - self._offers.keys():
            return []
        if not self._offers:
            self._end(None)
            return []
        self.taking = max((self._offers[peer] for peer in sorted(self._offers)), key=_age)
        self.progressed(now_s)
        return [Take(self.taking)]

    def _end(self, found: Snapshot | None) -> None:
        self.found, self.is_over, self.wake_at_s, self.taking = found, True, math.inf, None


def _age(snapshot: Snapshot) -> tuple[int, int]:
    """Orders the snapshots of one generation: which has more."""
    return snapshot.round, len(snapshot.log)
