"""What a replica is built of, as the configuration asks for it."""

from __future__ import annotations

import pytest
import torch

from shoal.averaging.replica_state import Contribution
from shoal.config import Config
from shoal.server.replica import build_state

MODEL = {"hidden_size": 8, "num_heads": 1, "num_layers": 2}


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_outer_step_has_the_configured_rate_and_momentum(nesterov: bool) -> None:
    outer_optim = {"sgd_lr": 0.5, "sgd_momentum": 0.25, "sgd_nesterov": nesterov}
    sections = {"model": MODEL, "data": {"seq_len": 8}, "diloco": {"outer_optim": outer_optim}}
    _, state = build_state(Config.model_validate({"device": "cpu", **sections}), 0, "cpu")
    before = state.base
    gradient = torch.ones_like(before.parameters_N)
    after = state.successor(before, Contribution(gradient, before.floats_F, before.integers_I))
    update = 1.25 if nesterov else 1.0
    torch.testing.assert_close(after.parameters_N, before.parameters_N - 0.5 * update, rtol=0, atol=1e-6)
    again = state.successor(after, Contribution(gradient, before.floats_F, before.integers_I))
    torch.testing.assert_close(again.momentum_N, 1.25 * gradient)


@pytest.mark.parametrize("inner_state", ["kept", "reset"])
def test_what_the_inner_optimizer_knows_is_kept_over_a_round_or_not_as_configured(inner_state: str) -> None:
    optim = {"type": "muon"}
    sections = {"model": MODEL, "data": {"seq_len": 8}, "diloco": {"inner_state": inner_state, "inner_optim": optim}}
    compute, state = build_state(Config.model_validate({"device": "cpu", **sections}), 0, "cpu")
    for parameter in compute.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    compute.optimizer.step(0.01, 0)
    known = {name.partition("/")[0] for name in compute.parts.inner_state()}
    assert known == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    before = state.base
    gradient = torch.ones_like(before.parameters_N)
    state.swap(state.stage(Contribution(gradient, before.floats_F, before.integers_I)))
    assert bool(compute.parts.inner_state()) == (inner_state == "kept")
