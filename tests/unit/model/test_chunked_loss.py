"""The loss in chunks of tokens: gradients of one piece, the same bits for every cut, and one chunk's logits at a time.

Shapes: B samples, T tokens, V vocabulary.
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.families import gpt, tied_gpt
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shoal.clock import SystemClock
from shoal.config import Config
from shoal.config.diloco import InnerOptimConfig
from shoal.config.quant import QuantConfig
from shoal.errors import ConfigError
from shoal.ids import StepKey
from shoal.model.chunked_loss import chunk_tokens
from shoal.model.compiled import compile_stage
from shoal.model.gpt import GptFamily
from shoal.model.gpt_shape import GptShape
from shoal.model.hf.family import HfFamily
from shoal.model.profile import profile_units
from shoal.model.registry import load_family
from shoal.model.stage import Family, StageModule, build_stage, whole_stage
from shoal.optim.inner import InnerOptimizer
from shoal.pipeline.stage_compute import StageCompute
from shoal.quant.apply import apply_quant
from shoal.server.memory import stage_needs
from shoal.swarm.step_operations import Schedule

_CHUNK, _TOKENS, _VOCABULARY = 5, 8, 32
_KEY = StepKey(0, 1, 0, 0)
# Its norms compute in the type of what they get; those of others round to float32.
_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": _VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
_QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": _VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def _hf(values: dict[str, Any], loss_chunk: int | None, *, tied: bool) -> HfFamily:
    return HfFamily({**values, "tie_word_embeddings": tied}, _TOKENS, loss_chunk=loss_chunk)


FAMILIES: dict[str, Callable[[int | None], Family]] = {
    "gpt": lambda chunk: gpt(0.0, chunk),
    "tied gpt": lambda chunk: tied_gpt(0.0, chunk),
    "gpt2": lambda chunk: _hf(_GPT2, chunk, tied=False),
    "tied gpt2": lambda chunk: _hf(_GPT2, chunk, tied=True),
}
ROUNDING: dict[str, Callable[[int | None], Family]] = {"tied qwen3": lambda chunk: _hf(_QWEN, chunk, tied=True)}


def _batch() -> tuple[Tensor, Tensor]:
    """Tokens (3, T) and labels, of which one chunk has none that counts, and another one a few."""
    tokens = torch.randint(3, _VOCABULARY, (3, _TOKENS + 1), generator=torch.Generator().manual_seed(1))
    labels = tokens[:, 1:].clone()
    labels.view(-1)[_CHUNK : 2 * _CHUNK + 2] = -100
    return tokens[:, :-1], labels


def _stages(
    family: Family, num_stages: int, dtype: torch.dtype = torch.float32, quant: QuantConfig | None = None
) -> list[StageModule]:
    stages = [build_stage(family, stage, num_stages, seed=7, dtype=dtype) for stage in range(num_stages)]
    for stage in stages:
        apply_quant(stage, quant)
    return stages


def _trained(stages: Sequence[StageModule]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch, and the gradients of all parameters."""
    head = stages[0].head
    chain = [*stages, *([] if head is None else [head])]
    x, labels = _batch()
    passed: list[tuple[Tensor, Tensor]] = []
    for stage in chain:
        received = x.detach().requires_grad_(x.is_floating_point())
        x = stage(received)
        passed.append((received, x))
    loss = chain[-1].loss(x, labels)
    torch.autograd.backward(loss * 0.75)
    for (_, sent), (received, _) in reversed(list(pairwise(passed))):
        torch.autograd.backward(sent, received.grad)
    gradients = {name: p.grad for stage in stages for name, p in stage.named_parameters() if p.grad is not None}
    assert len(gradients) == sum(len(list(stage.parameters())) for stage in stages)
    return loss.detach(), gradients


@pytest.mark.parametrize("quant", [None, QuantConfig()], ids=["plain", "quantised"])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_loss_and_gradients_are_those_of_one_piece(name: str, num_stages: int, quant: QuantConfig | None) -> None:
    loss, gradients = _trained(_stages(FAMILIES[name](None), num_stages, torch.float64, quant))
    found, chunked = _trained(_stages(FAMILIES[name](_CHUNK), num_stages, torch.float64, quant))
    torch.testing.assert_close(found, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(chunked, gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [*FAMILIES, *ROUNDING])
def test_every_cut_has_the_same_bits_and_another_chunk_has_others(name: str) -> None:
    family_of = {**FAMILIES, **ROUNDING}[name]
    loss, gradients = _trained(_stages(family_of(_CHUNK), 1))
    for num_stages in (2, 3):
        found, cut = _trained(_stages(family_of(_CHUNK), num_stages))
        assert torch.equal(found, loss)
        assert cut.keys() == gradients.keys()
        assert all(torch.equal(cut[each], gradients[each]) for each in gradients)
    _, others = _trained(_stages(family_of(_CHUNK + 1), 1))
    assert not all(torch.equal(others[each], gradients[each]) for each in gradients)


def test_under_autocast_parameters_have_the_gradients_of_one_piece_in_float32() -> None:
    found: list[dict[str, Tensor]] = []
    for chunk in (None, _CHUNK):
        stages = [build_stage(gpt(0.0, chunk), s, 2, seed=7, autocast=torch.bfloat16) for s in range(2)]
        found.append(_trained(stages)[1])
    assert {gradient.dtype for gradient in found[1].values()} == {torch.float32}
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=1e-3)


class _Peak(TorchDispatchMode):
    """Counts the bytes of all storages that live and were made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.most_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and (key := tensor.untyped_storage()._cdata) not in self._known:
                self._known.add(key)
                size = tensor.untyped_storage().nbytes()
                self.bytes += size
                self.most_bytes = max(self.most_bytes, self.bytes)
                weakref.finalize(tensor.untyped_storage(), self._freed, key, size)
        return found

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size


def _compute(family: Family, schedule: Schedule = Schedule.ONE_F_ONE_B) -> StageCompute:
    """The last stage of two, with a block."""
    module = build_stage(family, 1, 2, seed=5, cut=[family.num_units - 2, 2])
    optimizer = InnerOptimizer(module.named_parameters(), InnerOptimConfig())
    return StageCompute(module, optimizer, run_seed=5, stage=1, schedule=schedule)


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
@pytest.mark.parametrize("num_samples", [2, 4])
def test_a_step_holds_the_logits_of_one_chunk(schedule: Schedule, num_samples: int) -> None:
    tokens, width, vocabulary, chunk = 32, 8, 20_000, 16
    family = GptFamily(GptShape(tokens, width, 1, 1, vocab_size=vocabulary), chunk)
    hidden, labels = torch.randn(num_samples, tokens, width), torch.ones(num_samples, tokens, dtype=torch.int64)
    chunk_bytes, weight_bytes = 4 * chunk * vocabulary, 4 * width * vocabulary
    compute = _compute(family, schedule)
    with _Peak() as peak:
        for microbatch in range(6):
            compute.loss(_KEY, microbatch, hidden, labels, 0.25)
        # Logits, their log-softmax and its gradient; gradients of the step so far, of the microbatch, and of the chunk.
        # A block keeps 32 times what it takes, with zero_bubble until the gradients of its parameters are computed.
        at_most = 3 * chunk_bytes + 3 * weight_bytes + 6 * 32 * hidden.nbytes
        assert chunk_bytes < peak.most_bytes < at_most
        compute.version = 1
        compute.base_parameters = compute.averaged.parameters.flat
        peak.most_bytes = before = peak.bytes
        compute.evaluate(hidden, labels)
    # No gradients: logits and their log-softmax, beside the parameters of the round.
    assert peak.most_bytes - before < 2 * chunk_bytes + 2 * weight_bytes + 32 * hidden.nbytes
    assert at_most < num_samples * tokens * 4 * vocabulary * 2


def test_an_evaluation_takes_the_parameters_of_the_round_for_the_last_unit_too() -> None:
    compute = _compute(gpt(0.0, _CHUNK))
    hidden, labels = torch.randn(3, _TOKENS, 16), _batch()[1]
    base, before = compute.averaged.parameters.flat().clone(), compute.evaluate(hidden, labels)
    compute.base_parameters = lambda: base
    compute.loss(_KEY, 0, hidden, labels, 1.0)
    compute.commit(_KEY, 1.0, 0.1, False)
    assert torch.equal(compute.evaluate(hidden, labels), before)
    compute.start_round()
    assert not torch.equal(compute.evaluate(hidden, labels), before)


def test_gradients_are_computed_once_and_again_if_they_are_asked_for_again() -> None:
    [stage] = _stages(gpt(0.0, _CHUNK), 1)
    calls: list[int] = []
    cast("Any", stage.units["head"]).register_forward_hook(lambda *_: calls.append(1))
    tokens, labels = _batch()
    loss, weight = stage.loss(stage(tokens), labels), stage.get_parameter("units.head.logits.weight")
    [first] = torch.autograd.grad(loss, weight, retain_graph=True)
    # One of the five chunks has no target.
    assert len(calls) == 4
    [again] = torch.autograd.grad(loss, weight)
    assert len(calls) == 8
    assert torch.equal(first, again)
    assert weight.grad is None


def test_a_split_backward_computes_the_last_unit_once_for_each_chunk() -> None:
    compute = _compute(gpt(0.0, _CHUNK), Schedule.ZERO_BUBBLE)
    hidden, labels = torch.randn(3, _TOKENS, 16), _batch()[1]
    compute.loss(_KEY, 0, hidden, labels, 0.5)  # the first one is compared with a whole backward
    calls: list[int] = []
    cast("Any", compute.module.units["head"]).register_forward_hook(lambda *_: calls.append(1))
    compute.loss(_KEY, 1, hidden, labels, 0.5)
    for microbatch in range(2):
        compute.weights(_KEY, microbatch)
    assert len(calls) == 4


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="no C++ compiler")
@pytest.mark.parametrize("cut", [[2, 2], [3, 1]])
def test_what_is_before_the_last_unit_can_be_compiled(cut: list[int], user_caches: Path) -> None:
    plain, compiled = (build_stage(gpt(0.0, _CHUNK), 1, 2, seed=7, cut=cut) for _ in range(2))
    compile_stage(compiled, {3}, user_caches / "compiled")
    hidden, labels = torch.randn(3, _TOKENS, 16).requires_grad_(), _batch()[1]
    gradients: list[list[Tensor]] = []
    for stage in (plain, compiled):
        loss = stage.loss(stage(hidden), labels)
        gradients.append(list(torch.autograd.grad(loss, list(stage.parameters()))))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_a_small_vocabulary_is_computed_in_one_piece_and_a_large_one_in_chunks() -> None:
    assert [chunk_tokens(v, None) for v in (256, 4096)] == [None, None]
    assert [chunk_tokens(v, None) for v in (4097, 50_257, 65_536, 262_144)] == [4095, 333, 256, 256]
    assert chunk_tokens(256, 7) == 7
    small = build_stage(gpt(), 1, 2, seed=7)
    assert small.last_unit is None
    assert small.output_spec.shape == (_TOKENS, _VOCABULARY)


def test_a_model_that_is_not_only_trained_puts_out_logits() -> None:
    family = gpt(0.0, _CHUNK)
    stage = build_stage(family, 0, 1, seed=7)
    tokens, labels = _batch()
    whole = whole_stage(family, dict(stage.units))
    assert whole(tokens).shape == (3, _TOKENS, _VOCABULARY)
    assert stage(tokens).shape == (3, _TOKENS, 16) == (3, *stage.output_spec.shape)
    for_loss = whole_stage(family, dict(stage.units), in_chunks=True)
    assert torch.equal(for_loss(tokens, labels=labels), stage.loss(stage(tokens), labels))
    torch.testing.assert_close(whole(tokens, labels=labels), stage(tokens, labels=labels))


def _config(chunk: int | None, **model: Any) -> Config:
    sections = {"model": {"loss_chunk_tokens": chunk, **model}, "data": {"seq_len": 64}}
    return Config.model_validate({**sections, "model_pipeline": {"stages": 2, "microbatches": 2}})


def test_memory_is_planned_and_units_are_measured_with_chunks() -> None:
    # model.loss_chunk_tokens
    whole, chunked, larger = (stage_needs(_config(chunk, vocab_size=4096))[1] for chunk in (None, 16, 32))
    logits_bytes = 4 * 4096
    assert whole.sample_bytes - chunked.sample_bytes > 2 * 64 * logits_bytes
    assert 16 * 3 * logits_bytes <= larger.open_bytes - chunked.open_bytes < 16 * 4 * logits_bytes
    assert whole.eval_sample_bytes > chunked.eval_sample_bytes
    assert whole.device_bytes == chunked.device_bytes
    config = _config(16, vocab_size=512)
    family = load_family(config.model, config.data)
    costs_s = profile_units(family, samples=2, seed=0, device=torch.device("cpu"), clock=SystemClock()).costs_s
    assert all(cost_s > 0 for cost_s in costs_s)


def test_chunks_of_what_has_no_tokens_are_refused() -> None:
    config = Config.model_validate(
        {"model": {"family": "resnet18", "loss_chunk_tokens": 8}, "data": {"task_type": "cv"}}
    )
    with pytest.raises(ConfigError, match=r"model.loss_chunk_tokens = 8: .* resnet18 .* remove the key"):
        load_family(config.model, config.data)
