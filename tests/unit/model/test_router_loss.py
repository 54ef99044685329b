"""What keeps experts evenly busy: its value, where its gradient begins, and what is reported of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from shoal.model.router_loss import RouterLosses, RouterPass, RouterTotals, router_loss

_CPU = torch.device("cpu")


class _Router(nn.Module):
    """Logits, and the weights of what is taken, as transformers' routers put them out."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(3, num_experts, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.gate(x)
        weights, taken = logits.softmax(-1).topk(2)
        return logits, weights, taken


def test_the_loss_is_one_where_all_is_even_and_the_most_where_all_take_the_same() -> None:
    even = torch.eye(4).repeat(3, 1) * 100
    assert router_loss(even, 1).loss.item() == pytest.approx(1.0)
    assert router_loss(even, 1).loads_E.tolist() == [3.0] * 4
    alike = torch.tensor([[100.0, 99.9, 0.0, 0.0]]).repeat(6, 1)
    assert router_loss(alike, 1).loss.item() == pytest.approx(4 * 0.525, rel=1e-3)
    assert router_loss(alike, 2).loss.item() == pytest.approx(4 / 2)
    assert router_loss(alike, 2).loads_E.tolist() == [6.0, 6.0, 0.0, 0.0]


def test_samples_and_tokens_may_be_apart_and_half_precision_is_widened() -> None:
    logits = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1)).bfloat16()
    found, expected = router_loss(logits, 2), router_loss(logits.float().flatten(0, 1), 2)
    assert torch.equal(found.loss, expected.loss)
    assert found.loss.dtype == torch.float32


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_the_loss_begins_at_the_router_with_its_weight_and_nowhere_else(weight: float) -> None:
    torch.manual_seed(1)
    router, x = _Router(4), torch.randn(6, 3, dtype=torch.float64)
    losses = RouterLosses(0.5, 2)
    losses.attach(router, 0)

    def gradient(weight: float | None) -> Tensor:
        router.zero_grad()
        if weight is None:
            (router(x)[1] ** 2).sum().backward()
        else:
            with losses.weighed(weight, _CPU) as passes:
                used = router(x)[1]
            assert len(passes) == 1
            assert torch.equal(passes[0].loads_E, router_loss(router.gate(x), 2).loads_E)
            # The backward may run when everything else has gone on.
            (used**2).sum().backward()
        assert router.gate.weight.grad is not None
        return router.gate.weight.grad

    plain = gradient(None)
    alone = torch.autograd.grad(router_loss(router.gate(x), 2).loss, router.gate.weight)[0]
    assert alone.abs().max() > 1e-3
    assert torch.allclose(gradient(weight) - plain, 0.5 * weight * alone, atol=1e-15)


def test_a_coefficient_of_zero_reports_alone() -> None:
    router, losses = _Router(4), RouterLosses(0.0, 2)
    losses.attach(router, 0)
    with losses.weighed(1.0, _CPU) as passes:
        output = router(torch.randn(6, 3, dtype=torch.float64))
    assert len(passes) == 1
    assert "BeginsAt" not in str(output[1].grad_fn)


def test_a_step_weighs_the_losses_of_its_microbatches_and_adds_their_tokens_up() -> None:
    totals = RouterTotals()
    assert totals.reports() == ()
    totals.add(0.25, [RouterPass(torch.tensor(2.0), torch.tensor([4.0, 0.0])), _even_pass()])
    totals.add(0.75, [RouterPass(torch.tensor(1.0), torch.tensor([2.0, 2.0])), _even_pass()])
    first, second = totals.reports()
    assert (first.loss, first.load_cv) == (1.25, 0.5)
    assert (second.loss, second.load_cv) == (1.0, 0.0)


def _even_pass() -> RouterPass:
    return RouterPass(torch.tensor(1.0), torch.tensor([3.0, 3.0]))
