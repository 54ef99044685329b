"""Every known kind of model, cut: outputs, gradients and four steps have the bits of transformers' own class.

Where its embeddings are tied, the first stage has the head as well: there is one parameter of both.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from _pytest.mark import ParameterSet
from tests.unit.model.hf.families import EXACT, TOKENS, family_of, forward_of, own_class
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW

from shoal.model.hf.twin import SEED, run_stages
from shoal.model.seeding import seeded
from shoal.model.stage import build_stage

_STEPS = 4
_NUM_STAGES = (2, 3, 4)
_FORMS = (
    ("float32", False),
    ("float64", True),
    ("float32", True),
    ("float64", False),
)


def _cases() -> Iterator[ParameterSet]:
    """Each kind in each number of stages, in both types, tied and not; the kinds together in all that there is."""
    for number, kind in enumerate(EXACT):
        for num_stages in _NUM_STAGES:
            # Of these any three that follow each other have both of both.
            dtype, is_tied = _FORMS[(number + num_stages) % len(_FORMS)]
            name = f"{kind}-{dtype}-{num_stages}-{'tied' if is_tied else 'untied'}"
            yield pytest.param(kind, getattr(torch, dtype), num_stages, is_tied, id=name)


def _batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(_STEPS):
        tokens = torch.randint(3, 97, (2, TOKENS + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def _expected(
    kind: str, dtype: torch.dtype, is_tied: bool
) -> tuple[list[Tensor], list[dict[str, Tensor]], dict[str, Tensor]]:
    """What transformers' own class computes: outputs and gradients of each step, and the parameters in the end."""
    theirs, names = own_class(family_of(kind, is_tied), dtype)
    theirs.train()
    parameters = dict(theirs.named_parameters())
    optimizer = AdamW(parameters.values(), lr=1e-3, foreach=False)
    outputs: list[Tensor] = []
    gradients: list[dict[str, Tensor]] = []
    for inputs, labels in _batches():
        optimizer.zero_grad()
        with seeded(SEED):
            logits, routers = forward_of(theirs, inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        for router in routers:
            loss = loss + router * theirs.config.router_aux_loss_coef
        loss.backward()
        outputs.append(logits.detach())
        gradients.append({o: parameters[t].grad.clone() for o, t in names.items() if parameters[t].grad is not None})
        optimizer.step()
    return outputs, gradients, {ours: parameters[name].detach() for ours, name in names.items()}


@pytest.mark.usual(
    "llama-float32-2-tied",
    "gpt2-float64-3-tied",
    "qwen3_next-float32-3-untied",
    "gemma2-float32-4-untied",
    "qwen3-float32-2-untied",
    "gpt2-float32-4-tied",
    "gemma3_text-float64-4-tied",
)
@pytest.mark.parametrize(("kind", "dtype", "num_stages", "is_tied"), list(_cases()))
def test_four_steps_of_a_cut_model_have_the_bits_of_transformers_own_class(
    kind: str, dtype: torch.dtype, num_stages: int, is_tied: bool
) -> None:
    outputs, gradients, parameters = _expected(kind, dtype, is_tied)
    family = family_of(kind, is_tied)
    assert family.is_tied == is_tied
    stages = [build_stage(family, s, num_stages, seed=7, dtype=dtype) for s in range(num_stages)]
    named = {name: parameter for stage in stages for name, parameter in stage.named_parameters()}
    assert named.keys() == parameters.keys()
    optimizers = [AdamW(stage.parameters(), lr=1e-3, foreach=False) for stage in stages]
    for step, (inputs, labels) in enumerate(_batches()):
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert torch.equal(run_stages(stages, inputs, labels), outputs[step]), step
        found = {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
        assert found.keys() == gradients[step].keys()
        assert [n for n, gradient in found.items() if not torch.equal(gradient, gradients[step][n])] == [], step
        for optimizer in optimizers:
            optimizer.step()
    assert [n for n, parameter in named.items() if not torch.equal(parameter, parameters[n])] == []
