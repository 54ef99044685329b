"""Inner optimizers."""

from __future__ import annotations

import pytest
import torch

from shoal.config.training import DilocoConfig, InnerOptimConfig
from shoal.optim.inner import build_inner_optimizer


def _parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (4,))
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]


def _set_gradients(parameters: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def test_sgd_follows_the_momentum_formula_with_the_lr_of_each_step() -> None:
    parameters = _parameters()
    config = InnerOptimConfig(type="sgd", sgd_momentum=0.8, sgd_nesterov=True)
    optimizer = build_inner_optimizer(parameters, config)
    expected = [p.detach().clone() for p in parameters]
    velocity = [torch.zeros_like(p) for p in expected]
    for step, lr in enumerate((0.1, 0.3, 0.2)):
        _set_gradients(parameters, step)
        optimizer.step(lr)
        for i, p in enumerate(parameters):
            assert p.grad is not None
            velocity[i] = 0.8 * velocity[i] + p.grad
            expected[i] = expected[i] - lr * (p.grad + 0.8 * velocity[i])
    for p, e in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), e, rtol=0, atol=1e-12)


def test_adam_follows_the_formula_and_decays_matrices_only() -> None:
    parameters = _parameters()
    optimizer = build_inner_optimizer(parameters, InnerOptimConfig(adam_weight_decay=0.5))
    start = [p.detach().clone() for p in parameters]
    _set_gradients(parameters, 1)
    optimizer.step(0.01)
    for p, before, decay in zip(parameters, start, (0.5, 0.0), strict=True):
        assert p.grad is not None
        expected = before * (1 - 0.01 * decay) - 0.01 * p.grad / (p.grad.abs() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-12)


def test_a_stage_without_parameters_and_plain_sgd_are_fine() -> None:
    build_inner_optimizer([], InnerOptimConfig()).step(0.1)
    build_inner_optimizer(_parameters(), InnerOptimConfig(type="sgd", sgd_momentum=0.0)).step(0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_give_the_bits_of_torchs_own_optimizers(dtype: torch.dtype) -> None:
    for kind in ("adam", "sgd"):
        config = InnerOptimConfig.model_validate({"type": kind})
        ours = [torch.nn.Parameter(p.detach().to(dtype)) for p in _parameters()]
        theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
        optimizer = build_inner_optimizer(ours, config)
        groups = [
            {"params": theirs[:1], "weight_decay": config.adam_weight_decay},
            {"params": theirs[1:], "weight_decay": 0.0},
        ]
        reference: torch.optim.Optimizer
        if kind == "adam":
            betas = (config.adam_betas1, config.adam_betas2)
            reference = torch.optim.AdamW(groups, lr=0.01, betas=betas, fused=True)
        else:
            reference = torch.optim.SGD(theirs, lr=0.01, momentum=config.sgd_momentum, nesterov=True, fused=True)
        for step in range(5):
            _set_gradients(ours, step)
            for mine, other in zip(ours, theirs, strict=True):
                assert mine.grad is not None
                mine.grad = mine.grad.to(dtype)
                other.grad = mine.grad.clone()
            optimizer.step(0.01)
            reference.step()
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), kind


@pytest.mark.parametrize(
    "inner_optim",
    [
        {"type": "sgd", "sgd_momentum": 0.5, "sgd_nesterov": True},
        {"type": "sgd", "sgd_momentum": 0.25, "sgd_nesterov": False},
        {"type": "adam", "adam_betas1": 0.5, "adam_betas2": 0.75, "adam_weight_decay": 0.5},
    ],
)
def test_the_configured_optimizer_is_torchs_own_with_the_same_settings(inner_optim: dict[str, object]) -> None:
    config = DilocoConfig.model_validate({"inner_optim": inner_optim}).inner_optim
    [ours, _], [theirs, _] = _parameters(), _parameters()
    optimizer = build_inner_optimizer([ours], config)
    reference: torch.optim.Optimizer
    if config.type == "adam":
        reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.5, 0.75), weight_decay=0.5)
    else:
        momentum, nesterov = float(str(inner_optim["sgd_momentum"])), bool(inner_optim["sgd_nesterov"])
        reference = torch.optim.SGD([theirs], lr=0.01, momentum=momentum, nesterov=nesterov)
    for step in range(3):
        for parameter in (ours, theirs):
            _set_gradients([parameter], step)
        optimizer.step(0.01)
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
