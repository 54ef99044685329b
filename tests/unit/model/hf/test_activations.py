"""What a layer of transformers keeps for its backward is about what a server plans with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.model.hf.family import HfFamily
from shoal.model.partition import StageUnits
from shoal.model.stage import StageModule

_TOKENS, _SAMPLES = 128, 4
_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "max_position_embeddings": 256,
}
_LAYERS: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "qwen3": _BASE,
    "gemma3_text": {**_BASE, "intermediate_size": 384},
    # Without the fused kernel: it caps its scores.
    "gemma2": {**_BASE, "intermediate_size": 384},
    # With dropout in its attention.
    "gpt2": {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "mixtral": {**_BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    # With a gated delta network in place of attention.
    "qwen3_next": {
        **_BASE,
        "num_hidden_layers": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 96,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 16,
    },
    # With Mamba beside attention; the tokens are half of a chunk.
    "falcon_h1": {
        **_BASE,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
    },
}


def _kept_bytes(stage: StageModule, *context: Tensor) -> int:
    """Bytes that autograd keeps of a stage's forward, its output included, without parameters and the input."""
    spec, kept = stage.input_spec, dict[int, Tensor]()
    received = torch.randn(_SAMPLES, *spec.shape).requires_grad_()

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage(received, *context)
    kept[output.untyped_storage().data_ptr()] = output
    for tensor in (received, *stage.parameters()):
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _family(kind: str, *, packs: bool = False, tokens: int = _TOKENS) -> HfFamily:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    values = {"model_type": kind, "tie_word_embeddings": False, **special, **_LAYERS[kind]}
    return HfFamily(values, tokens, packs=packs)


def _layer(family: HfFamily) -> StageModule:
    units = nn.ModuleDict({family.unit_name(1): family.build_unit(1)})
    return StageModule(family, units, StageUnits(range(1, 2)), 1, family.num_units)


@pytest.mark.parametrize("kind", _LAYERS)
def test_a_layer_keeps_about_what_is_planned(kind: str) -> None:
    family = _family(kind)
    assert _kept_bytes(_layer(family)) / _SAMPLES == pytest.approx(family.activation_bytes(1), rel=0.25)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_of_texts_that_share_a_sample_a_layer_keeps_the_mask_too(kind: str) -> None:
    family = _family(kind, packs=True, tokens=512)
    positions = torch.arange(512).remainder(200).repeat(_SAMPLES, 1)
    assert _kept_bytes(_layer(family), positions) / _SAMPLES == pytest.approx(family.activation_bytes(1), rel=0.15)
