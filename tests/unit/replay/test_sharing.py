"""Who computes what in a replay of several processes."""

from __future__ import annotations

import pytest

from shoal.replay.sharing import Stretch, Turn, share_generations, stretches, turns


def test_lives_that_compute_their_steps_together_come_into_one_process() -> None:
    # Two pipelines, and a few steps of a trainer that had to take the other one's second stage.
    assert share_generations({(0, 1): 60, (2, 3): 60, (0, 3): 5}, 4, 2) in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_a_single_pipeline_is_cut_between_the_processes() -> None:
    assert sorted(share_generations({(0, 1): 60}, 2, 2)) == [0, 1]
    homes = share_generations({(0, 1, 2, 3): 60}, 4, 2)
    assert len(stretches(homes)) == 2


def test_there_are_no_more_processes_than_lives_that_compute() -> None:
    assert len(set(share_generations({(0, 1): 60}, 2, 8))) == 2


def test_a_life_that_computes_nothing_is_somewhere() -> None:
    assert len(share_generations({(0, 1): 60, (3, 4): 50}, 5, 2)) == 5
    assert share_generations({}, 2, 2) == [0, 1] or set(share_generations({}, 2, 2)) <= {0, 1}


def test_a_path_is_cut_where_the_process_changes() -> None:
    assert stretches([0, 0, 1, 0]) == [Stretch(0, 0, 2), Stretch(1, 2, 3), Stretch(0, 3, 4)]
    assert stretches([1]) == [Stretch(1, 0, 1)]


def test_a_path_in_one_process_goes_all_the_way_with_each_microbatch() -> None:
    assert list(turns(1, range(3))) == [Turn(0, 0, False), Turn(0, 1, False), Turn(0, 2, False)]


@pytest.mark.parametrize("num_stretches", [2, 3, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 7])
def test_each_operation_follows_what_it_needs(num_stretches: int, num_microbatches: int) -> None:
    last = num_stretches - 1
    order = list(turns(num_stretches, range(num_microbatches)))
    place = {turn: number for number, turn in enumerate(order)}
    assert len(place) == len(order) == num_microbatches * (2 * num_stretches - 1)
    for turn in order:
        needed: list[Turn] = []
        if turn.is_backward:
            needed += [Turn(turn.stretch, turn.microbatch, False)]
            # The last one goes back at once.
            needed += [Turn(turn.stretch + 1, turn.microbatch, turn.stretch + 1 < last)]
        elif turn.stretch:
            needed += [Turn(turn.stretch - 1, turn.microbatch, False)]
        if turn.microbatch:
            # Sums of gradients, and buffers, depend on the order of the microbatches.
            needed += [turn._replace(microbatch=turn.microbatch - 1)]
        assert all(place[each] < place[turn] for each in needed), turn


def test_a_stretch_holds_few_microbatches() -> None:
    held = most = 0
    for turn in turns(3, range(9)):
        if turn.stretch == 0:
            held += -1 if turn.is_backward else 1
            most = max(most, held)
    assert (held, most) == (0, 3)
