"""What a holder keeps for those who are still reading, and what a newcomer fetches next."""

from __future__ import annotations

from shoal.ids import Ballot, PeerId
from shoal.swarm.round_effects import Fetch
from shoal.swarm.state_chain import Piece, StateChain
from shoal.swarm.state_keeping import PieceKey, StateKeeping
from shoal.wire.messages.round import Record, StageHashes


def state(round: int) -> PieceKey:
    return PieceKey(f"D{round}", False)


def average(round: int) -> PieceKey:
    return PieceKey(f"D{round}", True)


def swap(keeping: StateKeeping, round: int) -> list[PieceKey]:
    return keeping.swapped(f"D{round}", round, True)


def test_without_a_newcomer_only_the_newest_state_is_held() -> None:
    keeping = StateKeeping()
    assert swap(keeping, 1) == []
    assert swap(keeping, 2) == [state(1)]
    assert not keeping.keeps(average(2))
    assert not keeping.is_followed


def test_what_is_read_is_kept_with_the_averages_since_until_nobody_has_asked_for_two_rounds() -> None:
    keeping = StateKeeping()
    swap(keeping, 1)
    keeping.asked(state(1))
    assert keeping.is_followed
    assert swap(keeping, 2) == []
    assert swap(keeping, 3) == [state(2)]
    assert all(map(keeping.keeps, (state(1), average(2), average(3), state(3))))
    assert set(swap(keeping, 4)) == {state(1), average(2), average(3), state(3)}


def test_one_older_state_and_two_averages_are_kept_or_four_averages() -> None:
    keeping = StateKeeping()
    swap(keeping, 1)
    for round in range(2, 8):
        keeping.asked(state(1) if keeping.keeps(state(1)) else average(round - 1))
        assert (
            set(swap(keeping, round))
            == {
                2: set(),
                3: {state(2)},
                4: {state(3), state(1)},
                5: {state(4)},
                6: {state(5), average(2)},
                7: {state(6), average(3)},
            }[round]
        )


def test_of_two_states_that_are_read_the_older_one_is_kept() -> None:
    keeping = StateKeeping()
    swap(keeping, 1)
    keeping.asked(state(1))
    swap(keeping, 2)
    keeping.asked(state(1))
    keeping.asked(state(2))
    assert swap(keeping, 3) == [state(2)]


def order(round: int, parameters: str = "") -> Fetch:
    record = Record("run", round, Ballot(1, PeerId("C"), 1), f"D{round - 1}", (), (), (), {})
    return Fetch(record, f"D{round}", StageHashes(parameters or f"p{round}", "m", "b"))


def test_from_a_whole_state_the_averages_lead_on() -> None:
    chain = StateChain(order(3))
    assert chain.follow(order(4))
    assert chain.piece == Piece(order(3), False)
    chain.reached()
    assert chain.piece == Piece(order(4), True)
    assert chain.follow(order(5))
    chain.reached()
    assert chain.piece == Piece(order(5), True)
    chain.reached()
    assert chain.piece is None
    assert chain.newest == order(5)


def test_a_record_of_another_chain_is_not_followed() -> None:
    chain = StateChain(order(3))
    assert not chain.follow(order(5))
    assert chain.newest == order(3)


def test_a_round_in_which_nobody_has_trained_needs_nothing() -> None:
    chain = StateChain(order(3))
    assert chain.follow(order(4, "p3"))
    chain.reached()
    assert chain.piece is None
    assert StateChain(order(4), order(4).hashes).piece is None


def test_what_nobody_keeps_is_given_up_only_if_there_is_another_way() -> None:
    chain = StateChain(order(3))
    assert not chain.is_lost(is_offered=False, is_gone=True)  # the newest: somebody may come back with it
    chain.follow(order(4))
    assert chain.is_lost(is_offered=False, is_gone=True)
    assert not chain.is_lost(is_offered=True, is_gone=True)
    assert not chain.is_lost(is_offered=False, is_gone=False)
    chain.restart()
    assert chain.piece == Piece(order(4), False)
    assert StateChain(order(4), order(3).hashes).is_lost(is_offered=False, is_gone=True)
