"""When a machine is too busy to measure."""

from __future__ import annotations

import pytest

from shoal.errors import MachineBusy
from shoal_lab.bench.busy import Calibration, cores_got, require_idle, slice_rates


def test_loops_that_get_every_core_got_all_of_them() -> None:
    assert cores_got([100.0] * 20, [100.0, 98.0]) == pytest.approx(1.98)


def test_a_machine_that_is_busy_all_the_time_is_compared_with_its_undisturbed_slices() -> None:
    # Half of the slices are cut by somebody else's turn, also while the loop runs alone.
    assert cores_got([100.0, 5.0] * 20, [50.0, 50.0]) == pytest.approx(1.0)


def test_one_slice_that_a_faster_clock_made_is_not_the_speed_of_a_core() -> None:
    assert cores_got([100.0] * 99 + [130.0], [100.0]) == pytest.approx(1.0)


@pytest.mark.parametrize("got", [1.6, 2.0, 2.1])
def test_an_idle_machine_may_be_measured(got: float) -> None:
    require_idle(Calibration(2, got), "before the measurement")


def test_a_busy_machine_is_refused_and_the_message_says_by_how_much() -> None:
    with pytest.raises(MachineBusy, match=r"after the measurement, .* 2 cores got 1\.10 cores \(55%; 80% are needed\)"):
        require_idle(Calibration(2, 1.1), "after the measurement")


def test_the_loop_runs_for_its_time_in_slices() -> None:
    rates = slice_rates(0.01)
    assert rates
    assert min(rates) > 0
