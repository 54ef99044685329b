"""A newcomer whose link is slow, while round follows round: what holders keep, and what it fetches, put together.

A chunk takes the link one second, whoever sends it. A state is twice as large as the averages of a round, as it is
where buffers are few.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable

from tests.simulation.kernel import Kernel
from tests.simulation.safety import Broken

from shoal.ids import Ballot, PeerId
from shoal.swarm.round_effects import Fetch
from shoal.swarm.state_chain import Piece, StateChain
from shoal.swarm.state_keeping import MAX_AVERAGES, PieceKey, StateKeeping
from shoal.swarm.state_transfer import Ask, Done, Request, StateTransfer, TransferEffect, TransferSettings, Verify
from shoal.wire.messages.round import Record, StageHashes

SETTINGS = TransferSettings(window=3, retry_s=0.5, slow_s=40.0, timeout_s=10_000.0)


def order(round: int, trained: bool = True) -> Fetch:
    """What the newcomer is told of D_round; a round in which nobody has trained leaves the state as it was."""
    record = Record("run", round, Ballot(1, PeerId("C"), 1), f"D{round - 1}", (), (), (), {})
    return Fetch(record, f"D{round}", StageHashes(f"p{round if trained else round - 1}", "m", "b"))


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
        self.queue: list[tuple[PieceKey, int]] = []

    def swap(self, round: int, trained: bool) -> None:
        self.pieces.difference_update(self.keeping.swapped(f"D{round}", round, trained))
        self.round = round
        self.pieces.add(PieceKey(f"D{round}", False))
        if self.keeping.keeps(PieceKey(f"D{round}", True)):
            self.pieces.add(PieceKey(f"D{round}", True))
        size = sum(self.world.size(key) for key in self.pieces) - self.world.state_chunks
        if size > MAX_AVERAGES * self.world.average_chunks:
            raise Broken(f"a holder keeps {size} chunks beside its state of {self.world.state_chunks}")


class SlowWorld:
    """One seeded run.

    Args:
        seed: Of everything that is drawn.
        slowness: How many rounds the link needs for a whole state; drawn, and always bearable, if it is not given.
        chain_class: The newcomer's plan.
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
        slowness = rng.choice((0.3, 0.9, 1.2, 1.5, 1.7)) if slowness is None else slowness
        self.keeping_class, self.calm_round = keeping_class, calm_round
        self.average_chunks = rng.choice((20, 40))
        self.state_chunks = 2 * self.average_chunks
        self.round_s = self.state_chunks / slowness
        self.round = 1
        self.arrived_in_round: int | None = None
        self.num_restarts = 0
        self.holders = {peer: Holder(self, peer) for n in range(rng.randint(1, 3)) for peer in [PeerId(f"H{n}")]}
        self._link_free_at_s = 0.0
        self._transfer: StateTransfer | None = None
        self._piece: Piece | None = None
        self._is_gone = False
        self._chain = chain_class(order(1))
        self._next_piece()
        self._tick()
        self.at(rng.uniform(0.0, self.round_s), self._next_round)
        if len(self.holders) > 1:
            self.at(rng.uniform(0.0, 3 * self.round_s), self._die)

    # -- time

    @property
    def now_s(self) -> float:
        return self.network.now_s

    def at(self, at_s: float, call: Callable[[], object]) -> None:
        self.network.at(at_s, call)

    def size(self, key: PieceKey) -> int:
        return self.average_chunks if key.is_average else self.state_chunks

    def _next_round(self) -> None:
        self.round += 1
        trained = self.rng.random() < 0.9
        for holder in self.holders.values():
            if holder.alive:
                holder.swap(self.round, trained)
        if not self._chain.follow(order(self.round, trained)):
            raise Broken("a record does not follow the one before")
        self._check()
        length = 10.0 if self.round == self.calm_round else self.rng.uniform(0.95, 1.05)
        self.at(self.now_s + self.round_s * length, self._next_round)

    def _die(self) -> None:
        """One holder of several dies; what it was sending comes no more."""
        peer = self.rng.choice(sorted(self.holders))
        self.holders[peer].alive = False
        if self._transfer is not None:
            self._do(self._transfer.lost(peer, self.now_s))

    # -- the newcomer's driver

    def _next_piece(self) -> None:
        self._piece, self._is_gone = self._chain.piece, False
        self._transfer = None if self._piece is None else StateTransfer(self.size(self._key()), SETTINGS)
        if self._transfer is not None:
            self._do(self._transfer.peers(self.holders, self.now_s))

    def _key(self) -> PieceKey:
        assert self._piece is not None
        return PieceKey(self._piece.order.record_hash, self._piece.is_average)

    def _tick(self) -> None:
        if self._transfer is not None:
            self._do(self._transfer.tick(self.now_s))
        self._check()
        self.at(self.now_s + SETTINGS.retry_s, self._tick)

    def _check(self) -> None:
        if self._transfer is not None and self._chain.is_lost(self._transfer.is_offered, self._is_gone):
            self.num_restarts += 1
            self._chain.restart()
            self._next_piece()

    def _do(self, effects: list[TransferEffect]) -> None:
        transfer = self._transfer
        for effect in effects:
            match effect:
                case Ask(peer):
                    key = self._key()
                    self.at(self.now_s + 0.01, lambda peer=peer, key=key: self._ask(transfer, peer, key))
                case Request(peer, chunk):
                    key = self._key()
                    call = lambda peer=peer, key=key, chunk=chunk: self._read(transfer, peer, key, chunk)  # noqa: E731
                    self.at(self.now_s + 0.01, call)
                case Verify():
                    self.at(self.now_s + 0.01, lambda: self._verified(transfer))
                case Done():
                    self._chain.reached()
                    self._next_piece()
                    if self._piece is None:
                        self.arrived_in_round = self.round
                case _:
                    pass

    def _verified(self, transfer: StateTransfer | None) -> None:
        if transfer is self._transfer and transfer is not None:
            self._do(transfer.verified(True, self.now_s))

    def _ask(self, transfer: StateTransfer | None, peer: PeerId, key: PieceKey) -> None:
        holder = self.holders[peer]
        if transfer is not self._transfer or transfer is None or not holder.alive:
            return
        if key in holder.pieces:
            holder.keeping.asked(key)
            self._do(transfer.offered(peer, digests(key, self.size(key)), self.now_s))
        else:
            self._refuse(transfer, holder)

    def _read(self, transfer: StateTransfer | None, peer: PeerId, key: PieceKey, chunk: int) -> None:
        holder = self.holders[peer]
        if not holder.alive:
            return
        if key not in holder.pieces:
            if transfer is self._transfer and transfer is not None:
                self._refuse(transfer, holder)
            return
        holder.keeping.asked(key)
        self._link_free_at_s = max(self._link_free_at_s, self.now_s) + 1.0
        self.at(self._link_free_at_s, lambda: self._receive(transfer, peer, key, chunk))

    def _refuse(self, transfer: StateTransfer, holder: Holder) -> None:
        piece = self._piece
        assert piece is not None
        self._is_gone |= holder.round >= piece.order.record.round
        self._do(transfer.refused(holder.peer, self.now_s))
        self._check()

    def _receive(self, transfer: StateTransfer | None, peer: PeerId, key: PieceKey, chunk: int) -> None:
        if transfer is self._transfer and transfer is not None and self.holders[peer].alive:
            digest = digests(key, self.size(key))[chunk * 32 : chunk * 32 + 32]
            self._do(transfer.received(peer, chunk, digest, self.now_s))

    def run(self, max_rounds: int = 60) -> int:
        """Run until the newcomer holds the newest record's state; returns in which round.

        Raises:
            Broken: It has not arrived after so many rounds.
        """
        self.network.run(1e9, lambda: self.arrived_in_round is not None or self.round > max_rounds)
        if self.arrived_in_round is None:
            raise Broken(f"nothing loaded after {max_rounds} rounds, {self.num_restarts} times begun again")
        return self.arrived_in_round
