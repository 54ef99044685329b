"""What a holder keeps for those who are still reading, and what a newcomer fetches next."""

from __future__ import annotations

import pytest

from shoal.ids import Ballot, PeerId
from shoal.swarm.round_effects import Fetch
from shoal.swarm.state_chain import Piece, StateChain
from shoal.swarm.state_keeping import PieceKey, StateKeeping, is_too_slow
from shoal.wire.messages.round import Record, StageHashes


def state(round: int) -> PieceKey:
    return PieceKey(f"D{round}", False)


def average(round: int) -> PieceKey:
    return PieceKey(f"D{round}", True)


def swap(keeping: StateKeeping, round: int) -> list[PieceKey]:
    return keeping.swapped(f"D{round}", round, True)


ONE, OTHER = PeerId("one"), PeerId("other")


def test_without_a_newcomer_only_the_newest_state_is_held() -> None:
    keeping = StateKeeping()
    assert swap(keeping, 1) == []
    assert swap(keeping, 2) == [state(1)]
    assert not keeping.keeps(average(2))
    assert not keeping.is_followed


def test_what_is_read_is_kept_with_the_averages_since_until_nobody_has_asked_for_two_rounds() -> None:
    keeping = StateKeeping()
    swap(keeping, 1)
    keeping.asked(state(1), ONE)
    assert keeping.is_followed
    assert swap(keeping, 2) == []
    assert swap(keeping, 3) == [state(2)]
    assert all(map(keeping.keeps, (state(1), average(2), average(3), state(3))))
    assert set(swap(keeping, 4)) == {state(1), average(2), average(3), state(3)}


def test_one_older_state_and_two_averages_are_kept_or_four_averages() -> None:
    keeping = StateKeeping()
    swap(keeping, 1)
    dropped = {2: set(), 3: {state(2)}, 4: {state(1), state(3)}, 5: {state(4)}}
    dropped[6] = {state(5), *map(average, (2, 3, 4, 5))}
    for round, expected in dropped.items():
        keeping.asked(state(1) if round < 4 else average(2), ONE)
        assert set(swap(keeping, round)) == expected


@pytest.mark.parametrize("num_fragments", [1, 2, 4])
def test_a_state_is_kept_for_two_rounds_of_all_parameters_however_many_fragments_that_is(
    num_fragments: int,
) -> None:
    keeping = StateKeeping(num_fragments)
    swap(keeping, 10)
    keeping.asked(state(10), ONE)
    for round in range(11, 11 + 2 * num_fragments):
        swap(keeping, round)
        assert keeping.keeps(state(10)), round
        assert not is_too_slow(False, 10, round, num_fragments)
    keeping.asked(state(10), ONE)
    swap(keeping, 11 + 2 * num_fragments)
    assert not keeping.keeps(state(10)), "the averages since take as much room as it does"
    assert is_too_slow(False, 10, 11 + 2 * num_fragments, num_fragments)


def test_of_two_states_that_are_read_the_older_one_is_kept() -> None:
    keeping = StateKeeping()
    swap(keeping, 1)
    keeping.asked(state(1), ONE)
    swap(keeping, 2)
    keeping.asked(state(1), ONE)
    keeping.asked(state(2), OTHER)
    assert swap(keeping, 3) == [state(2)]


def test_averages_that_lead_on_from_nothing_that_is_read_give_way_to_the_state_that_is() -> None:
    keeping = StateKeeping()
    swap(keeping, 1)
    for round in (2, 3, 4):
        keeping.asked(state(1) if round == 2 else average(round - 1), ONE)
        swap(keeping, round)
    keeping.asked(average(4), ONE)
    keeping.asked(state(4), OTHER)
    assert average(3) in swap(keeping, 5)
    assert all(map(keeping.keeps, (state(4), average(4), average(5))))


def test_who_reads_averages_is_not_held_up_by_one_who_came_later() -> None:
    keeping = StateKeeping()
    for round in (1, 2, 3):
        keeping.asked(state(1), ONE) if round > 1 else None
        swap(keeping, round)
    keeping.asked(average(2), ONE)
    keeping.asked(state(3), OTHER)
    assert swap(keeping, 4) == [state(1), state(3)]
    assert all(map(keeping.keeps, (average(2), average(3), average(4))))


def test_a_link_is_too_slow_if_the_piece_was_kept_for_nobody_else_as_long_as_there_is_room() -> None:
    found = [is_too_slow(is_average, 5, newest) for is_average in (False, True) for newest in (7, 8, 9)]
    assert found == [False, True, True, False, False, True]


@pytest.mark.parametrize("slowness", [0.9, 1.2, 1.5, 1.7])
@pytest.mark.parametrize("num_followed", range(6))
def test_a_second_newcomer_arrives_however_long_another_one_has_been_followed(
    slowness: float, num_followed: int
) -> None:
    """A whole state takes the link `slowness` rounds; it comes at some moment of a round."""
    for begins_at in (0.0, 0.3, 0.6, 0.9):
        assert rounds_until_it_has_arrived(slowness, num_followed, begins_at) < 13


def rounds_until_it_has_arrived(slowness: float, num_followed: int, begins_at: float) -> float:
    keeping = StateKeeping()
    swap(keeping, 1)
    for round in range(2, 2 + num_followed):
        keeping.asked(state(1) if round == 2 else average(round - 1), OTHER)
        swap(keeping, round)
    now, round = begins_at, 1 + num_followed
    chain, missing = StateChain(order(round)), slowness
    tick = 0.02
    while chain.piece is not None and now < 60:
        now += tick
        if now > round - num_followed:
            round += 1
            swap(keeping, round)
            assert chain.follow(order(round))
        key = PieceKey(chain.piece.order.record_hash, chain.piece.is_average)
        if not keeping.keeps(key):
            chain.restart()
            missing = slowness
            continue
        keeping.asked(key, ONE)
        missing -= tick
        if missing <= 0:
            chain.reached()
            missing = slowness / 2
    return now - begins_at


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
