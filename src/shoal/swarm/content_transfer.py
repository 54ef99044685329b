"""How a peer gets a content by its name from those that have it: a pure machine, events in, effects out.

    donors -> AskDonor -> offered: hash of each chunk -> Request, several at a time from each -> Store ...
                 '-> refused: asked again later                                              -> Verify -> TransferDone

The name says what the whole must hash to; what the chunks must hash to is a donor's word. So a chunk that differs
from what its sender had offered convicts the sender at once and costs only itself. Offers that contradict each other
are tried in turn, the most frequent first; one whose whole is not what is named convicts all who made it.
A donor that is lost or slow is replaced in the middle; what is stored stays, whoever sent it. While one of this host
gives what is wanted, no line to another one carries any of it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.ids import PeerId

CHUNK_BYTES = 1 << 20
"""Size of a chunk of a state; the same on all replicas."""
DIGEST_BYTES = 32
"""Size of a chunk's SHA-256."""


class ChunkPlace(NamedTuple):
    """Where a chunk lies: bytes [start, stop) of a vector."""

    vector: int
    start: int
    stop: int


class ChunkPlan:
    """How vectors are cut into chunks: each vector by itself, all chunks numbered in one sequence.

    Args:
        chunk_bytes: the last chunk of a vector may be shorter.
    """

    def __init__(self, vector_bytes: Sequence[int], chunk_bytes: int) -> None:
        self._vector_bytes = tuple(vector_bytes)
        self._chunk_bytes = chunk_bytes
        self._counts = [-(-size // chunk_bytes) for size in vector_bytes]

    def __len__(self) -> int:
        return sum(self._counts)

    def __iter__(self) -> Iterator[ChunkPlace]:
        return map(self.place, range(len(self)))

    def place(self, chunk: int) -> ChunkPlace:
        """Where a chunk lies.

        Raises:
            IndexError: There is no such chunk.
        """
        left = chunk
        for vector, count in enumerate(self._counts):
            if 0 <= left < count:
                start = left * self._chunk_bytes
                return ChunkPlace(vector, start, min(start + self._chunk_bytes, self._vector_bytes[vector]))
            left -= count
        raise IndexError(f"there is no chunk {chunk}, only {len(self)}")


# -- effects


@dataclass(frozen=True, slots=True)
class AskDonor:
    """Ask a peer whether it has the content and what its chunks hash to."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Request:
    """Ask a donor for a chunk."""

    peer: PeerId
    chunk: int


@dataclass(frozen=True, slots=True)
class Store:
    """Keep the chunk that was just received, in place of what was kept for it before."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Verify:
    """All chunks are stored: compare the whole with the name, then report `verified`."""


@dataclass(frozen=True, slots=True)
class Distrust:
    """A donor's bytes are not what it or the name says: it is asked for nothing any more."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Nobody:
    """Nobody who answers has the content; reported once until somebody does."""


@dataclass(frozen=True, slots=True)
class Late:
    """It has taken too long; whoever was distrusted gets another chance."""

    num_missing: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class TransferDone:
    """What is stored is what the name says."""


TransferEffect = AskDonor | Request | Store | Verify | Distrust | Nobody | Late | TransferDone
Effects = list[TransferEffect]


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """How patient a transfer is.

    Attributes:
        window: most chunks that are requested from one donor at a time.
        retry_s: pause before a peer is asked again that does not have the content, or does not answer.
        slow_s: after this time without a chunk from a donor, the others help it.
        timeout_s: for the whole transfer, from the first offer on.
        chunk_bytes: of states; the same on all peers.
    """

    window: int = 4
    retry_s: float = 0.5
    slow_s: float = 2.0
    timeout_s: float = 600.0
    chunk_bytes: int = CHUNK_BYTES


@dataclass(slots=True)
class _Donor:
    """What is known of one peer: `offer` is None until it offers, `wrong` says why it is not believed."""

    asked_at_s: float
    answered: bool = False
    offer: bytes | None = None
    is_here: bool = False
    wrong: str = ""
    requested: dict[int, None] = field(default_factory=dict[int, None])
    active_at_s: float = 0.0
    slow: bool = False


class ContentTransfer:
    """One transfer of one content.

    Attributes:
        sources: number of chunks that came from each donor.
    """

    def __init__(self, num_chunks: int, settings: TransferSettings) -> None:
        self.sources: Counter[PeerId] = Counter()
        self._num_chunks = num_chunks
        self._settings = settings
        self._donors: dict[PeerId, _Donor] = {}
        self._offer: bytes | None = None
        self._stored: dict[int, bytes] = {}
        self._todo: deque[int] = deque()
        self._left: set[int] = set()  # chunks that are not stored as the offer says
        self._requested: Counter[int] = Counter()
        self._verifying = self._done = False
        self._nobody_reported = False
        self._deadline_s: float | None = None
        self._tick_at_s = 0.0

    @property
    def wake_at_s(self) -> float:
        """When to call `tick`; infinite when it is done."""
        return math.inf if self._done else self._tick_at_s

    @property
    def is_offered(self) -> bool:
        """Whether somebody who is believed offers the bytes now."""
        return any(donor.offer is not None for donor in self._donors.values())

    @property
    def distrusted(self) -> frozenset[PeerId]:
        """Those whose bytes were not what they had offered, or not what is named: they are asked for nothing now."""
        return frozenset(peer for peer, donor in self._donors.items() if donor.wrong)

    @property
    def offer(self) -> bytes:
        """The hashes of the chunks that are stored or wanted: of the offer that is believed now."""
        return self._offer or b""

    def is_requested(self, peer: PeerId, chunk: int) -> bool:
        """Whether this peer is to send this chunk."""
        donor = self._donors.get(peer)
        return donor is not None and chunk in donor.requested

    # -- events

    def peers(self, present: Collection[PeerId], now_s: float) -> Effects:
        """Who may have the content, to be called whenever that changes; those that are not named any more are lost."""
        effects: Effects = []
        for peer in [peer for peer in self._donors if peer not in present]:
            self._drop(peer)
            del self._donors[peer]
        for peer in sorted(present):
            if peer not in self._donors:
                self._donors[peer] = _Donor(now_s)
                effects.append(AskDonor(peer))
        return effects + self._advance(now_s)

    def offered(self, peer: PeerId, digests: bytes, now_s: float, *, is_here: bool = False) -> Effects:
        """A peer has the content.

        Args:
            digests: the SHA-256 of its chunks, one after the other.
            is_here: the peer is of this host.
        """
        donor = self._donors.get(peer)
        if donor is None or donor.wrong or donor.offer is not None:
            return []
        donor.answered = True
        if len(digests) != self._num_chunks * DIGEST_BYTES:
            size = len(digests) // DIGEST_BYTES
            return [*self._distrust(peer, f"it offers {size} chunks of {self._num_chunks}"), *self._advance(now_s)]
        donor.offer, donor.is_here, donor.active_at_s = digests, is_here, now_s
        if self._deadline_s is None:
            self._deadline_s = now_s + self._settings.timeout_s
        return self._advance(now_s)

    def refused(self, peer: PeerId, now_s: float) -> Effects:
        """A peer does not have the content, not yet or not any more."""
        donor = self._donors.get(peer)
        if donor is None:
            return []
        self._drop(peer)
        donor.answered, donor.asked_at_s = True, now_s
        return self._advance(now_s)

    def lost(self, peer: PeerId, now_s: float) -> Effects:
        """The connection to a peer has ended; if it is still named it is asked again later."""
        return self.refused(peer, now_s)

    def received(self, peer: PeerId, chunk: int, digest: bytes, now_s: float) -> Effects:
        """A chunk has come whose bytes hash to `digest`; what was not asked for is ignored."""
        donor = self._donors.get(peer)
        if donor is None or donor.offer is None or chunk not in donor.requested:
            return []
        del donor.requested[chunk]
        self._requested[chunk] -= 1
        donor.active_at_s, donor.slow = now_s, False
        effects: Effects = []
        if digest != _digest(donor.offer, chunk):
            effects += self._distrust(peer, f"chunk {chunk} does not hash to what it had offered")
        elif chunk in self._left and self._offer is not None and digest == _digest(self._offer, chunk):
            self._left.discard(chunk)
            self._stored[chunk] = digest
            self.sources[peer] += 1
            effects.append(Store(chunk))
        if chunk in self._left:
            self._todo.appendleft(chunk)
        return effects + self._advance(now_s)

    def verified(self, is_right: bool, now_s: float) -> Effects:
        """The whole is, or is not, what is named."""
        self._verifying = False
        if is_right:
            self._done = True
            return [TransferDone()]
        effects: Effects = []
        for peer, donor in sorted(self._donors.items()):
            if donor.offer is not None and donor.offer == self._offer:
                effects += self._distrust(peer, "the chunks that it offers are not those that are named")
        self._choose(None)
        return effects + self._advance(now_s)

    def tick(self, now_s: float) -> Effects:
        """Ask again, notice who is slow, notice that it has taken too long."""
        effects: Effects = []
        settings = self._settings
        if self._deadline_s is not None and now_s >= self._deadline_s and not self._verifying:
            effects.append(Late(len(self._left), self._num_chunks))
            self._deadline_s = None
            for peer, donor in self._donors.items():
                self._drop(peer)
                donor.wrong = ""
                donor.asked_at_s = now_s - settings.retry_s
        for peer, donor in sorted(self._donors.items()):
            if donor.offer is None and not donor.wrong and now_s >= donor.asked_at_s + settings.retry_s:
                donor.answered, donor.asked_at_s = True, now_s  # silence is an answer, too
                effects.append(AskDonor(peer))
            elif donor.requested and not donor.slow and now_s >= donor.active_at_s + settings.slow_s:
                donor.slow = True
                self._todo.extendleft(reversed(donor.requested))
        self._tick_at_s = now_s + min(settings.retry_s, settings.slow_s)
        return effects + self._advance(now_s)

    # -- parts

    def _advance(self, now_s: float) -> Effects:
        """Go as far as what is known allows."""
        if self._done or self._verifying:
            return []
        offers = Counter(donor.offer for donor in self._donors.values() if donor.offer is not None)
        effects: Effects = []
        if not offers and self._num_chunks:
            # What has been stored is kept: the next offer may be the same.
            if not self._nobody_reported and all(donor.answered for donor in self._donors.values()):
                self._nobody_reported = True
                effects.append(Nobody())
            return effects
        self._nobody_reported = False
        best = max(offers, key=lambda offer: (offers[offer], offer), default=b"")
        if self._offer is None or offers[best] > offers[self._offer]:
            self._choose(best)
        if not self._left:
            self._verifying = True
            return [Verify()]
        return self._assign(now_s)

    def _choose(self, offer: bytes | None) -> None:
        """Work towards an offer; of what is stored the chunks that it has too count."""
        self._offer = offer
        if offer is not None:
            self._left = {n for n in range(self._num_chunks) if self._stored.get(n) != _digest(offer, n)}
            self._todo = deque(chunk for chunk in range(self._num_chunks) if chunk in self._left)

    def _assign(self, now_s: float) -> Effects:
        """Request chunks that are missing: from whoever has least to do, slow donors last, those of other hosts only if
        none of this one does."""
        effects: Effects = []
        donors = {peer: donor for peer, donor in self._donors.items() if donor.offer is not None}
        here = {peer: donor for peer, donor in donors.items() if donor.is_here and donor.offer == self._offer}
        if any(not donor.slow for donor in here.values()):
            donors = here
        while self._todo:
            ranked = sorted(
                (donor.slow, len(donor.requested), peer)
                for peer, donor in donors.items()
                if len(donor.requested) < (1 if donor.slow else self._settings.window)
            )
            pairs = ((peer, self._next_for(self._donors[peer])) for _, _, peer in ranked)
            request = next((Request(peer, chunk) for peer, chunk in pairs if chunk is not None), None)
            if request is None:
                break
            donor = self._donors[request.peer]
            if not donor.requested:
                donor.active_at_s = now_s
            donor.requested[request.chunk] = None
            self._requested[request.chunk] += 1
            effects.append(request)
        return effects

    def _next_for(self, donor: _Donor) -> int | None:
        """Take the first chunk from the list that this donor has as the offer says, and is not asked for already."""
        passed: list[int] = []
        found: int | None = None
        while self._todo and found is None:
            chunk = self._todo.popleft()
            if chunk not in self._left:
                continue
            if chunk in donor.requested or not self._serves(donor, chunk):
                passed.append(chunk)
            elif not self._requested[chunk] or not donor.slow:
                found = chunk
            else:
                passed.append(chunk)  # no second slow donor for it
        self._todo.extendleft(reversed(passed))
        return found

    def _serves(self, donor: _Donor, chunk: int) -> bool:
        own, chosen = donor.offer, self._offer
        return own is not None and chosen is not None and _digest(own, chunk) == _digest(chosen, chunk)

    def _distrust(self, peer: PeerId, reason: str) -> Effects:
        self._drop(peer)
        self._donors[peer].wrong = reason
        return [Distrust(peer, reason)]

    def _drop(self, peer: PeerId) -> None:
        """A peer sends nothing any more: others are asked for what it was to send."""
        donor = self._donors[peer]
        self._todo.extendleft(reversed(donor.requested))
        self._requested.subtract(donor.requested.keys())
        donor.requested.clear()
        donor.offer, donor.slow = None, False


def _digest(offer: bytes, chunk: int) -> bytes:
    return offer[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
