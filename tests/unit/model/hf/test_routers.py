"""Routers of transformers, cut: their loss has by layer the bits of a sum over what transformers' own class records."""

from __future__ import annotations

import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.threads import one_thread as one_thread
from tests.unit.model.hf.families import BALANCED, TOKENS, forward_of, own_class, values_of
from torch import Tensor
from torch.nn import functional as F

from shoal.config.diloco import InnerOptimConfig
from shoal.config.training import DataConfig
from shoal.data.builtin import open_pydoc_topics
from shoal.errors import ConfigError
from shoal.ids import StepKey
from shoal.model.compiled import compile_stage
from shoal.model.hf.family import HfFamily
from shoal.model.hf.routers import unknown_routers
from shoal.model.hf.twin import SEED, difference
from shoal.model.router_loss import RouterPass
from shoal.model.seeding import seeded
from shoal.model.stage import StageModule, build_stage
from shoal.optim.inner import InnerOptimizer
from shoal.pipeline.stage_compute import StageCompute

_COEFFICIENT, _WEIGHT = 0.7, 3 / 64
_TEXT_TOKENS = 64
_REFUSED = "set model.extra.router_aux_loss_coef to 0"


def _family(kind: str, **more: Any) -> HfFamily:
    return HfFamily(values_of(kind, router_aux_loss_coef=_COEFFICIENT, **more), TOKENS)


def _batch() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(3, 97, (2, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    return tokens[:, :-1], tokens[:, 1:]


def _trained(stages: list[StageModule], *, weighed: bool = True) -> tuple[dict[str, Tensor], list[RouterPass]]:
    """The gradients of all stages from a microbatch of that weight, and what their routers came to."""
    x, labels = _batch()
    received: list[Tensor] = []
    sent: list[Tensor] = []
    passes: list[RouterPass] = []
    with seeded(SEED):
        for stage in stages:
            received.append(x.detach().requires_grad_(not stage.is_first))
            with stage.weighed(_WEIGHT) if weighed else nullcontext([]) as found:
                x = stage(received[-1])
            sent.append(x)
            passes += found
    gradient = None
    sent[-1] = stages[-1].loss(x, labels) * _WEIGHT
    for output, given in zip(reversed(sent), reversed(received), strict=True):
        torch.autograd.backward(output, gradient)
        gradient = given.grad
    named = (pair for stage in stages for pair in stage.named_parameters())
    return {name: p.grad for name, p in named if p.grad is not None}, passes


@pytest.mark.usual("mixtral-float32-2", "gpt_oss-float64-3")
@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("kind", BALANCED)
def test_the_gradient_of_every_router_has_the_bits_of_the_reference(
    kind: str, dtype: torch.dtype, num_stages: int
) -> None:
    family = _family(kind)
    theirs, names = own_class(family, dtype)
    if unknown_routers(theirs):
        # As transformers 5.9 of Granite.
        assert _REFUSED in str(family.exactness_problem())
        return
    inputs, labels = _batch()
    with seeded(SEED):
        logits, routers = forward_of(theirs.train(), inputs)
    assert len(routers) == family.config.num_hidden_layers
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) * _WEIGHT
    (loss + sum(router * (_COEFFICIENT * _WEIGHT) for router in routers)).backward()
    stages = [build_stage(family, s, num_stages, seed=7, dtype=dtype) for s in range(num_stages)]
    found, passes = _trained(stages)
    theirs_by_name = dict(theirs.named_parameters())
    expected = {ours: theirs_by_name[name].grad for ours, name in names.items()}
    assert [name for name, gradient in found.items() if not torch.equal(gradient, expected[name])] == []
    assert [each.loss.item() for each in passes] == pytest.approx([each.item() for each in routers], rel=1e-6)
    stages = [build_stage(family, s, num_stages, seed=7, dtype=dtype) for s in range(num_stages)]
    without, _ = _trained(stages, weighed=False)
    changed = [name for name, gradient in found.items() if not torch.equal(gradient, without[name])]
    assert sum(name.endswith((".gate.weight", ".router.weight")) for name in changed) == len(routers), changed


@pytest.mark.parametrize("kind", ["deepseek_v3", "llama"])
def test_a_model_whose_config_has_no_coefficient_has_no_loss_of_routers(kind: str) -> None:
    stage = build_stage(HfFamily(values_of(kind), TOKENS), 0, 1, seed=7)
    with stage.weighed(1.0) as passes:
        stage(_batch()[0])
    assert passes == []


def test_a_stage_that_is_evaluated_has_no_loss_of_routers() -> None:
    stage = build_stage(_family("mixtral"), 0, 1, seed=7).eval()
    outside = stage(_batch()[0])
    assert "BeginsAt" not in _nodes(outside)
    with stage.weighed(1.0):
        inside = stage(_batch()[0])
    assert "BeginsAt" in _nodes(inside)
    assert torch.equal(outside, inside)


def _nodes(output: Tensor) -> str:
    """The names of all nodes of a graph."""
    seen, left = set[Any](), [output.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [following for following, _ in node.next_functions]
    return " ".join(type(node).__name__ for node in seen)


def test_a_model_that_does_not_say_where_its_routers_are_is_refused_unless_they_have_no_loss(
    transformers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.MixtralPreTrainedModel, "_can_record_outputs", {})
    found = difference(values_of("mixtral"), lambda values: HfFamily(values, TOKENS))
    assert _REFUSED in found
    assert difference(values_of("mixtral", router_aux_loss_coef=0.0), lambda values: HfFamily(values, TOKENS)) == ""


def test_a_router_that_gets_another_gradient_is_noticed_by_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.model.router_loss._BeginsAt.backward", lambda _, gradient: (gradient, torch.tensor(2.0)))
    found = difference(values_of("mixtral"), lambda values: HfFamily(values, TOKENS))
    assert "in 1 stages the gradient of units." in found


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
@pytest.mark.slow
def test_compiled_code_takes_the_weight_of_each_microbatch(user_caches: Path, transformers: ModuleType) -> None:
    # To compile one layer takes half a minute.
    family = _family("mixtral", num_hidden_layers=1, experts_implementation="batched_mm")
    plain, compiled = (build_stage(family, 1, 3, seed=1) for _ in range(2))
    if transformers.__version__.startswith("5.9."):
        # There the chosen experts' numbers are changed in place, which no compiled backward pass survives.
        with pytest.raises(ConfigError, match=r"cannot be compiled: .* inplace operation"):
            compile_stage(compiled, {2}, user_caches / "compiled")
        return
    compile_stage(compiled, {2}, user_caches / "compiled")
    x = torch.randn(2, TOKENS, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def router_gradients(stage: StageModule, weight: float) -> tuple[list[Tensor], list[Tensor]]:
        stage.zero_grad()
        with stage.weighed(weight) as passes:
            output = stage(x)
        (output**2).sum().backward()
        gates = [p.grad for name, p in stage.named_parameters() if name.endswith("gate.weight")]
        return [gate for gate in gates if gate is not None], [each.loads_E for each in passes]

    for weight in (0.25, 0.5, 0.25):
        expected, loads = router_gradients(plain, weight)
        found, found_loads = router_gradients(compiled, weight)
        assert len(found) == len(expected) == len(found_loads)
        assert all(torch.equal(*pair) for pair in zip(found_loads, loads, strict=True))
        assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(("coefficient", "least", "most"), [(0.1, 0.0, 0.3), (0.0, 0.6, 3.0)], ids=["with", "without"])
def test_after_200_steps_on_text_the_loads_of_all_experts_are_alike(
    coefficient: float, least: float, most: float
) -> None:
    sizes = {"vocab_size": 256, "num_hidden_layers": 2, "num_local_experts": 8, "router_aux_loss_coef": coefficient}
    stage = build_stage(HfFamily(values_of("mixtral", **sizes), _TEXT_TOKENS), 0, 1, seed=1)
    optimizer = InnerOptimizer(stage.named_parameters(), InnerOptimConfig(type="adam"))
    compute = StageCompute(stage, optimizer, run_seed=1, stage=0)
    text = open_pydoc_topics(DataConfig(seq_len=_TEXT_TOKENS)).train
    variations: list[tuple[float, ...]] = []
    for step in range(200):
        key = StepKey(0, 1, step, 0)
        samples = np.random.default_rng(step).integers(text.num_samples, size=8)
        inputs, labels = (torch.from_numpy(array) for array in text.read(samples).everything)
        compute.loss(key, 0, inputs, labels, 1.0)
        variations.append(tuple(router.load_cv for router in compute.totals(key).routers))
        compute.commit(key, 1.0, 5e-3, False)
    # Of a single step 512 tokens tell little.
    means = torch.tensor(variations[-20:]).mean(0)
    assert len(means) == 2
    assert all(least <= float(mean) <= most for mean in means), means
