"""The rules of state transfers, each left out on purpose, with the first seed that notices (`test_mutants.py`)."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulation.state.slow_world import SlowWorld
from tests.simulation.state.world import World

from shoal.ids import PeerId
from shoal.swarm.content_transfer import ContentTransfer, Effects
from shoal.swarm.round_effects import Fetch
from shoal.swarm.state_chain import StateChain
from shoal.swarm.state_keeping import MAX_AVERAGES, PieceKey, StateKeeping


class BelievesEverything(ContentTransfer):
    """Does not compare a chunk with its sender's offer."""

    def received(self, peer: PeerId, chunk: int, digest: bytes, now_s: float) -> Effects:
        donor = self._donors.get(peer)
        offered = donor.offer[chunk * 32 : chunk * 32 + 32] if donor is not None and donor.offer else digest
        return super().received(peer, chunk, offered, now_s)


class ForgetsTheLost(ContentTransfer):
    """Does not ask others for what a lost donor was to send."""

    def _drop(self, peer: PeerId) -> None:
        self._donors[peer].requested.clear()
        super()._drop(peer)


class TrustsTheOffer(ContentTransfer):
    """Takes the bytes of the most frequent offer, whatever the record says."""

    def verified(self, is_right: bool, now_s: float) -> Effects:
        return super().verified(True, now_s)


class AsksOnce(ContentTransfer):
    """Never asks again who did not hold the record, or was lost."""

    def tick(self, now_s: float) -> Effects:
        for donor in self._donors.values():
            donor.asked_at_s = now_s
        return super().tick(now_s)


class BeginsAgain(StateChain):
    """Every record replaces what is being fetched."""

    def follow(self, order: Fetch) -> bool:
        followed = super().follow(order)
        self.restart()
        return followed

    def is_lost(self, is_offered: bool, is_gone: bool) -> bool:
        return True


class KeepsNoAverages(StateKeeping):
    """Holders keep what is read, and nothing that leads on from it."""

    def _needed(self, here: dict[PieceKey, int]) -> set[PieceKey]:
        return {key for key in super()._needed(here) if not key.is_average}


class KeepsNoState(StateKeeping):
    """Holders keep averages, and only the newest state."""

    def _needed(self, here: dict[PieceKey, int]) -> set[PieceKey]:
        return {key for key in super()._needed(here) if key.is_average}


class KeepsWhatNobodyNeeds(StateKeeping):
    """While anybody reads, the newest averages come first: also those that lead on from nothing that is read."""

    def _needed(self, here: dict[PieceKey, int]) -> set[PieceKey]:
        read = {reader.key for reader in self._readers.values() if reader.key in here}
        averages = sorted((key for key in here if key.is_average), key=lambda key: here[key])
        kept = set(averages[-MAX_AVERAGES:]) if self._readers else set[PieceKey]()
        states = sorted((key for key in read if not key.is_average), key=lambda key: here[key])
        return kept | set(states[:1]) if len(kept) <= MAX_AVERAGES - 2 else kept


class NeverGivesUp(StateChain):
    """Waits for ever for what nobody keeps."""

    def is_lost(self, is_offered: bool, is_gone: bool) -> bool:
        return False


def _keeps(keeping: type[StateKeeping]) -> Callable[[int], SlowWorld]:
    return lambda seed: SlowWorld(seed, keeping_class=keeping)


MUTANTS: dict[str, tuple[Callable[[int], World | SlowWorld], int]] = {
    "BelievesEverything": (lambda seed: World(seed, BelievesEverything), 0),
    "ForgetsTheLost": (lambda seed: World(seed, ForgetsTheLost), 17),
    "TrustsTheOffer": (lambda seed: World(seed, TrustsTheOffer), 12),
    "AsksForStateOnce": (lambda seed: World(seed, AsksOnce), 106),
    "BeginsAgain": (lambda seed: SlowWorld(seed, 1.5, chain_class=BeginsAgain), 0),
    "NeverGivesUp": (lambda seed: SlowWorld(seed, 2.6, chain_class=NeverGivesUp, calm_round=12), 0),
    "KeepsNoAverages": (_keeps(KeepsNoAverages), 0),
    "KeepsNoState": (_keeps(KeepsNoState), 0),
    "KeepsWhatNobodyNeeds": (_keeps(KeepsWhatNobodyNeeds), 1),
}
