"""Quantising a stage as the configuration says."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.nn.utils import parametrize

from shoal.config.quant import QuantConfig
from shoal.errors import InvariantViolation
from shoal.quant.apply import apply_quant


class _Stage(nn.Module):
    def __init__(self, stage: int = 1) -> None:
        super().__init__()
        self.stage = stage
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            block = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
        self.units = nn.ModuleDict({"block_0": block})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.units["block_0"](x)


def _config(**sections: object) -> QuantConfig:
    return QuantConfig.model_validate(sections)


def test_nothing_changes_without_a_quant_section() -> None:
    stage = _Stage()
    apply_quant(stage, None)
    assert list(stage.state_dict()) == list(_Stage().state_dict())


def test_every_convolution_and_linear_layer_gets_step_sizes_and_nothing_else_does() -> None:
    stage = _Stage()
    before = len(list(stage.parameters()))
    apply_quant(stage, _config())
    names = {name for name, _ in stage.named_parameters() if name.endswith("step")}
    assert names == {
        f"units.block_0.{i}.{part}.step" for i in (0, 3) for part in ("input_quantiser", "parametrizations.weight.0")
    }
    assert len(list(stage.parameters())) == before + 4
    out = stage(torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(1)))
    out.sum().backward()
    assert all(p.grad is not None for p in stage.parameters())


def test_inputs_and_weights_are_really_on_the_grid() -> None:
    stage = _Stage()
    plain = stage(torch.full((1, 1, 4, 4), 0.3))
    apply_quant(stage, _config(base={"weight_quant": {"num_bits": 2}, "activation_quant": "off"}))
    linear = stage.units["block_0"][3]  # pyright: ignore[reportIndexIssue]
    assert linear.weight.unique().numel() <= 4
    assert not torch.equal(stage(torch.full((1, 1, 4, 4), 0.3)), plain)
    stage = _Stage()
    apply_quant(stage, _config(base={"weight_quant": "off", "activation_quant": {"num_bits": 8}}))
    step = stage.units["block_0"][0].input_quantiser.step.item()  # pyright: ignore[reportIndexIssue]
    a, b = (stage(torch.full((1, 1, 4, 4), value)) for value in (2.1 * step, 1.9 * step))
    assert torch.equal(a, b)


def test_all_replicas_of_a_stage_start_equal_and_in_its_dtype() -> None:
    one, other = _Stage().double(), _Stage().double()
    for stage in (one, other):
        torch.rand(3)
        apply_quant(stage, _config(base={"weight_quant": {"per_channel": True}}))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert {p.dtype for p in one.parameters()} == {torch.float64}
    assert one.get_parameter("units.block_0.0.parametrizations.weight.0.step").shape == (2,)


def test_a_functional_call_uses_the_step_sizes_that_it_is_given() -> None:
    stage = _Stage()
    apply_quant(stage, _config())
    x = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    larger = {n: p * 20 if n.endswith("step") else p for n, p in stage.named_parameters()}
    assert not torch.equal(torch.func.functional_call(stage, larger, (x,)), stage(x))


def test_rules_for_another_stage_leave_this_one_alone() -> None:
    off = {"weight_quant": "off", "activation_quant": "off"}
    config = _config(base=off, rules=[{"stages": [1], "weight_quant": {"num_bits": 4}}])
    for number, expected in ((0, False), (1, True)):
        stage = _Stage(number)
        apply_quant(stage, config)
        assert any(parametrize.is_parametrized(m) for m in stage.modules()) is expected


def test_quantising_twice_is_a_bug() -> None:
    stage = _Stage()
    apply_quant(stage, _config())
    with pytest.raises(InvariantViolation, match="already"):
        apply_quant(stage, _config())


@pytest.mark.parametrize("signed", [False, True])
def test_weights_and_inputs_are_below_zero_only_where_the_scheme_is_signed(signed: bool) -> None:
    scheme = {"algo": "LearnedStepQuantizer", "num_bits": 4, "signed": signed}
    stage = _Stage()
    apply_quant(stage, _config(base={"weight_quant": scheme, "activation_quant": scheme}))
    layer = next(module for module in stage.modules() if isinstance(module, nn.Linear))
    quantised = layer.get_submodule("input_quantiser")(torch.linspace(-1.0, 1.0, 9))
    assert bool((layer.weight < 0).any()) == signed
    assert bool((quantised < 0).any()) == signed


@pytest.mark.parametrize("name", ["weight_quant", "activation_quant"])
def test_another_quantiser_than_the_only_one_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}.*algo"):
        _config(base={name: {"algo": "Other"}})
