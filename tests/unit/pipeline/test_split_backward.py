"""Every schedule, with and without checkpointing, gives the bits of a plain backward; or says that it cannot."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
from tests.families import gpt, resnet, resnet18, tied_gpt
from torch import Tensor, nn

from shoal.config.diloco import InnerOptimConfig
from shoal.config.quant import QuantConfig
from shoal.errors import LocalProtocolError
from shoal.ids import StepKey
from shoal.model.stage import Family, TensorSpec, build_stage
from shoal.optim.inner import InnerOptimizer
from shoal.pipeline.split_backward import split
from shoal.pipeline.stage_compute import StageCompute
from shoal.quant.apply import apply_quant
from shoal.swarm.step_operations import Schedule

WIDTH = 6
SIZES = (3, 2, 3)
WAYS = [(schedule, checkpoints) for schedule in Schedule for checkpoints in (False, True)]


class Chain(Family):
    """Units of which each maps (B, WIDTH) to (B, WIDTH)."""

    def __init__(self, *units: Callable[[], nn.Module]) -> None:
        self.units = units

    @classmethod
    def from_config(cls, model: Any, data: Any) -> Self:
        raise NotImplementedError

    @property
    def num_units(self) -> int:
        return len(self.units)

    def build_unit(self, index: int) -> nn.Module:
        return self.units[index]()

    def input_spec(self) -> TensorSpec:
        return TensorSpec("float32", (WIDTH,))

    def label_spec(self) -> TensorSpec:
        return TensorSpec("int64", ())

    def boundary_spec(self, index: int) -> TensorSpec:
        return TensorSpec("float32", (WIDTH,))

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, labels)

    def unit_costs(self) -> list[float]:
        return [1.0] * len(self.units)


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Recurrent(nn.Module):
    """One weight used three times, one used through another node twice, one used once."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.scale, self.once = linear(), nn.Parameter(torch.rand(WIDTH)), linear()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.cell(x))
        squared = self.scale * self.scale
        return self.once(x * squared) + x * squared


class Branches(nn.Module):
    """Parallel branches, an output of several parts, a parameter behind nodes of its own, noise."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.gain = linear(), linear(), nn.Parameter(torch.rand(2, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.left(x).chunk(2, 1)
        both = torch.cat([other.sigmoid(), one], 1) * self.gain.flatten().exp()
        return nn.functional.dropout(both, 0.3) + self.right(x)


class Moving(nn.Module):
    """What comes out depends on a buffer, which each forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = linear()
        self.mean = nn.Buffer(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        centred = self.inside(x - self.mean)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return centred


class Hooked(nn.Module):
    """A hook on a tensor in the middle changes its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        middle = self.other(self.one(x))
        if middle.requires_grad:
            middle.register_hook(lambda gradient: gradient * 2)
        return middle


class Unused(nn.Module):
    """A parameter that this forward does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Nested(nn.Module):
    """A backward within the backward, which gives parameters that are not in the graph their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        return self.outside(checkpoint(self.inside, x, use_reentrant=True))


FAMILIES: dict[str, Callable[[], Family]] = {
    "gpt": gpt,
    "chunks": lambda: gpt(loss_chunk=5),
    "resnet": resnet,
    "shared": lambda: Chain(linear, Recurrent, Recurrent, Recurrent),
    "branches": lambda: Chain(linear, Branches, Branches, Branches),
    "moving": lambda: Chain(Moving, Moving, Moving, Moving),
    "no parameters": lambda: Chain(linear, nn.Tanh, nn.GELU, linear),
    "hooked": lambda: Chain(linear, Hooked, linear, Hooked),
    "unused": lambda: Chain(linear, Unused, Unused, Unused),
    "nested": lambda: Chain(linear, Nested, Nested, Nested),
}


def drawn(spec: TensorSpec, num: int, seed: int, classes: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if spec.torch_dtype.is_floating_point:
        return torch.randn(num, *spec.shape, generator=generator)
    return torch.randint(classes, (num, *spec.shape), generator=generator)


def computed(
    family: Family, stage: int, schedule: Schedule, checkpoints: bool, quant: QuantConfig | None = None
) -> StageCompute:
    module = build_stage(family, stage, 3, seed=5)
    apply_quant(module, quant)
    optimizer = InnerOptimizer(module.named_parameters(), InnerOptimConfig())
    return StageCompute(
        module, optimizer, run_seed=5, stage=stage, schedule=schedule, activation_checkpointing=checkpoints
    )


def train(compute: StageCompute, num_steps: int = 2) -> list[Tensor]:
    """Trains some steps; returns what neighbours get, the totals, parameters and buffers."""
    results: list[Tensor] = []
    for number in range(num_steps):
        key = StepKey(0, 1, number, 0)
        for op in operations(compute.schedule, compute.module.is_last):
            results += run(compute, key, *op)
        totals = compute.totals(key)
        results.append(torch.tensor([totals.squared_norm, totals.loss or 0.0], dtype=torch.float64))
        compute.commit(key, 0.7, 0.01, False)
    module = compute.module
    return [*results, *(t.detach().clone() for t in [*module.parameters(), *module.buffers()])]


def operations(schedule: Schedule, is_last: bool) -> list[tuple[str, int]]:
    microbatches = range(len(SIZES))
    back = "loss" if is_last else "backward"
    forwards = [("forward", m) for m in microbatches]
    if schedule == Schedule.GPIPE:
        return [*forwards, *((back, m) for m in microbatches)]
    found: list[tuple[str, int]] = []
    for m in microbatches:
        # One microbatch more is always in flight, and the gradients of parameters come after the next backward.
        ahead = [] if is_last else [("forward", n) for n in ((0, 1) if m == 0 else (m + 1,)) if n in microbatches]
        found += [*ahead, (back, m)]
        found += [("weights", m - 1)] if schedule == Schedule.ZERO_BUBBLE and m else []
    return [*found, ("weights", len(SIZES) - 1)] if schedule == Schedule.ZERO_BUBBLE else found


def run(compute: StageCompute, key: StepKey, name: str, microbatch: int) -> list[Tensor]:
    module, num, seed = compute.module, SIZES[microbatch], 10 * key.number + microbatch
    input = drawn(module.input_spec, num, seed, 32)
    match name:
        case "forward":
            output = compute.forward(key, microbatch, input)
            return [] if module.is_last else [output]
        case "backward":
            return [compute.backward(key, microbatch, drawn(module.output_spec, num, seed + 50, 0))]
        case "loss":
            given = None if compute.schedule == Schedule.GPIPE else input
            return [compute.loss(key, microbatch, given, drawn(module.label_spec, num, seed, 4), num / sum(SIZES))]
        case _:
            compute.weights(key, microbatch)
            return []


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    """Bit for bit; what neighbours get comes in another order with another schedule."""

    def order(tensors: list[Tensor]) -> list[bytes]:
        return sorted(t.detach().contiguous().numpy().tobytes() for t in tensors)

    assert order(results) == order(expected)


@pytest.mark.parametrize("name", [*FAMILIES, pytest.param("resnet18", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", range(3))
def test_all_ways_give_the_bits_of_one_backward(name: str, stage: int) -> None:
    family = {**FAMILIES, "resnet18": resnet18}[name]()
    expected = train(computed(family, stage, Schedule.ONE_F_ONE_B, False))
    for schedule, checkpoints in WAYS[1:]:
        assert_same(train(computed(family, stage, schedule, checkpoints)), expected)


@pytest.mark.parametrize("stage", range(3))
def test_a_quantised_stage_is_split_as_well(stage: int) -> None:
    family = resnet()
    expected = train(computed(family, stage, Schedule.ONE_F_ONE_B, False, QuantConfig()))
    for schedule, checkpoints in WAYS[1:]:
        assert_same(train(computed(family, stage, schedule, checkpoints, QuantConfig())), expected)


def graph(family: Family, stage: int = 1) -> tuple[Tensor, Tensor, list[Tensor]]:
    module = build_stage(family, stage, 3, seed=5)
    received = drawn(module.input_spec, 3, 1, 32).requires_grad_()
    return module(received), received, list(module.parameters())


@pytest.mark.parametrize("name", ["gpt", "resnet", "branches"])
def test_every_parameter_is_put_off_where_each_is_used_once(name: str) -> None:
    root, received, parameters = graph(FAMILIES[name]())
    halves = split(root, received, parameters)
    assert halves is not None
    halves.first_half(torch.ones_like(root))
    assert received.grad is not None
    assert all(parameter.grad is None for parameter in parameters)
    halves.second_half()
    assert all(parameter.grad is not None for parameter in parameters)


def test_shared_parameters_get_their_gradients_at_once_and_the_others_later() -> None:
    root, received, parameters = graph(FAMILIES["shared"]())
    halves = split(root, received, parameters)
    assert halves is not None
    cell_weight, cell_bias, scale = (parameters[i] for i in (1, 2, 0))
    assert {id(p) for p in halves.at_once} == {id(cell_weight), id(cell_bias), id(scale)}
    assert [len(branch.parameters) for branch in halves.branches] == [2]


@pytest.mark.parametrize("name", ["no parameters", "unused", "nested"])
def test_there_is_no_split_without_parameters_in_the_graph(name: str) -> None:
    assert split(*graph(FAMILIES[name]())) is None


def test_a_graph_with_hooks_is_not_split_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    halves = split(*graph(FAMILIES["hooked"](), 2))
    assert halves is not None
    assert not halves.is_exact(torch.ones(3, WIDTH))
    compute = computed(FAMILIES["hooked"](), 2, Schedule.ZERO_BUBBLE, False)
    with caplog.at_level(logging.WARNING):
        run(compute, StepKey(0, 1, 0, 0), "loss", 0)
    assert [record.message for record in caplog.records] == ["step.not_split"]


def test_looking_whether_a_split_is_exact_changes_nothing() -> None:
    root, received, parameters = graph(gpt())
    halves = split(root, received, parameters)
    assert halves is not None
    kept = torch.ones_like(parameters[0])
    parameters[0].grad = kept
    assert halves.is_exact(torch.ones_like(root))
    assert parameters[0].grad is kept
    assert received.grad is None
    assert all(parameter.grad is None for parameter in parameters[1:])


def test_weights_free_the_graph_of_their_microbatch_and_no_other() -> None:
    compute = computed(gpt(), 1, Schedule.ZERO_BUBBLE, False)
    key = StepKey(0, 1, 0, 0)
    kept: list[weakref.ref[Tensor]] = []
    compute.module.register_forward_hook(lambda _module, _inputs, output: kept.append(weakref.ref(output)))
    for microbatch in range(2):
        run(compute, key, "forward", microbatch)
        run(compute, key, "backward", microbatch)
    run(compute, key, "weights", 0)
    gc.collect()
    assert [ref() is None for ref in kept] == [True, False]
    with pytest.raises(LocalProtocolError):
        compute.commit(key, 1.0, 0.01, False)


def test_checkpointing_keeps_nothing_of_a_forward_but_its_input() -> None:
    compute = computed(gpt(), 1, Schedule.ONE_F_ONE_B, True)
    kept: list[weakref.ref[Tensor]] = []
    compute.module.register_forward_hook(lambda _module, _inputs, output: kept.append(weakref.ref(output)))
    for microbatch in range(2):
        run(compute, StepKey(0, 1, 0, 0), "forward", microbatch)
    gc.collect()
    assert [ref() is None for ref in kept] == [True, True]


def test_a_head_that_the_first_stage_hosts_puts_the_gradients_of_its_own_parameters_off() -> None:
    compute, key = computed(tied_gpt(0.0), 0, Schedule.ZERO_BUBBLE, False), StepKey(0, 1, 0, 0)
    head = compute.module.part(is_head=True)
    compute.loss(key, 0, drawn(head.input_spec, 2, 1, 0), drawn(head.label_spec, 2, 2, 32), 1.0)
    before = compute.totals(key).squared_norm
    compute.weights(key, 0, is_head=True)
    assert compute.totals(key).squared_norm > before
