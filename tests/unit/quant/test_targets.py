"""Which modules are quantised, and along which dimensions of their weights."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.unit.model.hf.families import EXACT, TOKENS, family_of
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.config import load_config
from shoal.config.diloco import InnerOptimConfig
from shoal.config.quant import QuantConfig
from shoal.errors import ConfigError
from shoal.model.meta import units_of
from shoal.model.stage import build_stage
from shoal.optim.inner import InnerOptimizer, transposed_matrices
from shoal.quant import lsq
from shoal.quant.apply import apply_quant
from shoal.quant.coverage import require_quantisable
from shoal.quant.fold import fold_weights
from shoal.quant.lsq import weight_quantisers

PER_CHANNEL = QuantConfig.model_validate(
    {"base": {"weight_quant": {"num_bits": 4, "per_channel": True}, "activation_quant": "off"}}
)
PER_TENSOR = QuantConfig.model_validate({"base": {"weight_quant": {"num_bits": 4}, "activation_quant": "off"}})
EMBEDDINGS = {"class_names": ["Embedding"], "weight_quant": {"num_bits": 4, "per_channel": True}}


class Experts(nn.Module):
    """As those of transformers: each expert asks for its matrices."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        up, down = torch.randn(3, 10, 4, generator=generator), torch.randn(3, 4, 5, generator=generator)
        if is_transposed:
            up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        self.is_transposed = is_transposed
        self.gate_up_proj, self.down_proj = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for index in range(3):
            up, down = self.gate_up_proj[index], self.down_proj[index]
            up, down = (up.t(), down.t()) if self.is_transposed else (up, down)
            gate, value = F.linear(x, up).chunk(2, dim=-1)
            total = total + F.linear(gate.sigmoid() * value, down)
        return total


class Fails(Experts):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise ArithmeticError


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("quant", "num_steps"), [(PER_TENSOR, (3, 3)), (PER_CHANNEL, (30, 12))])
def test_experts_are_quantised_as_if_each_were_a_linear_layer(
    quant: QuantConfig, num_steps: tuple[int, int], is_transposed: bool
) -> None:
    experts = Experts(is_transposed=is_transposed)
    plain = copy.deepcopy(experts)
    apply_quant(experts, quant)
    steps = [quantiser.step for quantiser in weight_quantisers(experts).values()]
    assert [step.shape for step in steps] == [(num_steps[0],), (num_steps[1],)]
    for name in ("gate_up_proj", "down_proj"):
        for index in range(3):
            matrix = getattr(plain, name)[index].detach()
            linear = nn.Linear(1, 1)
            linear.weight = nn.Parameter((matrix.t() if is_transposed else matrix).contiguous())
            apply_quant(linear, quant)
            found = getattr(experts, name)[index]
            torch.testing.assert_close(found.t() if is_transposed else found, linear.weight)
            theirs = linear.get_submodule("parametrizations.weight.0")
            ours = weight_quantisers(experts)[name]
            assert ours.gradient_scale == pytest.approx(theirs.gradient_scale)


def test_a_forward_rounds_experts_once_and_gradients_are_those_of_rounding_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounded: list[torch.Size] = []
    quantise = lsq.lsq_quantise

    def counted(values: Tensor, *rest: Any) -> Tensor:
        rounded.append(values.shape)
        return quantise(values, *rest)

    monkeypatch.setattr(lsq, "lsq_quantise", counted)
    experts = Experts(is_transposed=False).double()
    apply_quant(experts, PER_CHANNEL)
    others = copy.deepcopy(experts)
    x = torch.randn(7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rounded.clear()
    output = experts(x)
    assert len(rounded) == 2
    output.sum().backward()
    expected = Experts.forward(others, x)
    assert len(rounded) == 2 + 3 * 2
    expected.sum().backward()
    assert torch.equal(output, expected)
    for one, other in zip(experts.parameters(), others.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-12)


def test_after_a_step_or_a_failed_forward_experts_are_rounded_anew() -> None:
    experts = Fails(is_transposed=False)
    apply_quant(experts, PER_TENSOR)
    with pytest.raises(ArithmeticError):
        experts(torch.ones(2, 4))
    before = experts.gate_up_proj.detach().clone()
    with torch.no_grad():
        experts.get_parameter("parametrizations.gate_up_proj.original").neg_()
    assert not torch.equal(experts.gate_up_proj, before)


def test_no_step_size_is_decayed_as_a_matrix_is() -> None:
    experts = Experts(is_transposed=False)
    apply_quant(experts, PER_CHANNEL)
    parameters = dict(experts.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    InnerOptimizer(parameters.items(), InnerOptimConfig(adam_weight_decay=0.5)).step(0.1, 0)
    changed = {name for name, parameter in parameters.items() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in parameters if name.endswith("original")}


def test_a_conv1d_of_transformers_has_a_step_size_for_each_of_its_columns(transformers: ModuleType) -> None:
    layer = transformers.pytorch_utils.Conv1D(6, 4)
    linear = nn.Linear(4, 6)
    with torch.no_grad():
        linear.weight.copy_(layer.weight.t())
        linear.bias.copy_(layer.bias)
    for module in (layer, linear):
        apply_quant(module, QuantConfig.model_validate({"base": {"weight_quant": {"per_channel": True}}}))
    assert torch.equal(layer.weight.t(), linear.weight)
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(x), linear(x))


@pytest.mark.parametrize("is_quantised", [False, True])
@pytest.mark.parametrize("adjust_lr", ["original", "match_rms_adamw"])
def test_muon_steps_a_conv1d_of_transformers_as_the_linear_module_with_the_same_matrix(
    adjust_lr: str, is_quantised: bool, transformers: ModuleType
) -> None:
    config = InnerOptimConfig.model_validate({"type": "muon", "muon_except": (), "muon_adjust_lr": adjust_lr})
    layer, linear = transformers.pytorch_utils.Conv1D(12, 4), nn.Linear(4, 12)
    with torch.no_grad():
        linear.weight.copy_(layer.weight.t())
    found: list[Tensor] = []
    for module in (layer, linear):
        stage = nn.ModuleDict({"units": nn.ModuleDict({"block_0": nn.ModuleDict({"up": module})})})
        if is_quantised:
            apply_quant(stage, PER_CHANNEL)
        optimizer = InnerOptimizer(stage.named_parameters(), config, transposed_matrices(stage))
        weight = next(parameter for parameter in module.parameters() if parameter.dim() == 2)
        for step in range(3):
            gradient = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
            weight.grad = gradient if module is linear else gradient.t().contiguous()
            optimizer.step(0.02, step)
        found.append(weight.detach())
    assert torch.equal(found[0].t(), found[1])


def test_an_embedding_is_quantised_by_rules_alone_a_step_size_for_each_row() -> None:
    def of(*rules: dict[str, Any]) -> nn.Module:
        stage = nn.ModuleDict({"units": nn.ModuleDict({"embedding": nn.Embedding(9, 4, padding_idx=0)})})
        apply_quant(stage, QuantConfig.model_validate({"rules": list(rules)}))
        return stage.get_submodule("units.embedding")

    assert not weight_quantisers(of())
    assert not weight_quantisers(of({"class_names": ["Linear"], "weight_quant": {"num_bits": 4}}))
    embedding = of(EMBEDDINGS)
    assert not hasattr(embedding, "input_quantiser")
    step = weight_quantisers(embedding)["weight"].step
    assert step.shape == (9,)
    assert (step > 0).all(), "the row of the padding is zero"
    tokens = torch.tensor([1, 4, 4])
    rows = embedding(tokens)
    torch.testing.assert_close(rows / step[tokens, None], (rows / step[tokens, None]).round())
    rows.sum().backward()
    assert step.grad is not None
    assert step.grad.nonzero().flatten().tolist() == [1, 4]


def test_a_rule_for_the_input_of_an_embedding_is_refused() -> None:
    def config(**rule: Any) -> Any:
        model = {"num_layers": 2, "hidden_size": 16, "num_heads": 2}
        return load_config(None, {"model": model, "data": {"seq_len": 8}, "quant": {"rules": [rule]}}, {})

    refused = config(class_names=["Embedding"], activation_quant={"num_bits": 4})
    with pytest.raises(ConfigError, match=r"quant\.rules\[0\].*only Embeddings, as embedding\.token, whose input"):
        require_quantisable(refused.quant, units_of(refused))
    for taken in (config(**EMBEDDINGS), config(class_names=["Embedding", "Linear"], activation_quant={"num_bits": 4})):
        require_quantisable(taken.quant, units_of(taken))


@pytest.mark.parametrize("name", sorted(EXACT))
def test_models_of_transformers_are_quantised_with_all_their_matrices(name: str) -> None:
    """Of a stage in the middle, whose forward and backward go through all of them."""
    stage = build_stage(family_of(name), 1, 3, seed=7)
    spec = stage.input_spec
    x = torch.randn(2, *spec.shape, generator=torch.Generator().manual_seed(1))
    matrices = {n for n, p in stage.named_parameters() if p.dim() == 3 and "conv" not in n}
    apply_quant(stage, QuantConfig.model_validate({"base": {"weight_quant": {"per_channel": True}}}))
    stage(x).square().mean().backward()
    parameters = dict(stage.named_parameters())
    steps = [step for key, step in parameters.items() if key.endswith("step")]
    assert steps
    assert all(step.grad is not None and step.dim() == 1 for step in steps)
    left = {key for key, p in parameters.items() if p.dim() >= 2 and not key.endswith("original")}
    assert not left & matrices, "experts are quantised"
    stage.eval()
    expected = stage(x)
    fold_weights(stage)
    assert torch.equal(stage(x), expected)


def test_the_step_size_of_experts_inputs_counts_the_positions_of_a_sample_which_they_get_one_by_one() -> None:
    scheme = {"num_bits": 8}
    quant = QuantConfig.model_validate({"base": {"weight_quant": scheme, "activation_quant": scheme}})
    stage = build_stage(family_of("mixtral"), 1, 3, seed=7)
    apply_quant(stage, quant)
    quantisers = {name: module for name, module in stage.named_modules() if isinstance(module, lsq.ActivationQuantiser)}
    of_experts = {name for name in quantisers if name.endswith("experts.input_quantiser")}
    assert of_experts
    assert of_experts < quantisers.keys()
    values = torch.randn(2, TOKENS, 32)
    for name, quantiser in quantisers.items():
        given = values.flatten(0, 1) if name in of_experts else values
        quantiser(given).square().sum().backward()
    gradients = [quantiser.step.grad for quantiser in quantisers.values()]
    assert all(torch.allclose(gradient, gradients[0], rtol=1e-4) for gradient in gradients if gradient is not None)
    assert None not in gradients
