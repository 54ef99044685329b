"""How many microbatches a trainer has in flight: what it takes to change that, and what bounds it."""

from __future__ import annotations

import math
import random
from collections import deque

import pytest

from shoal.ids import PeerId
from shoal.swarm.flight_window import FlightWindow, held
from shoal.swarm.microbatch_cut import MAX_MICROBATCHES

A, B, OTHER = PeerId("A"), PeerId("B"), PeerId("other")
BASE = 3
NUM = 12


def window(*rooms: int) -> FlightWindow:
    """Of a path over A and B, which have said that they hold so many."""
    made = FlightWindow(BASE)
    made.begin((A, B))
    for peer, room in zip((A, B), rooms, strict=False):
        made.opened(peer, room)
    return made


def step(
    flight: FlightWindow,
    *,
    flight_s: float,
    turn_s: float,
    path: tuple[PeerId, ...] = (A, B),
    num: int = NUM,
    rng: random.Random | None = None,
) -> float:
    """Train a step over a path that takes so long there and back, and so long for each; return the seconds."""
    flight.begin(path)
    now_s, free_s, sent = 0.0, 0.0, 0
    under_way = deque[tuple[float, int]]()
    while sent < num or under_way:
        while sent < num and flight.may_feed():
            flight.fed(now_s)
            noise = 1.0 if rng is None else rng.uniform(0.7, 1.4)
            free_s = max(now_s + flight_s * noise, free_s + turn_s * noise)
            under_way.append((free_s, sent))
            sent += 1
        now_s, microbatch = under_way.popleft()
        flight.done(microbatch, now_s)
    flight.trained()
    return now_s


def test_over_a_line_it_grows_to_what_the_path_holds_when_three_steps_have_said_so() -> None:
    flight = window(64, 64)
    lengths_s, sizes = [], []
    for _ in range(5):
        lengths_s.append(step(flight, flight_s=0.15, turn_s=0.005))
        sizes.append(flight.size)
    assert sizes == [3, 3, 31, 31, 31], "thirty turns of the line, and one more"
    assert lengths_s[0] > 0.6
    assert lengths_s[-1] == pytest.approx(0.15 + 11 * 0.005)


@pytest.mark.parametrize("turn_s", [0.001, 0.02, 5.0])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_where_computing_takes_the_time_it_stays_as_it_is(turn_s: float, stages: int) -> None:
    flight = window(64, 64)
    for _ in range(10):
        step(flight, flight_s=stages * turn_s, turn_s=turn_s)
        assert flight.size == BASE


def test_what_is_back_within_milliseconds_has_crossed_no_line() -> None:
    flight = window(64, 64)
    for _ in range(10):
        step(flight, flight_s=0.009, turn_s=0.0)
    assert flight.size == BASE


def test_it_is_never_above_the_least_room_of_the_path_nor_below_what_it_was() -> None:
    flight = window(64, 7)
    for _ in range(4):
        step(flight, flight_s=0.15, turn_s=0.001)
    assert flight.size == 7
    flight.opened(A, 5)
    assert flight.size == 5
    flight.opened(A, 0)
    assert flight.size == BASE, "it has said no number"


def test_of_a_replica_that_has_not_said_what_it_holds_or_was_lost_since_nothing_more_is_expected() -> None:
    flight = window(64)
    for _ in range(4):
        step(flight, flight_s=0.15, turn_s=0.001)
    assert flight.size == BASE
    flight.opened(B, 64)
    assert flight.size == 64
    flight.lost(B)
    assert flight.size == BASE


def test_what_a_peer_has_said_of_one_stage_does_not_hold_for_another() -> None:
    flight = window(64, 64)
    flight.begin((B, A))
    for _ in range(4):
        step(flight, flight_s=0.15, turn_s=0.001, path=(B, A))
    assert flight.size == BASE


def test_another_path_has_to_show_anew_that_it_is_long() -> None:
    flight = window(64, 64)
    for _ in range(4):
        step(flight, flight_s=0.15, turn_s=0.001)
    assert flight.size == 64
    flight.begin((A, OTHER))
    flight.opened(OTHER, 64)
    assert flight.size == BASE


def test_one_odd_step_changes_nothing() -> None:
    flight = window(64, 64)
    for number in range(12):
        is_odd = number % 3 == 2
        step(flight, flight_s=0.5 if is_odd else 0.02, turn_s=0.01)
        assert flight.size == BASE
    for number in range(12):
        is_odd = number > 5 and number % 3 == 2
        step(flight, flight_s=0.02 if is_odd else 0.5, turn_s=0.01)
    assert flight.size == 51


def test_where_the_line_has_gone_it_is_what_it_was() -> None:
    flight = window(64, 64)
    for _ in range(4):
        step(flight, flight_s=0.15, turn_s=0.01)
    assert flight.size == 16
    for _ in range(2):
        step(flight, flight_s=0.02, turn_s=0.01)
    assert flight.size == 16
    step(flight, flight_s=0.02, turn_s=0.01)
    assert flight.size == BASE


@pytest.mark.parametrize("seed", range(20))
def test_noise_does_not_make_it_swing(seed: int) -> None:
    """Whatever the line: times that vary by half make it grow, and never shrink."""
    rng = random.Random(seed)
    flight = window(4096, 4096)
    ratio, sizes = rng.uniform(1.0, 60.0), [BASE]
    for _ in range(60):
        step(flight, flight_s=0.05 * ratio, turn_s=0.05, num=rng.randint(4, 40), rng=rng)
        sizes.append(int(flight.size))
    assert sizes == sorted(sizes)
    assert sizes[-1] <= 2 * (ratio + 1)


def test_steps_that_fit_into_the_window_say_nothing() -> None:
    flight = window(64, 64)
    for _ in range(5):
        step(flight, flight_s=0.15, turn_s=0.001, num=BASE)
    assert flight.size == BASE


def test_an_attempt_that_was_given_up_says_nothing() -> None:
    flight = window(64, 64)
    for _ in range(5):
        flight.begin((A, B))
        for _ in range(BASE):
            flight.fed(0.0)
        flight.done(0, 0.15)
        flight.trained()
    assert flight.size == BASE


def test_what_was_not_sent_is_not_done_and_nothing_is_done_twice() -> None:
    flight = window(64, 64)
    for _ in range(BASE):
        flight.fed(0.0)
    flight.done(BASE, 0.1)
    assert not flight.may_feed()
    flight.done(0, 0.1)
    flight.fed(0.1)
    flight.done(0, 0.2)
    assert not flight.may_feed()


def test_where_all_of_a_step_are_in_flight_anyway_they_are() -> None:
    flight = FlightWindow(math.inf)
    step(flight, flight_s=0.15, turn_s=0.001, num=100)
    assert flight.size == math.inf


@pytest.mark.parametrize(
    ("fed_s", "done_s", "expected"),
    [
        ([0.0] * 3, [0.625, 0.75, 0.875], 6),
        # Two at a time: the pauses between pairs are the line.
        ([0.0, 0.0, 0.625, 0.75], [0.625, 0.75, 1.25, 1.375], 6),
        ([0.0] * 3, [0.1, 0.1, 0.1], MAX_MICROBATCHES),
        ([0.0], [0.1], 1),
        ([0.0] * 3, [0.009] * 3, 1),
    ],
)
def test_what_a_path_holds_is_its_round_trip_in_turns(fed_s: list[float], done_s: list[float], expected: int) -> None:
    assert held(fed_s, done_s) == expected
