"""The learning rate over the steps of a run."""

from __future__ import annotations

import subprocess
import sys
from typing import Literal

import pytest

from shoal.config.diloco import DilocoConfig
from shoal.errors import ConfigError
from shoal.optim.schedule import LrSchedule


def test_warm_up_rises_linearly_and_reaches_the_peak_at_its_last_step() -> None:
    schedule = LrSchedule("constant", base_lr=0.4, warmup_steps=4)
    assert [schedule.lr(step) for step in range(6)] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_linear_decay_ends_at_the_minimum_at_the_last_step_and_stays_there() -> None:
    schedule = LrSchedule("linear", base_lr=1.0, warmup_steps=2, total_steps=7, min_lr_ratio=0.2)
    assert [schedule.lr(step) for step in range(9)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    schedule = LrSchedule("cosine", base_lr=2.0, total_steps=11, min_lr_ratio=0.1)
    assert schedule.lr(0) == 2.0
    assert schedule.lr(5) == pytest.approx(1.1)
    assert schedule.lr(10) == pytest.approx(0.2)
    rates = [schedule.lr(step) for step in range(11)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("form", "decay"),
    [("linear", (0.8, 0.6, 0.4, 0.2)), ("1-sqrt", (0.6, 1.0 - 0.8 * 0.5**0.5, 1.0 - 0.8 * 0.75**0.5, 0.2))],
)
def test_wsd_stays_at_the_peak_until_its_share_of_the_steps_is_left(
    form: Literal["linear", "1-sqrt"], decay: tuple[float, ...]
) -> None:
    schedule = LrSchedule("wsd", 2.0, 2, 10, min_lr_ratio=0.2, decay_fraction=0.4, decay_form=form)
    shares = (0.5, 1.0, 1.0, 1.0, 1.0, 1.0, *decay, 0.2)
    assert [schedule.lr(step) for step in range(11)] == pytest.approx([2.0 * share for share in shares])


@pytest.mark.parametrize(("fraction", "shares"), [(1.0, (0.5, 1, 0.5, 0)), (0.01, (0.5, 1, 1, 0))])
def test_wsd_decays_for_one_step_at_least_and_not_before_its_warm_up_has_ended(
    fraction: float, shares: tuple[float, ...]
) -> None:
    schedule = LrSchedule("wsd", 1.0, 2, 4, decay_fraction=fraction, decay_form="linear")
    assert [schedule.lr(step) for step in range(4)] == pytest.approx(shares)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
@pytest.mark.parametrize("total_steps", [5, 6])
def test_a_warm_up_as_long_as_the_run_never_divides_by_zero(kind: Literal["cosine", "wsd"], total_steps: int) -> None:
    schedule = LrSchedule(kind, base_lr=1.0, warmup_steps=5, total_steps=total_steps)
    # The last step of a decay of one step has the lowest rate, and that of a decay over all steps the highest.
    assert [schedule.lr(step) for step in (4, 5, 6)] == pytest.approx([1.0, 1.0 if kind == "cosine" else 0.0, 0.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "constant", "warmup_steps": -1}, "warm-up"),
        ({"kind": "linear", "total_steps": 0}, "number of steps"),
        ({"kind": "constant", "min_lr_ratio": 1.5}, "min_lr_ratio"),
        ({"kind": "wsd", "total_steps": 5, "decay_fraction": 0.0}, "decay_fraction"),
    ],
)
def test_impossible_schedules_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LrSchedule(base_lr=1.0, **arguments)  # pyright: ignore[reportArgumentType]


def test_schedule_and_seeds_are_imported_without_torch() -> None:
    code = (
        "import sys, shoal.optim.schedule, shoal.model.seeding, shoal.model.partition; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=240).returncode == 0


def test_a_configured_wsd_has_its_share_and_form() -> None:
    form = {"type": "wsd", "warmup_steps": 1, "min_lr_ratio": 0.5, "decay_fraction": 0.5, "decay_form": "linear"}
    sections = {"inner_steps": 2, "outer_steps": 2, "lr_schedule": form, "inner_optim": {"adam_lr": 1.0}}
    schedule = LrSchedule.from_config(DilocoConfig.model_validate(sections))
    assert [schedule.lr(step) for step in range(4)] == pytest.approx([1.0, 1.0, 0.75, 0.5])
    assert LrSchedule.from_config(DilocoConfig.model_validate({"lr_schedule": {"type": "wsd"}})).decay_form == "1-sqrt"


@pytest.mark.parametrize(
    ("inner", "peak"),
    [({"type": "sgd", "sgd_lr": 0.25}, 0.25), ({"adam_lr": 0.125}, 0.125), ({"type": "muon", "muon_lr": 0.5}, 0.5)],
)
def test_a_configured_schedule_has_its_form_and_its_optimizers_peak(inner: dict[str, object], peak: float) -> None:
    form = {"type": "linear", "warmup_steps": 1, "min_lr_ratio": 0.5}
    sections = {"inner_steps": 3, "outer_steps": 2, "inner_optim": inner, "lr_schedule": form}
    schedule = LrSchedule.from_config(DilocoConfig.model_validate(sections))
    shares = (1.0, 1.0, 0.875, 0.75, 0.625, 0.5)
    assert [schedule.lr(step) for step in range(6)] == pytest.approx([peak * share for share in shares])
