"""DistQat's `model_pipeline.pipeline` and `data.full_model_name`, as the keys of `model` and `model_pipeline`.

Its language models are models of transformers under names of their own, with the sizes that the named model has. What
an entry says without effect there has none here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from pydantic import ValidationError

from shoal.config.distqat_names import FULL_MODEL_NAME, PIPELINE, REMOVED
from shoal.config.model import NATIVE_FAMILIES, PipelineEntry
from shoal.config.pipeline_entries import apply_pipeline, family_of, flow_of, sizes_of

_GPT_NEO: Final[dict[str, Any]] = {
    "model_type": "gpt_neo",
    "vocab_size": 50257,
    "max_position_embeddings": 2048,
    "window_size": 256,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}
_GPT_2: Final[dict[str, Any]] = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
}

_WAV2VEC2_BASE: Final[dict[str, Any]] = {
    "vocab_size": 32,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "conv_dim": [512, 512, 512, 512, 512, 512, 512],
    "conv_kernel": [10, 3, 3, 3, 3, 2, 2],
    "conv_stride": [5, 2, 2, 2, 2, 2, 2],
    "num_conv_pos_embeddings": 128,
    "num_conv_pos_embedding_groups": 16,
    "feat_extract_norm": "group",
    "do_stable_layer_norm": False,
    "activation_dropout": 0.0,
    "attention_dropout": 0.1,
    "feat_proj_dropout": 0.1,
    "final_dropout": 0.0,
    "hidden_dropout": 0.1,
    "layer_norm_eps": 1e-5,
    "initializer_range": 0.02,
}


def _gpt_neo(hidden_size: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    types = [[["global", "local"], num_layers // 2]]
    return {
        **_GPT_NEO,
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "attention_types": types,
    }


PUBLISHED: Final[dict[str, dict[str, Any]]] = {
    "distilbert/distilgpt2": {**_GPT_2, "n_embd": 768, "n_layer": 6, "n_head": 12},
    "eleutherai/gpt-neo-125m": _gpt_neo(768, 12, 12),
    "eleutherai/gpt-neo-1.3b": _gpt_neo(2048, 24, 16),
    "eleutherai/gpt-neo-2.7b": _gpt_neo(2560, 32, 20),
    "facebook/wav2vec2-base": _WAV2VEC2_BASE,
}
"""Models that files of DistQat name, in small letters, as their config.json says: such a run asks no hub."""

_SPEECH: Final = "wav2vec2"
_OF_TRANSFORMERS: Final = {
    "distilgpt2": "distilbert/distilgpt2",
    "gptneo": "EleutherAI/gpt-neo-1.3B",
    _SPEECH: "facebook/wav2vec2-base",
}
"""Families of models of transformers, and which one it is where `data.full_model_name` says none."""
_OF_FIXED_SIZE: Final = ("hid_dim", "n_layers", "idx", "extra")
_DEFAULT: Final = [{"model_name": "mlp.full"}]
_BYTES: Final = "The model that data.full_model_name names, of transformers. Text is trained as bytes."

_CHARACTERS: Final = "The model that data.full_model_name names, of transformers. Its convolutions are trained too."


@dataclass(slots=True)
class Translated:
    """What becomes of a part of a file.

    Attributes:
        said: values by dotted key.
        notes: why some of them are what they are.
        dead: keys that have no effect, with the reason.
    """

    said: dict[str, object] = field(default_factory=dict[str, object])
    notes: dict[str, str] = field(default_factory=dict[str, str])
    dead: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[str] = field(default_factory=list[str])


def translated_model(items: object, full_model_name: object) -> Translated:
    """Translate `model_pipeline.pipeline` and `data.full_model_name`, each None where the file does not say it."""
    result = Translated()
    if items is None:
        items = _DEFAULT
        result.notes["model.family"] = f"DistQat's default, where there is no {PIPELINE}."
    if not isinstance(items, Sequence) or not all(isinstance(item, Mapping) for item in cast(Sequence[object], items)):
        result.problems.append(f"{PIPELINE} = {items!r}: must be a list of stages")
        return result
    given = cast(Sequence[Mapping[str, Any]], items)
    kind = str(given[0].get("model_name", "")).rpartition(".")[0] if given else ""
    dead = _without_effect(kind, len(given))
    for key in dict.fromkeys(key for item in given for key in item if key in dead):
        result.dead[f"{PIPELINE}.{key}"] = dead[key]
    try:
        kept = [{key: value for key, value in item.items() if key not in dead} for item in given]
        entries = [PipelineEntry.model_validate(entry) for entry in kept]
        if kind in _OF_TRANSFORMERS:
            _translate_of_transformers(result, entries, str(full_model_name or _OF_TRANSFORMERS[kind]))
        else:
            _translate_native(result, kept, entries)
            if full_model_name is not None:
                result.dead[FULL_MODEL_NAME] = "only a model of transformers is read from there"
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            where = ".".join(str(part) for part in detail["loc"])
            result.problems.append(f"{PIPELINE}: {where} = {detail['input']!r}: {detail['msg']}")
    except ValueError as error:
        result.problems.append(str(error))
    return result


def _without_effect(kind: str, num_entries: int) -> dict[str, str]:
    """Return the keys of an entry that mean nothing to a family, with the reason."""
    dead = {"idx": REMOVED[f"{PIPELINE}.idx"]}
    if kind in _OF_TRANSFORMERS:
        dead |= {"num_classes": "a model of transformers has none", "extra": "no model reads it"}
        if num_entries == 1:
            dead["n_layers"] = "the whole model has as many as data.full_model_name says"
    elif kind in NATIVE_FAMILIES:
        fixed = "the section biggan says its sizes" if kind == "biggan" else f"DistQat's {kind} has a fixed size"
        dead |= dict.fromkeys(_OF_FIXED_SIZE, fixed)
    return dead


def _translate_native(result: Translated, kept: list[dict[str, Any]], entries: list[PipelineEntry]) -> None:
    family = family_of(entries, (*NATIVE_FAMILIES, *_OF_TRANSFORMERS))
    applied = apply_pipeline({"model_pipeline": {"pipeline": kept}})
    for section in ("model", "model_pipeline"):
        result.said |= {f"{section}.{key}": value for key, value in applied[section].items()}
    if family.startswith("resnet"):
        result.said["model.stem"] = "imagenet"
        result.notes["model.stem"] = 'That of all ResNets of DistQat; for small images "cifar" is better.'


def _translate_of_transformers(result: Translated, entries: list[PipelineEntry], name: str) -> None:
    family = family_of(entries, tuple(_OF_TRANSFORMERS))
    sizes, flow = sizes_of(entries, "gpt"), flow_of(entries)
    is_speech = family == _SPEECH
    if is_speech and "cut" in flow:
        # The convolutions are a unit, and so is what comes between them and the layers.
        flow["cut"][0] += 1
    result.said["model.family"] = _SPEECH if is_speech else "hf"
    result.said |= {f"model_pipeline.{key}": value for key, value in flow.items()}
    result.notes["model.family"] = _CHARACTERS if is_speech else _BYTES
    published = PUBLISHED.get(name.lower())
    if published is None:
        result.said["model.name_or_path"] = name
        result.notes["model.name_or_path"] = "Its config.json is read where a run begins; the weights are random."
        return
    result.said["model.extra"] = published
    result.notes["model.extra"] = f"The config.json of {name}; the weights are random."
    if len(entries) > 1 and not is_speech:
        result.notes["model.extra"] += " One embedding is at both ends; DistQat's stages have two: model.tie: false."
    widths = {"hidden_size": ("hidden_size", "n_embd"), "num_layers": ("num_layers", "n_layer", "num_hidden_layers")}
    for key, names in widths.items():
        [there] = [published[each] for each in names if each in published]
        if sizes.get(key, there) != there:
            said = {"hidden_size": "hid_dim", "num_layers": "the sum of n_layers"}[key]
            result.problems.append(
                f"{PIPELINE}: {said} is {sizes[key]}, but {name} of {FULL_MODEL_NAME} has {there}; make them agree"
            )
