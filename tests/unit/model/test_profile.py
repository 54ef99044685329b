"""Measured costs of units: which are alike, what counts, how much time and memory it may take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn

from shoal.clock import SystemClock
from shoal.errors import ConfigError
from shoal.model.gpt import GptFamily
from shoal.model.gpt_shape import GptShape
from shoal.model.profile import Profile, ProfileLimits, profile_units
from shoal.model.resnet import ResNetFamily
from shoal.model.resnet_shape import ResNetShape
from shoal.model.stage import Family, TensorSpec

CPU = torch.device("cpu")


@dataclass
class Stopwatch:
    """Seconds that pass only when a unit says so; `late_s` are added to passes in their order, over and over."""

    now_s: float = 0.0
    late_s: Sequence[float] = (0.0,)
    passes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def __call__(self) -> float:
        return self.now_s

    def spend(self, unit: int, samples: int, taken_s: float) -> None:
        self.now_s += taken_s + self.late_s[len(self.passes) % len(self.late_s)]
        self.passes.append((unit, samples))


class Unit(nn.Module):
    def __init__(self, index: int, fixed_s: float, sample_s: float, watch: Stopwatch) -> None:
        super().__init__()
        # The shape tells units apart.
        self.scale = nn.Parameter(torch.ones(index + 1))
        self.index, self.fixed_s, self.sample_s, self.watch = index, fixed_s, sample_s, watch

    def forward(self, x: Tensor) -> Tensor:
        self.watch.spend(self.index, len(x), self.fixed_s + self.sample_s * len(x))
        return x * self.scale.sum()


class Timed(Family):
    """Units that take `times[i] = (fixed, per sample)` seconds by the stopwatch, and cost what `own` says."""

    def __init__(self, times: Sequence[tuple[float, float]], watch: Stopwatch, own: Sequence[float] = ()) -> None:
        self.times, self.watch = times, watch
        self.own = list(own or [1.0] * len(times))

    @classmethod
    def from_config(cls, model: Any, data: Any) -> Self:
        raise NotImplementedError

    @property
    def num_units(self) -> int:
        return len(self.times)

    def build_unit(self, index: int) -> nn.Module:
        return Unit(index, *self.times[index], self.watch)

    def input_spec(self) -> TensorSpec:
        return TensorSpec("float32", (2,))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("int64", ())

    def boundary_spec(self, index: int) -> TensorSpec:
        return TensorSpec("float32", (2,))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return output.sum()

    def unit_costs(self) -> list[float]:
        return self.own


def _profile(family: Timed, samples: int = 8, **limits: Any) -> Profile:
    return profile_units(
        family,
        samples=samples,
        seed=1,
        device=CPU,
        clock=SystemClock(),
        limits=ProfileLimits(**limits),
        stopwatch=family.watch,
    )


def test_each_unit_costs_what_a_microbatch_of_it_takes() -> None:
    family = Timed([(0.0, 0.001), (0.008, 0.001), (0.001, 0.0)], Stopwatch())
    assert _profile(family).costs_s == pytest.approx((0.008, 0.016, 0.001))
    assert (2, 8) in family.watch.passes


def test_what_slows_some_passes_down_does_not_count() -> None:
    # Three of four passes are slow, and the turns make sure that each unit has a fast one.
    family = Timed([(0.0, 0.001), (0.0, 0.002), (0.0, 0.001)], Stopwatch(late_s=(0.5, 0.3, 0.0, 0.9)))
    assert _profile(family, budget_s=100.0, min_rounds=8).costs_s == pytest.approx((0.008, 0.016, 0.008))


def test_the_passes_of_units_take_turns() -> None:
    family = Timed([(0.0, 0.001), (0.0, 0.001)], Stopwatch())
    _profile(family, min_rounds=3, enough_s=0.0)
    assert [unit for unit, _ in family.watch.passes[-6:]] == [0, 1, 0, 1, 0, 1]


def test_a_slow_unit_is_measured_with_fewer_samples_on_the_line_through_them() -> None:
    family = Timed([(0.0, 0.001), (0.1, 0.2)], Stopwatch())
    profile = _profile(family, samples=64, budget_s=4.0)
    assert profile.costs_s == pytest.approx((0.064, 0.1 + 64 * 0.2))
    assert max(samples for unit, samples in family.watch.passes if unit == 1) < 64
    assert profile.num_estimated == 0


def test_after_the_budget_no_pass_is_begun_and_the_rest_is_estimated() -> None:
    family = Timed([(5.0, 0.0), (0.001, 0.0), (0.001, 0.0)], Stopwatch(), own=[10.0, 20.0, 5.0])
    profile = _profile(family, budget_s=2.0)
    assert family.watch.passes == [(0, 1)]
    assert profile.num_estimated == 2
    assert profile.costs_s[1:] == pytest.approx((2 * profile.costs_s[0], 0.5 * profile.costs_s[0]))


def test_units_that_do_not_fit_together_are_measured_one_after_the_other() -> None:
    family = Timed([(0.0, 0.001), (0.0, 0.003)], Stopwatch())
    profile = _profile(family, samples=8, memory_bytes=1)
    units = [unit for unit, _ in family.watch.passes]
    assert units == sorted(units)
    assert {samples for _, samples in family.watch.passes} == {1}, "no memory for more"
    assert profile.costs_s == pytest.approx((0.008, 0.024))


def _measured(family: Family, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Profile]:
    """Measure the units; return also which were built for that, one of each kind."""
    built: list[int] = []
    real: Callable[[int], nn.Module] = family.build_unit
    monkeypatch.setattr(
        family, "build_unit", lambda index: (built.append(index) if not _on_meta() else None, real(index))[1]
    )
    return built, profile_units(family, samples=2, seed=0, device=CPU, clock=SystemClock())


def test_units_that_are_alike_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    family = GptFamily(GptShape(seq_len=8, width=16, num_layers=5, num_heads=2))
    built, profile = _measured(family, monkeypatch)
    assert built == [0, 1, 6]
    assert len(set(profile.costs_s[1:6])) == 1
    assert all(cost_s > 0 for cost_s in profile.costs_s)


def _on_meta() -> bool:
    return torch.empty(0).is_meta


def test_blocks_with_other_strides_or_sizes_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    family = ResNetFamily(ResNetShape((2, 2, 2, 2), False, "cifar", num_channels=1, img_size=8, num_classes=10))
    built, _ = _measured(family, monkeypatch)
    assert len(built) == 9, "only the two blocks of the first group are alike"


class Varied(GptFamily):
    """Each block drops another share, which no shape shows."""

    def build_unit(self, index: int) -> nn.Module:
        return GptFamily(replace(self.shape, dropout=0.1 * index)).build_unit(index)


def test_blocks_with_other_settings_are_not_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    family = Varied(GptShape(seq_len=4, width=8, num_layers=3, num_heads=2))
    built, _ = _measured(family, monkeypatch)
    assert len(built) == 5


def test_torchs_generator_and_default_dtype_stay_as_they_were() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    family = GptFamily(GptShape(seq_len=8, width=16, num_layers=1, num_heads=2, dropout=0.5))
    profile_units(family, samples=2, seed=0, device=CPU, clock=SystemClock())
    assert torch.equal(torch.get_rng_state(), before)


def test_figures_that_are_no_figures_are_refused() -> None:
    family = Timed([(0.0, 0.001)] * 3, Stopwatch(), own=[1.0, 2.0])
    with pytest.raises(ConfigError, match=r"unit_costs of Timed gives \[1.0, 2.0\].*each of its 3 units"):
        _profile(family)
    family.own = [1.0, float("nan"), 1.0]
    with pytest.raises(ConfigError, match="nan"):
        _profile(family)


class Slowed(Timed):
    """Its stages take three times what their units do."""

    def assemble(self, indices: range, units: nn.ModuleDict) -> Callable[[Tensor], Tensor]:
        compute = super().assemble(indices, units)

        def slowly(x: Tensor) -> Tensor:
            for _ in range(2):
                compute(x)
            return compute(x)

        return slowly


class Located(Timed):
    """Its units need the place of each sample."""

    def context_specs(self) -> Mapping[str, TensorSpec]:
        return {"place": TensorSpec("int64", (2,))}

    def assemble(self, indices: range, units: nn.ModuleDict) -> Callable[..., Tensor]:
        compute = super().assemble(indices, units)
        return lambda x, place: compute(x + place)


def test_a_unit_is_measured_with_its_context() -> None:
    family = Located([(0.0, 0.001), (0.0, 0.002)], Stopwatch())
    assert _profile(family).costs_s == pytest.approx((0.008, 0.016))


def test_a_unit_is_measured_as_its_family_computes_over_it() -> None:
    family = Slowed([(0.0, 0.001), (0.0, 0.002)], Stopwatch())
    assert _profile(family).costs_s == pytest.approx((0.024, 0.048))
