"""What a replica is made of: its snapshot and its inner state have all that the next steps and rounds depend on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.config.diloco import InnerOptimConfig
from shoal.errors import StateMismatch
from shoal.optim.inner import InnerOptimizer
from shoal.optim.parts import ReplicaParts


def parts(seed: int, *, has_residual: bool = True) -> ReplicaParts:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    made = ReplicaParts.of_module(module, InnerOptimizer(module.named_parameters(), InnerOptimConfig()), lambda: None)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    made.inner.step(0.1, 0)
    if has_residual:
        made.residual = (torch.randn(made.averaged.parameters.layout.numel),)
    return made


def test_a_snapshot_has_the_residual() -> None:
    one, other = parts(1), parts(2)
    other.restore(one.snapshot())
    assert torch.equal(one.residual[0], other.residual[0])
    assert torch.equal(one.averaged.parameters.flat(), other.averaged.parameters.flat())
    assert torch.equal(one.snapshot(), other.snapshot())


def test_the_inner_state_has_the_residual_of_each_parameter() -> None:
    one, other = parts(1), parts(2)
    state = {name: tensor.clone() for name, tensor in one.inner_state().items()}
    assert state["residual/0.weight"].shape == (2, 3)
    other.take_inner_state(state)
    assert torch.equal(one.residual[0], other.residual[0])
    assert all(torch.equal(state[name], tensor) for name, tensor in other.inner_state().items())


def test_a_residual_that_only_one_of_two_runs_keeps_is_left_behind_or_begins_with_zeros() -> None:
    with_one, without = parts(1), parts(2, has_residual=False)
    without.take_inner_state(with_one.inner_state())
    assert without.residual == ()
    taker = parts(3)
    taker.take_inner_state(parts(4, has_residual=False).inner_state())
    assert not taker.residual[0].any()


def test_a_residual_of_another_shape_is_refused_and_nothing_has_changed() -> None:
    one, other = parts(1), parts(2)
    state = dict(one.inner_state())
    state["residual/0.weight"] = torch.zeros(3, 3)
    before = other.snapshot()
    with pytest.raises(StateMismatch, match="another stage"):
        other.take_inner_state(state)
    assert torch.equal(other.snapshot(), before)
