"""Stages: initial values, chained forwards and specs do not depend on the cut."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError, LocalProtocolError
from shoal.model.gpt import GptFamily, GptShape
from shoal.model.mlp import MlpFamily, MlpShape
from shoal.model.resnet import ResNetFamily, ResNetShape
from shoal.model.seeding import operation_seed, seeded
from shoal.model.stage import Family, StageModule, TensorSpec, build_stage, stage_units
from shoal.optim.flat import FlatLayout

GPT = GptFamily(GptShape(seq_len=16, width=24, num_layers=3, num_heads=2, dropout=0.2))
RESNET = ResNetFamily(ResNetShape((2, 2, 2, 2), False, "cifar", num_channels=1, img_size=8, num_classes=10))
BOTTLENECK = ResNetFamily(ResNetShape((1, 2, 1, 1), True, "imagenet", num_channels=3, img_size=33, num_classes=5))

MLP = MlpFamily(MlpShape(num_channels=2, img_size=5, width=12, num_layers=3, num_classes=5))

every_family = pytest.mark.parametrize(
    "family", [GPT, RESNET, BOTTLENECK, MLP], ids=["gpt", "basic", "bottleneck", "mlp"]
)


def _stages(family: Family, num_stages: int, dtype: torch.dtype = torch.float32) -> list[StageModule]:
    return [build_stage(family, s, num_stages, seed=7, dtype=dtype) for s in range(num_stages)]


def _state(stages: list[StageModule]) -> dict[str, Tensor]:
    return {name: value for stage in stages for name, value in stage.state_dict().items()}


def _sample(spec: TensorSpec, count: int, below: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    shape = (count, *spec.shape)
    if spec.torch_dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=spec.torch_dtype)
    return torch.randint(below, shape, generator=generator)


@every_family
def test_initial_parameters_are_bit_identical_for_every_cut(family: Family) -> None:
    whole = _state(_stages(family, 1))
    for num_stages in (2, 3, family.num_units):
        parts = _state(_stages(family, num_stages))
        assert list(parts) == list(whole)
        assert all(torch.equal(parts[name], whole[name]) for name in whole)


def test_initial_parameters_depend_on_the_seed_and_on_nothing_global() -> None:
    expected = _state(_stages(GPT, 2))
    torch.manual_seed(12345)
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        again = _state(_stages(GPT, 2))
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(expected[name], again[name]) for name in expected)
    other = build_stage(GPT, 0, 2, seed=8).state_dict()
    assert not torch.equal(other["units.embedding.token.weight"], expected["units.embedding.token.weight"])
    blocks = [expected[f"units.block_{i}.mlp.up.weight"] for i in (0, 1)]
    assert not torch.equal(blocks[0], blocks[1])


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_chained_stages_equal_the_uncut_model_bit_for_bit(family: Family, dtype: torch.dtype, num_stages: int) -> None:
    whole, parts = _stages(family, 1, dtype)[0], _stages(family, num_stages, dtype)
    for module in (whole, *parts):
        module.eval()  # dropout draws of an uncut model are in one sequence, those of stages are not
        for buffer in module.buffers():
            buffer.requires_grad_(False)
    labels = _sample(family.label_spec(), 3)
    loss = whole.loss(whole(_sample(family.input_spec(), 3)), labels)
    loss.backward()
    x = _sample(family.input_spec(), 3)
    sent: list[tuple[Tensor, Tensor]] = []
    for stage in parts:
        received = x.detach().requires_grad_(x.is_floating_point())
        x = stage(received)
        sent.append((received, x))
    last = parts[-1].loss(x, labels)
    last.backward()
    for (_, output), (received, _) in reversed(list(pairwise(sent))):
        output.backward(received.grad)
    assert loss.dtype == dtype
    assert torch.equal(loss, last)
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for stage in parts:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, expected[name]), name


@every_family
def test_specs_say_what_really_flows(family: Family) -> None:
    stages = _stages(family, family.num_units, torch.float64)
    x = _sample(family.input_spec(), 2)
    assert (x.shape[1:], x.dtype) == (stages[0].input_spec.shape, stages[0].input_spec.torch_dtype)
    for stage in stages:
        assert stage.is_first or (x.shape[1:], x.dtype) == (stage.input_spec.shape, stage.input_spec.torch_dtype)
        kept = x.clone()
        x_out = stage(x)
        assert torch.equal(x, kept), "a stage must not change what it received"
        x = x_out
        assert (x.shape[1:], x.dtype) == (stage.output_spec.shape, stage.output_spec.torch_dtype)


def test_dropout_draws_from_the_seed_of_the_operation() -> None:
    stage = build_stage(GPT, 0, 2, seed=7)
    x = _sample(GPT.input_spec(), 2)
    outputs: list[Tensor] = []
    for microbatch in (0, 0, 1):
        with seeded(operation_seed(7, 0, 4, microbatch, 0)):
            outputs.append(stage(x))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_only_the_last_stage_has_a_loss() -> None:
    first, last = _stages(GPT, 2)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    with pytest.raises(LocalProtocolError, match="stage 0 of 2"):
        first.loss(torch.zeros(1, 16, 256), torch.zeros(1, 16, dtype=torch.int64))


def test_a_cut_by_hand_decides_the_units() -> None:
    assert list(build_stage(GPT, 1, 2, seed=7, cut=[1, 4]).units) == ["block_0", "block_1", "block_2", "head"]
    assert [units.own for units in stage_units(GPT, 2, [4, 1])] == [range(4), range(4, 5)]


def test_impossible_stages_are_refused() -> None:
    with pytest.raises(ConfigError, match="no stage 2 of 2"):
        build_stage(GPT, 2, 2, seed=7)
    with pytest.raises(ConfigError, match="5 units"):
        build_stage(GPT, 0, 6, seed=7)


@pytest.mark.parametrize("family", [GPT, RESNET, MLP], ids=["gpt", "resnet18", "mlp"])
def test_under_autocast_stages_send_bfloat16_and_keep_parameters_gradients_and_loss_in_float32(family: Family) -> None:
    head, tail = (build_stage(family, stage, 2, seed=0, autocast=torch.bfloat16) for stage in (0, 1))
    assert (head.output_spec, tail.input_spec) == (tail.input_spec, head.output_spec)
    assert head.output_spec.dtype == "bfloat16"
    assert head.output_spec.num_bytes * 2 == build_stage(family, 0, 2, seed=0).output_spec.num_bytes
    labels = torch.zeros((2, *family.label_spec().shape), dtype=torch.int64)
    sent = head(torch.zeros((2, *head.input_spec.shape), dtype=head.input_spec.torch_dtype))
    assert sent.dtype == torch.bfloat16
    received = sent.detach().requires_grad_()
    loss = tail.loss(tail(received), labels)
    assert loss.dtype == torch.float32
    loss.backward()
    assert received.grad is not None
    assert received.grad.dtype == torch.bfloat16
    sent.backward(received.grad)
    assert {p.grad.dtype for stage in (head, tail) for p in stage.parameters() if p.grad is not None} == {torch.float32}
    # And something is computed in it.
    sample = _sample(head.input_spec, 2)
    exact, mixed = (build_stage(family, 0, 2, seed=0, autocast=kind).eval()(sample) for kind in (None, torch.bfloat16))
    assert torch.allclose(mixed.float(), exact, atol=0.1)
    assert not torch.equal(mixed, exact.bfloat16())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32])
def test_tokens_and_labels_may_be_of_any_type_that_holds_them(dtype: torch.dtype) -> None:
    shape = GptShape(seq_len=4, width=8, num_layers=1, num_heads=2, vocab_size=256)
    stage = build_stage(GptFamily(shape), 0, 1, seed=3)
    tokens, labels = torch.tensor([[0, 255, 7, 128]]), torch.tensor([[255, 7, 128, 156]])
    wide, narrow = stage(tokens), stage(tokens.to(dtype))
    assert torch.equal(wide, narrow)
    assert torch.equal(stage.loss(wide, labels), stage.loss(narrow, labels.to(dtype)))
    name = str(dtype).removeprefix("torch.")
    assert stage.input_spec.takes(name)
    assert stage.label_spec.takes(name)
    assert not stage.output_spec.takes(name)


class _Scaling(nn.Module):
    """Runs its units on what a constant scales, and counts how often it is asked."""

    def __init__(self, units: nn.ModuleDict) -> None:
        super().__init__()
        self.units_held = (units,)
        self.calls = 0
        self.scale: Tensor
        self.register_buffer("scale", torch.full((1,), 1.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for unit in self.units_held[0].values():
            x = unit(x)
        return x * self.scale


class _ScaledGpt(GptFamily):
    """A family whose stages compute in a way of their own."""

    def assemble(self, indices: range, units: nn.ModuleDict) -> _Scaling:
        return _Scaling(units)


def test_a_stage_computes_as_its_family_says_and_names_and_state_are_those_of_its_units() -> None:
    plain, own = GPT, _ScaledGpt(GPT.shape)
    for stage in range(2):
        expected, found = (build_stage(family, stage, 2, seed=7).eval() for family in (plain, own))
        x = _sample(found.input_spec, 2)
        assert torch.equal(found(x), expected(x) * 1.5)
        assert isinstance(found.assembled, _Scaling)
        assert found.assembled.calls == 1
        assert not found.assembled.training
        named = [name for name, _ in expected.named_parameters()]
        assert [name for name, _ in found.named_parameters()] == named == list(found.state_dict())
        modules = list(found.modules())
        assert len(modules) == len({id(module) for module in modules}) == len(list(expected.modules())) + 1


def test_a_constant_of_a_family_is_no_state_and_goes_where_the_stage_goes() -> None:
    stage = build_stage(_ScaledGpt(GPT.shape), 0, 2, seed=7)
    assert FlatLayout.of_float_buffers(stage).entries == ()
    assert isinstance(stage.assembled, _Scaling)
    assert stage.to("meta").assembled.scale.is_meta


def test_a_copy_of_a_stage_computes_with_its_own_parameters() -> None:
    stage = build_stage(GPT, 0, 2, seed=7).eval()
    x = _sample(stage.input_spec, 2)
    other, before = deepcopy(stage), stage(x)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(stage(x), before)
    assert not torch.equal(other(x), before)
