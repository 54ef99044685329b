"""Tiny models of transformers, one of each kind that is known: their values, and themselves beside stages of them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.hf.family import HfFamily
from shoal.model.hf.library import build_whole
from shoal.model.hf.routers import unknown_routers
from shoal.model.hf.skeleton import Part
from shoal.model.seeding import seeded
from shoal.model.stage import build_stage

TOKENS = 12
_LAYERS = 4
_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_BASE: dict[str, Any] = {**_SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
_SLIDING = {**_BASE, "sliding_window": 4}
_EXPERTS = {
    **_BASE,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_GPT2 = {
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": _LAYERS,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_NEO = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_layers": _LAYERS,
    "num_heads": 4,
    "attention_types": [[["global", "local"], _LAYERS // 2]],
    "window_size": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LATENT = {
    **_SIZES,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

EXACT: dict[str, dict[str, Any]] = {
    "llama": _BASE,
    "qwen2": _BASE,
    "qwen3": _BASE,
    "mistral": _SLIDING,
    "smollm3": _BASE,
    "granite": _BASE,
    # Its norm behind the layers has no parameter.
    "olmo": _BASE,
    "olmo2": _BASE,
    "olmo3": _SLIDING,
    "phi3": _BASE,
    "cohere2": _BASE,
    "gemma": _BASE,
    "gemma2": _SLIDING,
    "gemma3_text": {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": _GPT2,
    "gpt_neox": {**_SIZES, "intermediate_size": 48},
    "gpt_neo": _NEO,
    "bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": _LAYERS, "n_head": 4, "tie_word_embeddings": False},
    "qwen3_moe": _EXPERTS,
    "mixtral": _EXPERTS,
    "olmoe": _EXPERTS,
    "gpt_oss": {**_EXPERTS, "sliding_window": 4},
    "granitemoe": _EXPERTS,
    "deepseek_v3": _LATENT,
    "glm4_moe": {
        **_EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
    },
    "qwen3_next": {
        **_EXPERTS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 16,
    },
    "lfm2": {
        **_BASE,
        "block_ff_dim": 48,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"] * 2,
    },
    "falcon_h1": {
        **_BASE,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "mamba_n_groups": 1,
        "mamba_expand": 1,
    },
}
"""Those that are the same when they are cut, by their `model_type`."""

BALANCED = ["qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe", "qwen3_next"]
"""Those with experts whose config has a coefficient of their routers' loss."""

OPT = {
    "model_type": "opt",
    "vocab_size": 97,
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
"""One that is not: it adds its positions in every part."""


def values_of(kind: str, **more: Any) -> dict[str, Any]:
    """What transformers is told of a tiny model."""
    return {"model_type": kind, **EXACT[kind], **more}


@cache
def family_of(kind: str, is_tied: bool = False) -> HfFamily:
    """The family of a tiny model, whose embeddings may be one parameter."""
    return HfFamily(values_of(kind, tie_word_embeddings=is_tied), TOKENS)


def own_class(family: HfFamily, dtype: torch.dtype) -> tuple[Any, dict[str, str]]:
    """Transformers' own class with our initial values, and its names of our parameters."""
    uncut = build_stage(family, 0, 1, seed=7, dtype=dtype)
    ours = cast("Part", uncut.assembled).model
    with seeded(0):
        theirs = build_whole(ours.config).to(dtype)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    names = {id(parameter): name for name, parameter in ours.named_parameters()}
    return theirs, {name: names[id(parameter)] for name, parameter in uncut.named_parameters()}


def forward_of(theirs: Any, inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the logits of transformers' own class, and its routers' losses by layer, from the logits that it records.

    Nothing of the latter where the installed version does not record them.
    """
    config = theirs.config
    if not getattr(config, "router_aux_loss_coef", None) or unknown_routers(theirs):
        return theirs(input_ids=inputs, use_cache=False).logits, []
    output = theirs(input_ids=inputs, use_cache=False, output_router_logits=True)
    return output.logits, [_even(logits, config.num_experts_per_tok) for logits in output.router_logits]


def _even(logits: Tensor, num_taken: int) -> Tensor:
    """E times the sum over experts of their share of what is taken and their mean probability, word for word."""
    probabilities = torch.softmax(logits, -1)
    num_tokens, num_experts = probabilities.shape
    taken = F.one_hot(probabilities.topk(num_taken).indices, num_experts).sum((0, 1))
    shares = taken.to(probabilities.dtype) / (num_tokens * num_taken)
    return num_experts * torch.sum(shares * probabilities.mean(0))
