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
}
"""Models that files of DistQat name, in small letters, as their config.json says: such a run asks no hub."""

_LANGUAGE_MODELS: Final = {"distilgpt2": "distilbert/distilgpt2", "gptneo": "EleutherAI/gpt-neo-1.3B"}
"""Families of language models, and which one it is where `data.full_model_name` says none."""
_OF_FIXED_SIZE: Final = ("hid_dim", "n_layers", "idx", "extra")
_DEFAULT: Final = [{"model_name": "mlp.full"}]
_BYTES: Final = "The model that data.full_model_name names, of transformers. Text is trained as bytes."


@dataclass(slots=True)
class TranslatedModel:
    """What becomes of a pipeline.

    Attributes:
        said: values by dotted key.
        notes: why some of them are what they are.
        dead: keys of the entries that have no effect, with the reason.
        problems: what cannot be translated.
    """

    said: dict[str, object] = field(default_factory=dict[str, object])
    notes: dict[str, str] = field(default_factory=dict[str, str])
    dead: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[str] = field(default_factory=list[str])


def translated_model(items: object, full_model_name: object) -> TranslatedModel:
    """Translate `model_pipeline.pipeline` and `data.full_model_name`, each None where the file does not say it."""
    result = TranslatedModel()
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
        if kind in _LANGUAGE_MODELS:
            _translate_language_model(result, entries, str(full_model_name or _LANGUAGE_MODELS[kind]))
        else:
            _translate_native(result, kept, entries)
            if full_model_name is not None:
                result.dead[FULL_MODEL_NAME] = "only a language model is read from there"
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
    if kind in _LANGUAGE_MODELS:
        dead |= {"num_classes": "a language model has none", "extra": "no model reads it"}
        if num_entries == 1:
            dead["n_layers"] = "the whole model has as many as data.full_model_name says"
    elif kind in NATIVE_FAMILIES:
        fixed = "the section biggan says its sizes" if kind == "biggan" else f"DistQat's {kind} has a fixed size"
        dead |= dict.fromkeys(_OF_FIXED_SIZE, fixed)
    return dead


def _translate_native(result: TranslatedModel, kept: list[dict[str, Any]], entries: list[PipelineEntry]) -> None:
    family = family_of(entries, (*NATIVE_FAMILIES, *_LANGUAGE_MODELS))
    applied = apply_pipeline({"model_pipeline": {"pipeline": kept}})
    for section in ("model", "model_pipeline"):
        result.said |= {f"{section}.{key}": value for key, value in applied[section].items()}
    if family.startswith("resnet"):
        result.said["model.stem"] = "imagenet"
        result.notes["model.stem"] = 'That of all ResNets of DistQat; for small images "cifar" is better.'


def _translate_language_model(result: TranslatedModel, entries: list[PipelineEntry], name: str) -> None:
    family_of(entries, tuple(_LANGUAGE_MODELS))
    sizes, flow = sizes_of(entries, "gpt"), flow_of(entries)
    result.said["model.family"] = "hf"
    result.said |= {f"model_pipeline.{key}": value for key, value in flow.items()}
    result.notes["model.family"] = _BYTES
    published = PUBLISHED.get(name.lower())
    if published is None:
        result.said["model.name_or_path"] = name
        result.notes["model.name_or_path"] = "Its config.json is read where a run begins; the weights are random."
        return
    result.said["model.extra"] = published
    result.notes["model.extra"] = f"The config.json of {name}; the weights are random."
    if len(entries) > 1:
        result.notes["model.extra"] += " One embedding is at both ends; DistQat's stages have two: model.tie: false."
    widths = {"hidden_size": ("hidden_size", "n_embd"), "num_layers": ("num_layers", "n_layer")}
    for key, names in widths.items():
        [there] = [published[each] for each in names if each in published]
        if sizes.get(key, there) != there:
            said = {"hidden_size": "hid_dim", "num_layers": "the sum of n_layers"}[key]
            result.problems.append(
                f"{PIPELINE}: {said} is {sizes[key]}, but {name} of {FULL_MODEL_NAME} has {there}; make them agree"
            )
