"""`--tiny`: the run of a configuration in small, for a first try: the same structure, on data that shoal carries.

    model      the same kind, its pattern of layers, tied or not, its experts; few layers, narrow ones; random weights
    stages     as many, at most four
    data       what shoal carries, in short samples
    training   a few short rounds; of image models they average

What a flag or the environment says stays as it is said; of a model of transformers all sizes become small, but the
vocabulary of a tokenizer that is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from shoal.config.load import load_with_origins
from shoal.config.model import NATIVE_FAMILIES, RESNET_BLOCKS, ModelConfig
from shoal.config.schema import Config
from shoal.errors import ConfigError
from shoal.model.hf.described import OF_TRANSFORMERS, SPEECH

_MOST_BLOCKS: Final = 4
_MOST_HEADS: Final = 4
_HEAD_WIDTH: Final = 8
_MOST_WIDTH: Final = 64
_NUM_BYTES: Final = 256
_GAN_WIDTH: Final = 16
_ATTENDED: Final = {"generator": 8, "discriminator": 4}
"""At which size each player of a GAN attends to itself, where images have 8 pixels."""
_MOST: Final = {
    "data.seq_len": 64,
    "data.augment.crop_padding": 2,
    "model_pipeline.stages": _MOST_BLOCKS,
    "model_pipeline.microbatches": 4,
    "diloco.lr_schedule.warmup_steps": 5,
    "diloco.inner_steps": 10,
    "diloco.outer_steps": 3,
    "diloco.batch_size_per_step": 8,
    "diloco.gradient_accumulation_steps": 2,
}
_DIGITS: Final[dict[str, Any]] = {
    "data.dataset_name": "digits",
    "data.num_channels": 1,
    "data.img_size": 8,
    "model.num_classes": 10,
}
_EMBEDDED: Final[dict[str, dict[str, Any]]] = {
    "llm": {"data.dataset_name": "pydoc-topics"},
    "cv": _DIGITS,
    "image_gen": _DIGITS,
    "speech": {"data.dataset_name": "tones", "data.max_audio_s": 1.0, "data.max_characters": 16},
}
"""What shoal carries for each task, and what shape it has."""
_AVERAGING: Final = {"diloco.outer_optim.sgd_lr": 1.0, "diloco.outer_optim.sgd_momentum": 0.0}
"""Norms keep what the replicas have seen. In a few rounds an outer step of less does not lead parameters there."""


def load_tiny(path: Path, flags: Sequence[str], other_flags: Sequence[str]) -> Config:
    """Load a configuration in small.

    Raises:
        ConfigError: As `load_config` does, or the model is none that shoal can make small.
    """
    config, origins = load_with_origins(path, flags, other_flags=other_flags)
    said = {name for name, origin in origins.items() if origin != str(path)}
    values = config.model_dump()
    changes = {name: value for name, value in _changes(config, said) if name not in said}
    for name, value in changes.items():
        _put(values, name, value)
    try:
        tiny = Config.model_validate(values)
        if tiny.model.family in OF_TRANSFORMERS:
            _put(values, "model", {**values["model"], **_small_of_transformers(tiny)})
            tiny = Config.model_validate(values)
    except ValidationError as error:
        reasons = "\n".join(detail["msg"].removeprefix("Value error, ") for detail in error.errors())
        raise ConfigError(f"--tiny: what is said besides does not go with the small sizes:\n{reasons}") from None
    if problems := tiny.run_problems():
        raise ConfigError("\n".join(problems))
    return tiny


def _changes(config: Config, said: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield what a small run has in place of what the file says."""
    for name, most in _MOST.items():
        yield name, min(most, _value(config, name))
    if not said & {"model_pipeline.cut", "model_pipeline.pipeline"}:
        # It names the units of the large model.
        yield "model_pipeline.cut", None
    if "data.dataset_name" not in said:
        yield from _EMBEDDED[config.data.task_type].items()
        yield "data.arguments", {}
        yield "data.dataset_config", None
        yield "data.dataset_split", "train"
        yield "data.eval_split", None
    # The small model is one of bytes.
    yield "data.tokenizer", None
    yield "data.tokenizer_hash", None
    yield "data.messages_column", None
    yield "data.answer_column", None
    # Those of another data set.
    yield "data.characters", None
    yield "data.classes", None
    if config.data.task_type in ("cv", "image_gen"):
        yield from _AVERAGING.items()
    yield from _model_changes(config.model, said)


def _model_changes(model: ModelConfig, said: set[str]) -> Iterator[tuple[str, Any]]:
    if model.family not in NATIVE_FAMILIES:
        raise ConfigError(
            f"--tiny: model.family = {model.family} is code of your own, whose sizes only you know: leave --tiny out, "
            "and give a file with small ones"
        )
    if model.pretrained and "model.pretrained" in said:
        raise ConfigError(
            "--tiny and model.pretrained: a small model begins from random weights, since none fit it; leave one of "
            "the two out"
        )
    yield "model.pretrained", False
    if model.family in RESNET_BLOCKS:
        # It has the sizes that its name says, and is fast on small images, of which the other stem leaves a pixel.
        if "data.dataset_name" not in said:
            yield "model.stem", "cifar"
        return
    if model.family in OF_TRANSFORMERS:
        return
    if model.family == "biggan":
        named = {f"{player}_attention": [size] for player, size in _ATTENDED.items()}
        attention = {key: sizes for key, sizes in named.items() if model.extra.get(key)}
        widths = {f"{player}_channels": _GAN_WIDTH for player in _ATTENDED}
        yield "model.extra", {**model.extra, **widths, "latent_size": _MOST_WIDTH, **attention}
        return
    if model.family == "mlp":
        yield "model.num_layers", min(_MOST_BLOCKS, model.num_layers)
        yield "model.hidden_size", min(_MOST_WIDTH, model.hidden_size)
        return
    heads = min(_MOST_HEADS, model.num_heads)
    yield "model.num_layers", min(_MOST_BLOCKS, model.num_layers)
    yield "model.num_heads", heads
    yield "model.hidden_size", _HEAD_WIDTH * (model.num_heads if "model.num_heads" in said else heads)
    if "data.tokenizer" not in said:
        yield "model.vocab_size", _NUM_BYTES


def _small_of_transformers(config: Config) -> dict[str, Any]:
    """Return what section `model` says of a small one: of speech, or of bytes, with the positions of a sample."""
    from shoal.model.hf.described import config_values
    from shoal.model.hf.library import model_config
    from shoal.model.hf.small import small_values

    values = config_values(config.model)
    if config.model.family == SPEECH:
        from shoal.model.hf.speech import small_speech_values

        small = small_speech_values(values, model_config(values, config.model.extra))
        return {"name_or_path": None, "revision": None, "commit": None, "extra": {}, "hf_config": small}
    large = model_config(values, config.model.extra)
    # A tokenizer that is said besides has the vocabulary of the large model.
    num_tokens = _NUM_BYTES if config.data.tokenizer is None else large.get_text_config().vocab_size
    small = small_values(values, large, vocab_size=num_tokens, max_position_embeddings=config.data.seq_len)
    return {"name_or_path": None, "revision": None, "commit": None, "extra": {}, "hf_config": small}


def _value(config: Config, name: str) -> int:
    found: Any = config
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _put(values: dict[str, Any], name: str, value: object) -> None:
    *sections, leaf = name.split(".")
    for section in sections:
        values = values[section]
    values[leaf] = value
