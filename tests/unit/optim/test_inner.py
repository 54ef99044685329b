"""Inner optimizers."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from pydantic import ValidationError

from shoal.config.diloco import DilocoConfig, InnerOptimConfig
from shoal.errors import ConfigError
from shoal.optim.inner import InnerOptimizer, group_name, require_matches
from shoal.optim.update_rules import rule_of

NAMES = ("units.first.weight", "units.last.bias")


def _parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (4,))
    return [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64)) for s in shapes]


def _built(parameters: list[torch.nn.Parameter], config: InnerOptimConfig) -> InnerOptimizer:
    return InnerOptimizer(zip(NAMES, parameters, strict=False), config)


def _set_gradients(parameters: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


def test_sgd_follows_the_momentum_formula_with_the_lr_of_each_step() -> None:
    parameters = _parameters()
    config = InnerOptimConfig(type="sgd", sgd_momentum=0.8, sgd_nesterov=True)
    optimizer = _built(parameters, config)
    expected = [p.detach().clone() for p in parameters]
    velocity = [torch.zeros_like(p) for p in expected]
    for step, lr in enumerate((0.1, 0.3, 0.2)):
        _set_gradients(parameters, step)
        optimizer.step(lr, step)
        for i, p in enumerate(parameters):
            assert p.grad is not None
            velocity[i] = 0.8 * velocity[i] + p.grad
            expected[i] = expected[i] - lr * (p.grad + 0.8 * velocity[i])
    for p, e in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.detach(), e, rtol=0, atol=1e-12)


def test_adam_follows_the_formula_and_decays_matrices_only() -> None:
    parameters = _parameters()
    optimizer = _built(parameters, InnerOptimConfig(adam_weight_decay=0.5))
    start = [p.detach().clone() for p in parameters]
    _set_gradients(parameters, 1)
    optimizer.step(0.01, 0)
    for p, before, decay in zip(parameters, start, (0.5, 0.0), strict=True):
        assert p.grad is not None
        expected = before * (1 - 0.01 * decay) - 0.01 * p.grad / (p.grad.abs() + 1e-8)
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["adam", "muon"])
def test_biases_of_several_experts_and_norms_of_several_heads_in_a_matrix_are_no_matrix(
    kind: Literal["adam", "muon"],
) -> None:
    """As GPT-OSS and Cohere of transformers have them: they are not decayed, and muon leaves them to adam."""
    shapes = {
        "units.block_0.mlp.experts.gate_up_proj_bias": (4, 6),
        "units.block_0.self_attn.q_norm.weight": (2, 3),
        "units.block_0.norm1.gain.weight": (2, 3),
        "units.block_0.mlp.router.parametrizations.weight.original": (4, 6),
    }
    parameters = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = InnerOptimizer(parameters.items(), InnerOptimConfig(type=kind, muon_except=()))
    optimizer.step(0.1, 0)
    assert [bool((parameter == 1).all()) for parameter in parameters.values()] == [True, True, False, False]
    by_muon = ["momentum_buffer" in optimizer.state[number] for number in range(4)]
    assert by_muon == [False, False, kind == "muon", kind == "muon"]


def test_a_stage_without_parameters_and_plain_sgd_are_fine() -> None:
    _built([], InnerOptimConfig()).step(0.1, 0)
    _built(_parameters(), InnerOptimConfig(type="sgd", sgd_momentum=0.0)).step(0.1, 0)


NO_EXCEPTION = InnerOptimConfig(type="muon", muon_except=())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_gives_matrices_the_bits_of_torchs_own_and_the_rest_those_of_its_adamw(
    dtype: torch.dtype, adjust_lr: Literal["original", "match_rms_adamw"], nesterov: bool
) -> None:
    config = InnerOptimConfig(
        type="muon",
        muon_lr=0.02,
        muon_momentum=0.75,
        muon_nesterov=nesterov,
        muon_weight_decay=0.5,
        muon_ns_steps=3,
        muon_adjust_lr=adjust_lr,
        muon_except=("first.embedding.*",),
        adam_lr=0.005,
        adam_weight_decay=0.25,
    )
    shapes = {
        "units.first.embedding.weight": (5, 4),
        "units.first.weight": (8, 4),
        "units.middle.weight": (3, 6),
        "units.middle.kernel": (3, 2, 2, 2),
        "units.last.bias": (4,),
    }
    generator = torch.Generator().manual_seed(0)
    ours = {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for name, shape in shapes.items()
    }
    embedding, first, middle, kernel, bias = (torch.nn.Parameter(p.detach().clone()) for p in ours.values())
    theirs = [embedding, first, middle, kernel, bias]
    of_muon = torch.optim.Muon(
        [first, middle],
        lr=0.02,
        momentum=0.75,
        nesterov=nesterov,
        weight_decay=0.5,
        ns_steps=3,
        adjust_lr_fn=adjust_lr,
    )
    groups = [{"params": [embedding, kernel], "weight_decay": 0.25}, {"params": [bias], "weight_decay": 0.0}]
    of_adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    optimizer = InnerOptimizer(ours.items(), config)
    for step, lr in enumerate((0.02, 0.01, 0.005)):
        _set_gradients(list(ours.values()), step)
        _set_gradients(theirs, step)
        for reference, own_lr in ((of_muon, lr), (of_adam, lr * (0.005 / 0.02))):
            for group in reference.param_groups:
                group["lr"] = own_lr
            reference.step()
        optimizer.step(lr, step)
    for (name, mine), other in zip(ours.items(), theirs, strict=True):
        assert torch.equal(mine, other), name
    kinds = [sorted(optimizer.state[number]) for number in range(5)]
    of_adamw = ["exp_avg", "exp_avg_sq", "step"]
    assert kinds == [of_adamw, ["momentum_buffer"], ["momentum_buffer"], of_adamw, of_adamw]
    held = sum(tensor.nbytes for state in optimizer.state.values() for tensor in state.values())
    assert optimizer.state_bytes == held


def test_muon_makes_steps_of_all_directions_equally_long() -> None:
    """Of a matrix with singular values from 1 to 1000, whatever the scale of the gradient."""
    parameter = torch.nn.Parameter(torch.zeros(8, 8))
    left, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
    parameter.grad = left @ torch.diag(torch.logspace(0, 2, 8))
    InnerOptimizer([("units.a.weight", parameter)], NO_EXCEPTION).step(1.0, 0)
    lengths = torch.linalg.svdvals(parameter.detach())
    assert lengths.min() > 0.3
    assert lengths.max() < 1.3


def test_a_group_of_a_muon_run_may_say_what_adam_does_and_what_muon_does_but_not_sgd() -> None:
    group = {"name_patterns": ["*"], "muon_lr": 0.5, "adam_lr": 0.25}
    config = InnerOptimConfig.model_validate({"type": "muon", "groups": [group]})
    assert [config.settings_of("block_0.weight", dimensions).optim.lr for dimensions in (2, 1)] == [0.5, 0.25]
    assert config.settings_of("head.weight", 2).optim.type == "adam"
    with pytest.raises(ValidationError, match=r"groups\[0\]: sgd_lr means nothing to type = muon"):
        InnerOptimConfig.model_validate({"type": "muon", "groups": [{"name_patterns": ["*"], "sgd_lr": 0.5}]})


def test_exceptions_from_muon_that_match_nothing_are_named() -> None:
    names = ["unit_0.embedding.weight", "unit_1.weight"]
    with pytest.raises(ConfigError, match=r"inner_optim\.muon_except .*\[\] if muon is to step all.*unit_0\.embedding"):
        require_matches(InnerOptimConfig(type="muon"), names)
    for config in (NO_EXCEPTION, InnerOptimConfig(type="muon", muon_except=("unit_0.*",)), InnerOptimConfig()):
        require_matches(config, names)


def test_a_torch_without_muon_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    rule_of.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"inner_optim\.type = muon: torch .* has no Muon; install torch 2\.9"):
            _built(_parameters(), NO_EXCEPTION)
    finally:
        rule_of.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_give_the_bits_of_torchs_own_optimizers(dtype: torch.dtype) -> None:
    for kind in ("adam", "sgd"):
        config = InnerOptimConfig.model_validate({"type": kind})
        ours = [torch.nn.Parameter(p.detach().to(dtype)) for p in _parameters()]
        theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
        optimizer = _built(ours, config)
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
            optimizer.step(0.01, step)
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
    optimizer = _built([ours], config)
    reference: torch.optim.Optimizer
    if config.type == "adam":
        reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.5, 0.75), weight_decay=0.5)
    else:
        momentum, nesterov = float(str(inner_optim["sgd_momentum"])), bool(inner_optim["sgd_nesterov"])
        reference = torch.optim.SGD([theirs], lr=0.01, momentum=momentum, nesterov=nesterov)
    for step in range(3):
        for parameter in (ours, theirs):
            _set_gradients([parameter], step)
        optimizer.step(0.01, step)
        reference.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


GROUPED = {
    "adam": {"adam_lr": 0.02, "adam_betas1": 0.25, "adam_betas2": 0.5, "adam_eps": 1e-3, "adam_weight_decay": 0.0},
    "sgd": {"sgd_lr": 0.02, "sgd_momentum": 0.25, "sgd_nesterov": False},
    "muon": {
        "muon_lr": 0.02,
        "muon_momentum": 0.25,
        "muon_nesterov": False,
        "muon_weight_decay": 0.0,
        "muon_ns_steps": 2,
        "muon_adjust_lr": "match_rms_adamw",
    },
}


@pytest.mark.parametrize("kind", ["adam", "sgd", "muon"])
def test_a_group_is_stepped_as_an_optimizer_of_its_own_with_its_settings_would(kind: str) -> None:
    base = {"type": kind, f"{kind}_lr": 0.01}
    group = {"name_patterns": ["fir*"], **GROUPED[kind]}
    ours, alone, others = _parameters(), _parameters(), _parameters()
    grouped = _built(ours, InnerOptimConfig.model_validate({**base, "groups": [group]}))
    own = _built(alone, InnerOptimConfig.model_validate({**base, **GROUPED[kind]}))
    plain = _built(others, InnerOptimConfig.model_validate(base))
    for step, share in enumerate((0.5, 1.0, 1.0, 0.25)):  # of a schedule
        for each in (ours, alone, others):
            _set_gradients(each, step)
        grouped.step(0.01 * share, step)
        own.step(0.02 * share, step)
        plain.step(0.01 * share, step)
    assert torch.equal(ours[0], alone[0])
    assert torch.equal(ours[1], others[1])
    assert not torch.equal(ours[0], others[0])


def test_of_groups_that_match_the_last_that_says_a_setting_counts_and_what_none_says_is_as_of_all() -> None:
    groups = [
        {"name_patterns": ["*.weight"], "adam_lr": 1.0, "adam_eps": 0.5},
        {"name_patterns": ["nothing", "first.*"], "adam_lr": 2.0, "every_steps": 3},
    ]
    config = InnerOptimConfig.model_validate({"adam_betas1": 0.25, "groups": groups})
    optim, every_steps = config.settings_of(group_name("units.first.parametrizations.weight.original"), 2)
    assert (optim.adam_lr, optim.adam_eps, optim.adam_betas1, every_steps) == (2.0, 0.5, 0.25, 3)
    assert config.settings_of("last.bias", 1) == (InnerOptimConfig(adam_betas1=0.25), 1)


def test_a_group_of_every_third_step_stays_and_has_no_state_until_its_own() -> None:
    config = InnerOptimConfig.model_validate({"groups": [{"name_patterns": ["first.*"], "every_steps": 3}]})
    parameters, alone = _parameters(), _parameters()
    optimizer, own = _built(parameters, config), _built(alone, InnerOptimConfig())
    for step in (1, 2):
        _set_gradients(parameters, step)
        optimizer.step(0.01, step)
    assert optimizer.has_state == (False, True)
    assert torch.equal(parameters[0], _parameters()[0])
    for step in (3, 4, 5, 6):
        _set_gradients(parameters, step)
        _set_gradients(alone, step)
        optimizer.step(0.01, step)
        if step % 3 == 0:
            own.step(0.01, step)
    assert torch.equal(parameters[0], alone[0])


def test_a_group_without_momentum_takes_no_memory_for_it() -> None:
    config = InnerOptimConfig.model_validate(
        {"type": "sgd", "groups": [{"name_patterns": ["first.*"], "sgd_momentum": 0.0}]}
    )
    assert _built(_parameters(), config).state_bytes == 4 * 8


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"name_patterns": []}, "at least 1 item"),
        ({"name_patterns": ["*"]}, r"groups\[0\] says nothing about"),
        ({"name_patterns": ["*"], "sgd_lr": 0.1}, r"groups\[0\]: sgd_lr means nothing to type = adam"),
    ],
)
def test_a_group_that_cannot_be_meant_is_refused(group: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        InnerOptimConfig.model_validate({"groups": [group]})


def test_a_group_that_matches_no_parameter_is_named_with_those_that_are_meant() -> None:
    groups = [{"name_patterns": ["first.*"], "adam_lr": 1.0}, {"name_patterns": ["last.biass"], "adam_lr": 1.0}]
    config = InnerOptimConfig.model_validate({"groups": groups})
    with pytest.raises(ConfigError, match=r"groups\[1\] .*last\.biass.*called like last\.bias") as caught:
        require_matches(config, ["first.weight", "last.bias"])
    assert "groups[0]" not in str(caught.value)
