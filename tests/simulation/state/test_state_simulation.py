"""A state transfer under seeded faults: it ends with the record's bytes, and names nobody but liars."""

from __future__ import annotations

import pytest
from tests.simulation.state.world import Broken, World

from shoal.ids import PeerId
from shoal.swarm.state_transfer import Effects, StateTransfer


@pytest.mark.parametrize("block", range(4))
def test_every_transfer_ends_with_the_record_s_bytes(block: int) -> None:
    for seed in range(block * 250, (block + 1) * 250):
        try:
            World(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


class BelievesEverything(StateTransfer):
    """Does not compare a chunk with its sender's offer."""

    def received(self, peer: PeerId, chunk: int, digest: bytes, now_s: float) -> Effects:
        donor = self._donors.get(peer)
        offered = donor.offer[chunk * 32 : chunk * 32 + 32] if donor is not None and donor.offer else digest
        return super().received(peer, chunk, offered, now_s)


class ForgetsTheLost(StateTransfer):
    """Does not ask others for what a lost donor was to send."""

    def _drop(self, peer: PeerId) -> None:
        self._donors[peer].requested.clear()
        super()._drop(peer)


class TrustsTheOffer(StateTransfer):
    """Takes the bytes of the most frequent offer, whatever the record says."""

    def verified(self, is_right: bool, now_s: float) -> Effects:
        if not is_right:
            raise Broken("other bytes than the record's are loaded")
        return super().verified(is_right, now_s)


class AsksOnce(StateTransfer):
    """Never asks again who did not hold the record, or was lost."""

    def tick(self, now_s: float) -> Effects:
        for donor in self._donors.values():
            donor.asked_at_s = now_s
        return super().tick(now_s)


@pytest.mark.parametrize("mutant", [BelievesEverything, ForgetsTheLost, TrustsTheOffer, AsksOnce])
def test_leaving_a_rule_out_is_noticed(mutant: type[StateTransfer]) -> None:
    def breaks(seed: int) -> bool:
        try:
            World(seed, mutant).run()
        except Broken:
            return True
        return False

    assert any(breaks(seed) for seed in range(150))
