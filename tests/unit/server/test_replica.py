"""What a replica is built of, as the configuration asks for it."""

from __future__ import annotations

import pytest
import torch

from shoal.averaging.replica_state import Contribution
from shoal.config import Config
from shoal.optim import inner
from shoal.server.replica import build_state
from shoal.trainer.baseline import PlainLoop

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


def test_replicas_and_the_plain_loop_tell_muon_which_matrices_are_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here all are said to be; those of a GPT-2 of transformers are, see `tests/unit/quant/test_targets.py`."""
    monkeypatch.setattr(inner, "_is_conv1d", lambda module: isinstance(module, torch.nn.Linear))
    optim = {"type": "muon", "muon_weight_decay": 0.0}
    sections = {"model": MODEL, "data": {"seq_len": 8}, "diloco": {"inner_optim": optim}}
    config = Config.model_validate({"device": "cpu", "model_pipeline": {"stages": 1}, **sections})
    compute, _ = build_state(config, 0, "cpu")
    other, _ = build_state(config, 0, "cpu")
    loop = PlainLoop([other.module], config.diloco.inner_optim, None, 0, 0)
    name = "units.block_0.mlp.up.weight"
    ours = [each.module.get_parameter(name) for each in (compute, other)]
    gradient = torch.randn(ours[0].shape, generator=torch.Generator().manual_seed(1))
    theirs = torch.nn.Parameter(ours[0].detach().t().clone())
    theirs.grad = gradient.t().contiguous()
    inner.InnerOptimizer([(name, theirs)], config.diloco.inner_optim).step(0.02, 0)
    for parameter in ours:
        parameter.grad = gradient.clone()
    compute.optimizer.step(0.02, 0)
    loop._apply(0.0, 0.02, 0)  # pyright: ignore[reportPrivateUsage]
    for parameter in ours:
        assert torch.equal(parameter.t(), theirs)
