"""Learned step size quantisation: values and gradients against the formulas of the paper."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.quant.lsq import ActivationQuantiser, WeightQuantiser, integer_bounds, lsq_quantise


def test_bounds_are_those_of_the_number_of_bits() -> None:
    assert integer_bounds(8, signed=True) == (-128, 127)
    assert integer_bounds(3, signed=False) == (0, 7)


def test_values_are_rounded_to_the_grid_and_clipped_at_its_ends() -> None:
    values = torch.tensor([-9.0, -0.6, 0.2, 0.26, 0.9, 9.0])
    out = lsq_quantise(values, torch.tensor([0.5]), (-2, 1), 1.0)
    assert out.tolist() == [-1.0, -0.5, 0.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("step_shape", [(1, 1), (4, 1)])
def test_gradients_follow_the_formula_element_by_element(step_shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 50, generator=generator, dtype=torch.float64).mul(2).requires_grad_()
    step = (torch.rand(step_shape, generator=generator, dtype=torch.float64) + 0.3).requires_grad_()
    upstream = torch.randn(4, 50, generator=generator, dtype=torch.float64)
    lsq_quantise(values, step, (-4, 3), 0.25).backward(upstream)
    grad_values, grad_step = torch.zeros(4, 50, dtype=torch.float64), torch.zeros(step_shape, dtype=torch.float64)
    hits = {"below": 0, "inside": 0, "above": 0}
    for i in range(4):
        row = i if step_shape[0] == 4 else 0
        for j in range(50):
            ratio = values[i, j].item() / step[row, 0].item()
            if ratio <= -4:
                slope, where = -4.0, "below"
            elif ratio >= 3:
                slope, where = 3.0, "above"
            else:
                slope, where = round(ratio) - ratio, "inside"
                grad_values[i, j] = upstream[i, j]
            hits[where] += 1
            grad_step[row, 0] += 0.25 * upstream[i, j] * slope
    assert min(hits.values()) > 0
    assert values.grad is not None
    assert step.grad is not None
    torch.testing.assert_close(values.grad, grad_values, rtol=0, atol=1e-12)
    torch.testing.assert_close(step.grad, grad_step, rtol=0, atol=1e-12)


def test_the_step_gradient_of_clipped_values_is_the_numeric_derivative() -> None:
    values = torch.tensor([-7.0, 8.0, 9.0], dtype=torch.float64)
    step = torch.tensor([0.5], dtype=torch.float64, requires_grad=True)
    lsq_quantise(values, step, (-4, 3), 1.0).sum().backward()
    eps = 1e-6
    ends = [lsq_quantise(values, step.detach() + d, (-4, 3), 1.0).sum().item() for d in (eps, -eps)]
    assert step.grad is not None
    assert step.grad.item() == pytest.approx((ends[0] - ends[1]) / (2 * eps))


def test_a_weight_starts_from_its_mean_magnitude() -> None:
    weight = torch.tensor([[[[1.0, -3.0]]], [[[0.5, 0.5]]]])
    whole = WeightQuantiser(weight, 4, signed=True, per_channel=False)
    assert whole.step.tolist() == pytest.approx([2 * 1.25 / math.sqrt(7)])
    assert whole.gradient_scale == pytest.approx(1 / math.sqrt(4 * 7))
    channels = WeightQuantiser(weight, 4, signed=True, per_channel=True)
    assert channels.step.tolist() == pytest.approx([2 * 2.0 / math.sqrt(7), 2 * 0.5 / math.sqrt(7)])
    assert channels.gradient_scale == pytest.approx(1 / math.sqrt(2 * 7))
    ratios = channels(weight) / channels.step.detach().view(2, 1, 1, 1)
    torch.testing.assert_close(ratios, ratios.round())


def test_an_activation_starts_from_a_value_that_no_data_changes() -> None:
    one, other = (ActivationQuantiser(8, signed=True, dtype=torch.float64) for _ in range(2))
    assert torch.equal(one.step, other.step)
    assert one.step.item() == pytest.approx(2 * math.sqrt(2 / math.pi) / math.sqrt(127))
    before = one.step.item()
    values = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    one(values).sum().backward()
    assert one.step.item() == before
    scaled = values.detach() / before
    slope = (scaled.round() - scaled).sum().item()
    assert one.step.grad is not None
    assert one.step.grad.item() == pytest.approx(slope / math.sqrt(6 * 127))


def test_a_step_size_that_fell_to_zero_stays_finite() -> None:
    step = torch.zeros(1, requires_grad=True)
    values = torch.tensor([1.0, 0.0, -1.0], requires_grad=True)
    out = lsq_quantise(values, step, (-4, 3), 1.0)
    out.sum().backward()
    assert out.isfinite().all()
    assert step.grad is not None
    assert step.grad.isfinite().all()


def test_a_step_size_that_went_through_zero_is_as_good_as_before() -> None:
    values = torch.randn(40, generator=torch.Generator().manual_seed(0)).requires_grad_()
    steps = [torch.tensor([sign * 0.3], requires_grad=True) for sign in (1, -1)]
    outputs = [lsq_quantise(values, step, (-4, 3), 0.5) for step in steps]
    assert torch.equal(*outputs)
    assert outputs[1].unique().numel() > 3
    for output in outputs:
        output.square().sum().backward()
    assert steps[0].grad is not None
    assert steps[1].grad is not None
    assert steps[0].grad.item() == -steps[1].grad.item() != 0


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_weight_of_zeros_starts_with_a_step_that_lets_it_learn(per_channel: bool) -> None:
    quantiser = WeightQuantiser(torch.zeros(3, 16), 4, signed=True, per_channel=per_channel)
    assert (quantiser.step > 0.01).all()
    learnt = torch.full((3, 16), 0.25)
    assert (quantiser(learnt) != 0).all()


def test_a_channel_of_zeros_starts_like_the_others() -> None:
    weight = torch.ones(3, 16)
    weight[1] = 0
    steps = WeightQuantiser(weight, 4, signed=True, per_channel=True).step
    assert torch.equal(steps, steps[:1].expand(3))
