"""The outer step against torch's own SGD."""

from __future__ import annotations

import pytest
import torch

from shoal.optim.outer import OuterSgd, pseudo_gradient


@pytest.mark.parametrize("nesterov", [True, False])
def test_outer_steps_equal_torch_sgd_in_float64(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(257, generator=generator, dtype=torch.float64)
    theirs = start.clone().requires_grad_()
    reference = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=nesterov)
    ours, momentum = start.clone(), torch.zeros_like(start)
    outer = OuterSgd(lr=0.7, momentum=0.9, nesterov=nesterov)
    for _ in range(5):
        average = torch.randn(257, generator=generator, dtype=torch.float64)
        theirs.grad = average.clone()
        reference.step()
        ours, momentum = outer.stage(ours, momentum, average)
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_long_vector_is_stepped_part_by_part_with_the_same_bits(nesterov: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2 * (1 << 18) + 5, generator=generator) for _ in range(3)]
    outer = OuterSgd(lr=0.7, momentum=0.9, nesterov=nesterov)
    whole = outer.stage(*inputs)
    parts = [outer.stage(*each) for each in zip(*(vector.split(1000) for vector in inputs), strict=True)]
    for number, vector in enumerate(whole):
        assert torch.equal(vector, torch.cat([part[number] for part in parts]))


def test_elements_that_are_only_averaged_get_the_mean_of_the_local_ones_and_no_momentum() -> None:
    generator = torch.Generator().manual_seed(1)
    count = (1 << 18) + 9
    # The last part lies across where the vector is stepped in two parts.
    averaged = (slice(2, 5), slice((1 << 18) - 3, (1 << 18) + 4))
    is_averaged = torch.zeros(count, dtype=torch.bool)
    for part in averaged:
        is_averaged[part] = True
    outer, momentum, average = (torch.randn(count, generator=generator) for _ in range(3))
    rest, rest_momentum = OuterSgd(0.7, 0.9, True).stage(outer, momentum, average)
    staged, velocity = OuterSgd(0.7, 0.9, True, averaged).stage(outer, momentum, average)
    assert torch.equal(staged, torch.where(is_averaged, outer - average, rest))
    assert torch.equal(velocity, torch.where(is_averaged, torch.zeros(()), rest_momentum))


def test_staging_changes_none_of_its_inputs() -> None:
    inputs = [torch.arange(5.0) + offset for offset in (1, 2, 3)]
    copies = [tensor.clone() for tensor in inputs]
    staged = OuterSgd(lr=0.5, momentum=0.9, nesterov=True).stage(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    assert not {t.data_ptr() for t in staged} & {t.data_ptr() for t in inputs}


def test_products_and_sums_are_rounded_one_by_one() -> None:
    # 1 + 2**-12 squared needs 25 bits: a fused multiply-add would keep the last one, separate operations round it off.
    x = torch.tensor([1.0 + 2.0**-12])
    _, momentum = OuterSgd(lr=1.0, momentum=float(x)).stage(torch.zeros(1), x, -(x * x))
    assert momentum.item() == 0.0


def test_a_plain_average_of_local_parameters_is_what_unit_lr_without_momentum_gives() -> None:
    outer, local_a, local_b = torch.tensor([4.0, 8.0]), torch.tensor([2.0, 8.0]), torch.tensor([0.0, 4.0])
    average = (pseudo_gradient(outer, local_a) + pseudo_gradient(outer, local_b)) / 2
    staged, _ = OuterSgd(lr=1.0).stage(outer, torch.zeros(2), average)
    assert staged.tolist() == [1.0, 6.0]
