"""Flat vectors of parameters and buffers."""

from __future__ import annotations

import hashlib

import pytest
import torch
from torch import nn

from shoal.config.diloco import InnerOptimConfig
from shoal.errors import StateMismatch
from shoal.optim.flat import FlatLayout, tensor_sha256
from shoal.optim.inner import InnerOptimizer
from shoal.optim.parts import ReplicaParts


def _module() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Linear(3, 2))


def test_parameters_survive_the_way_through_a_flat_vector() -> None:
    source, target = _module(), _module()
    layout = FlatLayout.of_parameters(source)
    flat_N = layout.flatten(list(source.parameters()))
    assert flat_N.shape == (layout.numel,) == (sum(p.numel() for p in source.parameters()),)
    layout.unflatten(flat_N, list(target.parameters()))
    for ours, theirs in zip(source.parameters(), target.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert all(p.requires_grad for p in target.parameters())


def test_entries_follow_each_other_without_gaps() -> None:
    layout = FlatLayout.of_parameters(_module())
    assert layout.names[:2] == ("0.weight", "0.bias")
    ends = [0, *(entry.offset + entry.numel for entry in layout.entries)]
    assert [entry.offset for entry in layout.entries] == ends[:-1]
    assert ends[-1] == layout.numel


def test_floating_and_integer_buffers_are_laid_out_apart() -> None:
    module = _module()
    floating, integers = FlatLayout.of_float_buffers(module), FlatLayout.of_integer_buffers(module)
    assert floating.names == ("1.running_mean", "1.running_var")
    assert floating.dtype == torch.float32
    assert integers.names == ("1.num_batches_tracked",)
    module[1](torch.randn(4, 3, 2, 2))  # pyright: ignore[reportIndexIssue]
    assert integers.flatten(integers.select(module)).tolist() == [1]
    integers.unflatten(torch.tensor([7]), integers.select(module))
    assert module[1].num_batches_tracked.item() == 7  # pyright: ignore[reportIndexIssue]


class Rotary(nn.Module):
    """As models of transformers have it: a constant that every layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.rand(4), persistent=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool), persistent=False)
        self.register_buffer("seen", torch.zeros(()))


def test_constants_are_nobody_s_state() -> None:
    module = nn.ModuleDict({"one": Rotary(), "two": nn.Sequential(Rotary())})
    assert FlatLayout.of_float_buffers(module).names == ("one.seen", "two.0.seen")
    assert FlatLayout.of_integer_buffers(module).names == ()
    averaged = ReplicaParts.of_module(module, InnerOptimizer([], InnerOptimConfig()), lambda: None).averaged
    assert averaged.floats.layout.names == ("one.seen", "two.0.seen")
    assert not averaged.integers.tensors


def test_double_parameters_get_a_double_vector_and_half_ones_a_float_vector() -> None:
    assert FlatLayout.of_parameters(_module().double()).dtype == torch.float64
    assert FlatLayout.of_parameters(_module().bfloat16()).dtype == torch.float32


def test_a_module_without_buffers_has_an_empty_vector() -> None:
    layout = FlatLayout.of_float_buffers(nn.Linear(2, 2))
    assert layout.flatten([]).shape == (0,)
    assert tensor_sha256(layout.flatten([])) == hashlib.sha256(b"").hexdigest()


def test_tensors_that_do_not_fit_the_layout_are_refused_before_anything_is_written() -> None:
    module = nn.Linear(2, 2)
    layout = FlatLayout.of_parameters(module)
    before = module.weight.clone()
    with pytest.raises(StateMismatch, match="6 elements"):
        layout.unflatten(torch.zeros(5), list(module.parameters()))
    with pytest.raises(StateMismatch, match="bias has shape"):
        layout.unflatten(torch.zeros(6), [module.weight, torch.zeros(3)])
    with pytest.raises(StateMismatch, match="2 tensors, got 1"):
        layout.flatten([module.weight])
    with pytest.raises(StateMismatch, match="lacks"):
        layout.select(nn.ReLU())
    assert torch.equal(module.weight, before)


def test_the_hash_is_that_of_the_contiguous_bytes() -> None:
    tensor = torch.arange(6, dtype=torch.float32).view(2, 3)
    assert tensor_sha256(tensor) == hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
    assert tensor_sha256(tensor.t()) == hashlib.sha256(tensor.t().contiguous().numpy().tobytes()).hexdigest()
    assert tensor_sha256(tensor) != tensor_sha256(tensor.t())
    assert tensor_sha256(torch.tensor(-0.0)) != tensor_sha256(torch.tensor(0.0))
    assert tensor_sha256(tensor.bfloat16()) != tensor_sha256(tensor)
