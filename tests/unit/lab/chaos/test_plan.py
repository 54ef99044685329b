"""The plan of faults is a function of the seed, and stays in its bounds."""

from __future__ import annotations

from itertools import pairwise

import pytest

from shoal.errors import ConfigError
from shoal_lab.chaos.plan import HELD_S, plan_faults
from shoal_lab.faults.deaths import KINDS

ALL = tuple(KINDS)


def test_the_same_seed_plans_the_same_faults_and_another_one_others() -> None:
    first = plan_faults(7, 600.0, 15.0, ALL)
    assert first == plan_faults(7, 600.0, 15.0, ALL)
    assert first != plan_faults(8, 600.0, 15.0, ALL)


def test_a_longer_run_of_the_same_seed_begins_with_the_same_faults() -> None:
    assert plan_faults(7, 600.0, 15.0, ALL)[:8] == plan_faults(7, 120.0, 15.0, ALL)


@pytest.mark.parametrize("seed", range(20))
def test_each_interval_has_one_fault_and_two_are_half_an_interval_apart(seed: int) -> None:
    faults = plan_faults(seed, 300.0, 10.0, ALL)
    assert [fault.number for fault in faults] == list(range(30))
    assert all(fault.number * 10.0 < fault.at_s < (fault.number + 1) * 10.0 for fault in faults)
    assert min(two.at_s - one.at_s for one, two in pairwise(faults)) >= 5.0
    for fault in faults:
        assert (HELD_S[0] <= fault.held_s <= HELD_S[1]) if KINDS[fault.kind].held_s else fault.held_s == 0.0


def test_every_kind_that_is_asked_for_comes_and_no_other() -> None:
    assert {fault.kind for fault in plan_faults(1, 2000.0, 10.0, ALL)} == set(ALL)
    assert {fault.kind for fault in plan_faults(1, 200.0, 10.0, ("server", "client"))} == {"server", "client"}


@pytest.mark.parametrize(
    ("for_s", "every_s", "kinds", "message"),
    [
        (60.0, 15.0, ("server", "meteor"), "no meteor; there are server, "),
        (60.0, 15.0, (), "at least one of server, "),
        (60.0, 0.5, ALL, "at least 1s"),
        (10.0, 15.0, ALL, "at least as long as --every"),
    ],
)
def test_what_makes_no_plan_is_refused_with_a_reason(
    for_s: float, every_s: float, kinds: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_faults(0, for_s, every_s, kinds)
