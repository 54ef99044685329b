"""Newcomers whose links are slow, while round follows round: what holders keep, and what is fetched, put together.

A round takes as long as a link of slowness 1 needs for a whole state. A state is twice as large as the averages of a
round, as it is where buffers are few. Each newcomer has a link of its own, comes when it likes, and may be started
again.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken

from shoal.ids import Ballot, PeerId
from shoal.swarm.content_transfer import (
    AskDonor,
    ContentTransfer,
    Request,
    TransferDone,
    TransferEffect,
    TransferSettings,
    Verify,
)
from shoal.swarm.round_effects import Fetch
from shoal.swarm.state_chain import Piece, StateChain
from shoal.swarm.state_keeping import MAX_AVERAGES, PieceKey, StateKeeping
from shoal.wire.messages.round import Record, StageHashes

SLOWNESSES = (0.3, 0.9, 1.2, 1.5, 1.7)
"""How many rounds a link may need for a whole state; at 2 it would need a round for the averages of one."""
MAX_ROUNDS = 20
"""A newcomer has arrived so many rounds after it was started last, whatever the others do."""
SETTINGS = TransferSettings(window=3, retry_s=0.5, slow_s=40.0, timeout_s=10_000.0)


def order(round: int, trained_in: int) -> Fetch:
    """What a newcomer is told of D_round; where nobody has trained since, the state is that of an earlier round."""
    record = Record("run", round, Ballot(1, PeerId("C"), 1), f"D{round - 1}", (), (), (), {})
    return Fetch(record, f"D{round}", StageHashes(f"p{trained_in}", "m", "b"))


@functools.cache
def digests(key: PieceKey, num_chunks: int) -> bytes:
    return b"".join(hashlib.sha256(f"{key}/{number}".encode()).digest() for number in range(num_chunks))


class Holder:
    def __init__(self, world: SlowWorld, peer: PeerId) -> None:
        self.world, self.peer = world, peer
        self.alive = True
        self.round = 1
        self.keeping = world.keeping_class()
        self.pieces = {PieceKey("D1", False)}
        self.keeping.swapped("D1", 1, False)

    def swap(self, round: int, trained: bool) -> None:
        self.pieces.difference_update(self.keeping.swapped(f"D{round}", round, trained))
        self.round = round
        self.pieces.add(PieceKey(f"D{round}", False))
        if self.keeping.keeps(PieceKey(f"D{round}", True)):
            self.pieces.add(PieceKey(f"D{round}", True))
        size = sum(self.world.size(key) for key in self.pieces) - self.world.state_chunks
        if size > MAX_AVERAGES * self.world.average_chunks:
            raise Broken(f"a holder keeps {size} chunks beside its state of {self.world.state_chunks}")


class Newcomer:
    """One that fetches the state, over a link of its own.

    Attributes:
        arrived_in_round: When it held the newest record's state.
        started_in_round: When it was started last.
        num_restarts: How often it has begun again with a newer state.
    """

    def __init__(self, world: SlowWorld, peer: PeerId, slowness: float) -> None:
        self.world, self.peer = world, peer
        self.chunk_s = slowness
        self.arrived_in_round: int | None = None
        self.num_restarts = 0
        self._link_free_at_s = 0.0
        self.start()

    def start(self) -> None:
        """The process starts, with nothing."""
        self.started_in_round = self.world.round
        self._chain = self.world.chain_class(self.world.newest)
        self._next_piece()

    def follow(self, record: Fetch) -> None:
        """A record is committed."""
        if not self._chain.follow(record):
            raise Broken("a record does not follow the one before")
        self._check()

    def lost(self, holder: PeerId) -> None:
        """A holder has died."""
        if self._transfer is not None:
            self._do(self._transfer.lost(holder, self.world.now_s))

    def tick(self) -> None:
        if self._transfer is not None:
            self._do(self._transfer.tick(self.world.now_s))
        self._check()

    def _next_piece(self) -> None:
        self._piece: Piece | None = self._chain.piece
        self._is_gone = False
        self._transfer: ContentTransfer | None = None
        if self._piece is not None:
            self._transfer = ContentTransfer(self.world.size(self._key()), SETTINGS)
            self._do(self._transfer.peers(self.world.holders, self.world.now_s))

    def _key(self) -> PieceKey:
        assert self._piece is not None
        return PieceKey(self._piece.order.record_hash, self._piece.is_average)

    def _check(self) -> None:
        if self._transfer is not None and self._chain.is_lost(self._transfer.is_offered, self._is_gone):
            self.num_restarts += 1
            self._chain.restart()
            self._next_piece()

    def _do(self, effects: list[TransferEffect]) -> None:
        transfer, now_s = self._transfer, self.world.now_s
        for effect in effects:
            match effect:
                case AskDonor(peer):
                    self.world.at(now_s + 0.01, self._ask, transfer, peer, self._key())
                case Request(peer, chunk):
                    self.world.at(now_s + 0.01, self._read, transfer, peer, self._key(), chunk)
                case Verify():
                    self.world.at(now_s + 0.01, self._verified, transfer)
                case TransferDone():
                    self._chain.reached()
                    self._next_piece()
                    if self._piece is None:
                        self.arrived_in_round = self.world.round
                case _:
                    pass

    def _verified(self, transfer: ContentTransfer) -> None:
        if transfer is self._transfer:
            self._do(transfer.verified(True, self.world.now_s))

    def _ask(self, transfer: ContentTransfer, peer: PeerId, key: PieceKey) -> None:
        holder = self.world.holders[peer]
        if transfer is not self._transfer or not holder.alive:
            return
        if key in holder.pieces:
            holder.keeping.asked(key, self.peer)
            self._do(transfer.offered(peer, digests(key, self.world.size(key)), self.world.now_s))
        else:
            self._refuse(transfer, holder)

    def _read(self, transfer: ContentTransfer, peer: PeerId, key: PieceKey, chunk: int) -> None:
        holder, now_s = self.world.holders[peer], self.world.now_s
        if transfer is not self._transfer or not holder.alive:
            return
        if key not in holder.pieces:
            self._refuse(transfer, holder)
            return
        holder.keeping.asked(key, self.peer)
        self._link_free_at_s = max(self._link_free_at_s, now_s) + self.chunk_s
        self.world.at(self._link_free_at_s, self._receive, transfer, peer, key, chunk)

    def _refuse(self, transfer: ContentTransfer, holder: Holder) -> None:
        assert self._piece is not None
        self._is_gone |= holder.round >= self._piece.order.record.round
        self._do(transfer.refused(holder.peer, self.world.now_s))
        self._check()

    def _receive(self, transfer: ContentTransfer, peer: PeerId, key: PieceKey, chunk: int) -> None:
        if transfer is self._transfer and self.world.holders[peer].alive:
            digest = digests(key, self.world.size(key))[chunk * 32 : chunk * 32 + 32]
            self._do(transfer.received(peer, chunk, digest, self.world.now_s))


class SlowWorld:
    """One seeded run.

    Args:
        seed: Of everything that is drawn.
        slowness: Of the only newcomer's link. By default there are several, each bearable.
        chain_class: The newcomers' plan.
        keeping_class: The holders' rule.
        calm_round: A round that takes ten times as long as the others.
    """

    def __init__(
        self,
        seed: int,
        slowness: float | None = None,
        chain_class: type[StateChain] = StateChain,
        keeping_class: type[StateKeeping] = StateKeeping,
        calm_round: int = 0,
    ) -> None:
        self.network = Kernel(seed)
        self.rng = rng = self.network.rng
        self.chain_class, self.keeping_class, self.calm_round = chain_class, keeping_class, calm_round
        self.average_chunks = rng.choice((20, 40))
        self.state_chunks = self.round_s = 2 * self.average_chunks
        self.newest = order(1, 1)
        self.round = self._trained_in = 1
        self.holders = {peer: Holder(self, peer) for n in range(rng.randint(1, 3)) for peer in [PeerId(f"H{n}")]}
        self.newcomers: list[Newcomer] = []
        self._num_newcomers = rng.choice((2, 2, 3, 6)) if slowness is None else 1
        self._arrive(rng.choice(SLOWNESSES) if slowness is None else slowness)
        for number in range(1, self._num_newcomers):
            self.at(rng.uniform(0.0, 12 * self.round_s), self._arrive, rng.choice(SLOWNESSES))
            if rng.random() < 0.5:
                self.at(rng.uniform(0.0, 15 * self.round_s), self._start_again, number - 1)
        self._tick()
        self.at(rng.uniform(0.0, self.round_s), self._next_round)
        if len(self.holders) > 1:
            self.at(rng.uniform(0.0, 3 * self.round_s), self._die)

    @property
    def now_s(self) -> float:
        return self.network.now_s

    @property
    def num_restarts(self) -> int:
        """How often newcomers have begun again with a newer state."""
        return sum(newcomer.num_restarts for newcomer in self.newcomers)

    def at(self, at_s: float, call: Callable[..., object], *arguments: object) -> None:
        self.network.at(at_s, call, *arguments)

    def size(self, key: PieceKey) -> int:
        return self.average_chunks if key.is_average else self.state_chunks

    def _next_round(self) -> None:
        self.round += 1
        trained = self.rng.random() < 0.9
        if trained:
            self._trained_in = self.round
        self.newest = order(self.round, self._trained_in)
        for holder in self.holders.values():
            if holder.alive:
                holder.swap(self.round, trained)
        for newcomer in self.newcomers:
            if newcomer.arrived_in_round is None:
                newcomer.follow(self.newest)
        length = 10.0 if self.round == self.calm_round else self.rng.uniform(0.95, 1.05)
        self.at(self.now_s + self.round_s * length, self._next_round)

    def _tick(self) -> None:
        for newcomer in self.newcomers:
            newcomer.tick()
        self.at(self.now_s + SETTINGS.retry_s, self._tick)

    # -- who comes and goes

    def _arrive(self, slowness: float) -> None:
        self.newcomers.append(Newcomer(self, PeerId(f"N{len(self.newcomers)}"), slowness))

    def _start_again(self, number: int) -> None:
        """A newcomer is killed on its way, and starts again."""
        for newcomer in self.newcomers[number : number + 1]:
            if newcomer.arrived_in_round is None:
                newcomer.start()

    def _die(self) -> None:
        """One holder of several dies; what it was sending comes no more."""
        peer = self.rng.choice(sorted(self.holders))
        self.holders[peer].alive = False
        for newcomer in self.newcomers:
            newcomer.lost(peer)

    def run(self) -> int:
        """Run until all newcomers hold the newest record's state; returns in which round the last one does.

        Raises:
            Broken: One has not arrived in so many rounds.
        """
        self.network.run(1e9, lambda: self._has_ended)
        for newcomer in self.newcomers:
            if newcomer.arrived_in_round is None:
                raise Broken(
                    f"{newcomer.peer} has not arrived in {MAX_ROUNDS} rounds: {newcomer.num_restarts} times begun again"
                )
        return max(newcomer.arrived_in_round or 0 for newcomer in self.newcomers)

    @property
    def _has_ended(self) -> bool:
        waiting = [newcomer for newcomer in self.newcomers if newcomer.arrived_in_round is None]
        if not waiting:
            return len(self.newcomers) == self._num_newcomers
        return any(self.round > newcomer.started_in_round + MAX_ROUNDS for newcomer in waiting)
