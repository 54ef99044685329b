"""The family gpt as a GPT-2 of transformers, and back: names, shapes and configuration. No transformers is needed.

    native                                    transformers
    units.embedding.token.weight       (V,C)  transformer.wte.weight             (V,C)
    units.block_0.attention.qkv.weight (3C,C) transformer.h.0.attn.c_attn.weight (C,3C)
    units.head.logits.weight           (V,C)  lm_head.weight                     (V,C), or tied to wte

Both keep q, k and v in this order, and norms add 1e-5; a projection's weight is transposed there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from shoal.checkpoint.byte_tokenizer import own_tokenizer, tokens_are_bytes
from shoal.checkpoint.hf_stored import StoredTensors
from shoal.checkpoint.model_source import ModelSource
from shoal.config.load import describing_model
from shoal.config.schema import Config
from shoal.errors import ConfigError
from shoal.ids import MAX_PARTS
from shoal.model.hf.repository import Repository

MODEL_TYPE: Final = "gpt2"
ACTIVATIONS: Final = {"gelu": "gelu", "gelu_new": "gelu_new", "gelu_pytorch_tanh": "gelu_new"}
"""What transformers calls an activation -> `model.activation`."""
_NORM_EPS = 1e-5
_HEAD, _TOKENS = "lm_head.weight", "transformer.wte.weight"
_PLACES: Final = {
    "embedding.token": "wte",
    "embedding.position": "wpe",
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "head.norm": "ln_f",
}
_TRANSPOSED: Final = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
_MASKS: Final = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")
"""Constants that earlier versions of transformers have saved."""
_FIXED: Final = {
    "layer_norm_epsilon": _NORM_EPS,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""What the native family cannot do otherwise; all are the defaults there."""


def gpt2_name(name: str) -> tuple[str, bool]:
    """Where a native tensor stands in a GPT-2, and whether its two dimensions are swapped there."""
    module, kind = name.removeprefix("units.").rsplit(".", 1)
    if module == "head.logits":
        return _HEAD, False
    block = re.fullmatch(r"block_(\d+)\.(.+)", module)
    if block is None:
        return f"transformer.{_PLACES[module]}.{kind}", False
    return f"transformer.h.{block[1]}.{_PLACES[block[2]]}.{kind}", _is_transposed(name)


def gpt2_config(config: Config, ends: Mapping[str, int | None]) -> dict[str, Any]:
    """The `config.json` of a native gpt.

    Args:
        ends: What begins and ends a text.
    """
    model = config.model
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": MODEL_TYPE,
        "vocab_size": model.vocab_size,
        "n_positions": config.data.seq_len,
        "n_embd": model.hidden_size,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.mlp_ratio * model.hidden_size,
        "activation_function": model.activation,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
        **ends,
        "dtype": "float32",
        **_FIXED,
    }


def open_gpt2(folder: Path, described: Mapping[str, Any], configuration: Mapping[str, Any] | None) -> ModelSource:
    """Open a folder of transformers as a native gpt.

    Args:
        described: Its `config.json`.
        configuration: Of the run that it was exported from; None: of a model from elsewhere, which is cut into one
            stage for each block, so that reading it takes no more memory than a block.

    Raises:
        ConfigError: It is no model that the native family can be.
        StateMismatch: The tensors are not those of such a model.
        OSError: A file cannot be read.
    """
    config = _native_config(folder, described, configuration)
    files = StoredTensors(Repository(str(folder)))
    tensors = {_full_name(name): name for name in files if not _MASKS.fullmatch(name)}
    is_tied = bool(described.get("tie_word_embeddings", True))
    if is_tied and _TOKENS in tensors:
        tensors[_HEAD] = tensors[_TOKENS]
    places = {_native_name(name): name for name in tensors}

    def shape(name: str) -> tuple[int, ...]:
        stored = files.shape(tensors[places[name]])
        return stored[::-1] if _is_transposed(name) else stored

    def read(name: str) -> Tensor:
        values = files.read(tensors[places[name]])
        if values.dtype in (torch.float16, torch.bfloat16):
            values = values.float()
        return values.t().contiguous() if _is_transposed(name) else values

    return ModelSource(
        folder,
        config,
        {name: shape(name) for name in places},
        read,
        tokenizer=own_tokenizer(folder),
        is_bytes=tokens_are_bytes(folder, config.model.vocab_size) if configuration is None else config.data.has_bytes,
    )


def _native_name(name: str) -> str:
    """The inverse of `gpt2_name`; a name that it does not know stays as it is, and is found to be odd later."""
    if name == _HEAD:
        return "units.head.logits.weight"
    inverse = {place: module for module, place in _PLACES.items()}
    block = re.fullmatch(r"transformer\.h\.(\d+)\.(.+)\.(weight|bias)", name)
    if block is not None and block[2] in inverse:
        return f"units.block_{block[1]}.{inverse[block[2]]}.{block[3]}"
    other = re.fullmatch(r"transformer\.(\w+)\.(weight|bias)", name)
    if other is not None and other[1] in inverse:
        return f"units.{inverse[other[1]]}.{other[2]}"
    return name


def _is_transposed(name: str) -> bool:
    """Of a native tensor, whether its two dimensions are swapped in a GPT-2; a name that is none is not."""
    return name.endswith(".weight") and name.removesuffix(".weight").endswith(_TRANSPOSED)


def _full_name(name: str) -> str:
    """Files of the bare model leave the first part out."""
    return name if name == _HEAD or name.startswith("transformer.") else f"transformer.{name}"


def _native_config(folder: Path, described: Mapping[str, Any], configuration: Mapping[str, Any] | None) -> Config:
    model, context = _sizes(folder, described)
    if configuration is None:
        blocks = model["num_layers"]
        cut = [1 + (stage == 0) + (stage == blocks - 1) for stage in range(blocks)]
        configuration = {"model_pipeline": {"stages": blocks, "cut": cut}}
    with describing_model(folder):
        values = {
            **configuration,
            "device": "cpu",
            "quant": None,
            "model": {**configuration.get("model", {}), **model},
            "data": {**configuration.get("data", {}), "seq_len": context},
        }
        return Config.model_validate(values)


def _sizes(folder: Path, described: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Section `model` and the context of a GPT-2, as its `config.json` says.

    Raises:
        ConfigError: It is one that the native family cannot be; all reasons are named.
    """
    problems = [
        f"{name} is {described[name]!r}, shoal has {value!r}"
        for name, value in _FIXED.items()
        if name in described and not _equals(described[name], value)
    ]
    activation = described.get("activation_function", "gelu_new")
    if activation not in ACTIVATIONS:
        problems.append(f"activation_function is {activation!r}, shoal has {', '.join(ACTIVATIONS)}")
    sizes = {
        name: described.get(name, described.get(other))
        for name, other in (
            ("vocab_size", ""),
            ("n_positions", "max_position_embeddings"),
            ("n_embd", "hidden_size"),
            ("n_layer", "num_hidden_layers"),
            ("n_head", "num_attention_heads"),
        )
    }
    problems += [f"{name} is {size!r}" for name, size in sizes.items() if type(size) is not int or size < 1]
    if not problems and sizes["n_layer"] > MAX_PARTS:
        problems.append(f"n_layer is {sizes['n_layer']}, and {MAX_PARTS} layers are the most that one is read with")
    if problems:
        raise ConfigError(f"the model in {folder} is none that the family gpt can be: " + "; ".join(problems))
    width = sizes["n_embd"]
    inner = described.get("n_inner") or 4 * width
    if type(inner) is not int or inner % width:
        raise ConfigError(
            f"the model in {folder} is none that the family gpt can be: n_inner is {inner!r}, no multiple of n_embd = "
            f"{width}"
        )
    dropout = described.get("resid_pdrop", 0.1)
    model = {
        "family": "gpt",
        "num_layers": sizes["n_layer"],
        "hidden_size": width,
        "num_heads": sizes["n_head"],
        "mlp_ratio": inner // width,
        "vocab_size": sizes["vocab_size"],
        "activation": ACTIVATIONS[activation],
        "dropout": dropout,
    }
    return model, sizes["n_positions"]


def _equals(found: object, value: float | bool) -> bool:
    return isinstance(found, int | float) and math.isclose(found, value, rel_tol=1e-9)
