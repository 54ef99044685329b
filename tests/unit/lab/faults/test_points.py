"""Orders of deaths at chosen points."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from shoal.config.emulation import parse_death
from shoal_lab.faults.points import OF_TRANSFER, POINTS, STEPS_APART, chosen, ordered

INNER_STEPS = 40


def test_each_point_comes_as_often_as_its_role_is_to_die() -> None:
    assert chosen(POINTS, "") == list(POINTS)
    found = Counter(chosen(POINTS, "trainer=3,data_server=7"))
    assert {found[point] for point in POINTS if point.startswith("trainer@")} == {3}
    assert {found[point] for point in POINTS if point.startswith("server@")} == {1}
    assert found["data_server@lease"] == 7


@pytest.mark.parametrize(
    ("points", "times", "message"),
    [
        (["server@nowhere"], "", "no such point: server@nowhere; there are server@forward"),
        (POINTS, "client=3", "--times client=3: expected ROLE=NUMBER, ROLE one of server, trainer, data_server"),
        (POINTS, "server=many", "--times server=many"),
    ],
)
def test_what_is_no_point_and_no_number_is_said(points: list[str], times: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chosen(points, times)


@pytest.mark.parametrize("seed", range(30))
def test_the_orders_of_a_seed_are_valid_far_enough_apart_and_the_same_again(seed: int) -> None:
    def orders() -> list[str]:
        return ordered(POINTS, random.Random(seed), num_servers=5, num_slots=2, inner_steps=INNER_STEPS)

    deaths = [parse_death(text) for text in orders()]
    assert orders() == orders()
    wanted = Counter(POINTS)
    wanted["server@commit"] += len(OF_TRANSFER)
    assert Counter(f"{death.role}@{death.point}" for death in deaths) == wanted
    steps = [death.number for death in deaths if death.point in ("forward", "backward", "prepared", "commit")]
    assert all(later - earlier > STEPS_APART // 2 for earlier, later in pairwise(steps))


@pytest.mark.parametrize("seed", range(30))
def test_who_dies_in_a_transfer_is_asked_for_state_since_another_one_has_died(seed: int) -> None:
    deaths = [
        parse_death(text)
        for text in ordered(POINTS, random.Random(seed), num_servers=5, num_slots=2, inner_steps=INNER_STEPS)
    ]
    for before, death in pairwise(deaths):
        if death.point == "fetch":
            assert (before.point, before.processes) == ("commit", death.processes)
        if death.point == "donate":
            assert before.point == "commit"
            assert set(death.processes) == set(range(5))
