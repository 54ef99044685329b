"""The values of a model of transformers in small: some layers of each kind, and a thousandth of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

NUM_LAYERS: Final = 4
_SIZES: Final = {
    "block_dim": 32,
    "block_ff_dim": 48,
    "ffn_dim": 48,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "linear_key_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "mamba_d_head": 8,
    "mamba_d_ssm": 32,
    "mamba_d_state": 8,
    "mamba_expand": 1,
    "mamba_n_groups": 1,
    "mamba_n_heads": 4,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "n_inner": 48,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "rotary_dim": 8,
    "shared_expert_intermediate_size": 16,
    "sliding_window": 4,
    "topk_group": 1,
    "v_head_dim": 8,
    "vocab_size": 96,
    "window_size": 4,
    "word_embed_proj_dim": 32,
}
_TOKENS: Final = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NUM_HEADS: Final = _SIZES["num_attention_heads"]
# Of the layers from which the kind of a layer is another.
_FIRST_LAYERS: Final = ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")


def small_values(values: Mapping[str, Any], config: Any, **sizes: int) -> dict[str, Any]:
    """Return the values of a small model of the same kind.

    Args:
        config: What transformers makes of `values`.
        sizes: In place of a twin's own.
    """
    small = few_layers(values, config)
    names: Mapping[str, str] = config.attribute_map
    said: dict[str, Any] = config.to_dict()
    for key, size in {**_SIZES, **_TOKENS, **sizes}.items():
        name = names.get(key, key)
        if said.get(name) is not None:
            small[name] = size
    heads, of_keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if of_keys is not None:
        # As many, or fewer, as in the model.
        small["num_key_value_heads"] = _NUM_HEADS if of_keys == heads else 1 if of_keys == 1 else _NUM_HEADS // 2
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(key), dict):
            small[key] = _small_rope(small[key])
    return small


def few_layers(values: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return the values of a model with a few of its layers, at least one of each kind, of the same sizes."""
    few, count = dict(values), config.num_hidden_layers
    lists = {
        name: cast("list[Any]", value)
        for name, value in cast("dict[str, Any]", vars(config)).items()
        if isinstance(value, list) and not name.startswith("_") and len(cast("list[Any]", value)) == count
    }
    layers = _one_of_each(count, list(lists.values()))
    few |= {name: [value[layer] for layer in layers] for name, value in lists.items()}
    names: Mapping[str, str] = config.attribute_map
    few[names.get("num_hidden_layers", "num_hidden_layers")] = len(layers)
    if (kinds := few.get("attention_types") or getattr(config, "attention_types", None)) is not None:
        # GPT-Neo's: kinds, and how often they repeat.
        pattern = [kind for repeated, times in kinds for kind in repeated * times][: len(layers)]
        few["attention_types"] = [[pattern, 1]]
        few.pop("attention_layers", None)
    for name in _FIRST_LAYERS:
        if isinstance(first := getattr(config, name, None), int):
            few[name] = min(first, len(layers) // 2)
    if isinstance(dense := getattr(config, "mlp_only_layers", None), list):
        few["mlp_only_layers"] = [layer for layer in cast("list[int]", dense) if layer < len(layers)]
    return few


def _one_of_each(count: int, lists: list[list[Any]]) -> list[int]:
    """Return some layers in order: the first of every kind, and more from the beginning until they are enough."""
    # A list without a repetition numbers the layers: it says nothing of their kinds.
    telling = [each for each in lists if len(set(map(repr, each))) < count]
    kinds = [repr([each[layer] for each in telling]) for layer in range(count)]
    firsts = [layer for layer in range(count) if kinds.index(kinds[layer]) == layer]
    others = [layer for layer in range(count) if layer not in firsts]
    return sorted([*firsts, *others[: max(0, NUM_LAYERS - len(firsts))]])


def _small_rope(rope: Any) -> Any:
    """Lists of factors have one for each pair of a head's values."""
    if isinstance(rope, dict):
        return {key: _small_rope(value) for key, value in cast("dict[str, Any]", rope).items()}
    return cast("list[Any]", rope)[: _SIZES["head_dim"] // 2] if isinstance(rope, list) else rope
