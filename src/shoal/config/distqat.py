"""A configuration file of DistQat (aether), translated into one of shoal, with comments: `shoal config convert`.

aether.yaml -> its keys, one by one   -> a key of here, by its own name or another one
                                         a comment at the top, where it has no effect here
                                         a problem, where without it something else would be trained
            -> defaults that differ    -> written down, with a comment
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, cast

from shoal.config.distqat_models import Translated, translated_model
from shoal.config.distqat_names import FULL_MODEL_NAME, NEEDED, PIPELINE, REMOVED
from shoal.config.dump import commented_yaml
from shoal.config.keys import ALIASES, keys, section_of
from shoal.config.load import problems_of
from shoal.config.sources import read_file
from shoal.errors import ConfigError

_WIDTH: Final = 112
_SECRET: Final = "data.hf_token"
_PRECISION: Final = "data.precision"
_BATCH: Final = "diloco.batch_size_per_step"
_MICROBATCHES: Final = 4
_NO_KEY: Final = "no key of DistQat either, which passes over what it does not know"
_NULL: Final = "null, so that the default holds"
OTHER_DEFAULTS: Final[dict[str, object]] = {
    "data.dataset_name": "mnist",
    "data.task_type": "cv",
    _PRECISION: "fp16-mixed",
    "diloco.max_grad_norm": None,
}
"""What DistQat does where a file says nothing, and shoal does not."""
SECTION: Final = "biggan"
OPTIM: Final = "diloco.inner_optim.biggan_"

_SIZES: Final[dict[str, tuple[str, object]]] = {
    "G_ch": ("generator_channels", 64),
    "D_ch": ("discriminator_channels", 64),
    "dim_z": ("latent_size", 128),
    "shared_dim": ("shared_size", 0),
    "hier": ("hierarchical", False),
    "D_wide": ("wide", True),
    "G_attn": ("generator_attention", "64"),
    "D_attn": ("discriminator_attention", "64"),
    "G_init": ("generator_init", "ortho"),
    "D_init": ("discriminator_init", "ortho"),
    "BN_eps": ("norm_eps", 1e-5),
    "SN_eps": ("spectral_eps", 1e-12),
}
"""Keys of its section: what each is called in `model.extra`, and what DistQat has without it."""
_INITS: Final = {"ortho": "orthogonal", "N02": "normal", "glorot": "xavier", "xavier": "xavier"}
_ONLY: Final[dict[str, tuple[object, ...]]] = {
    "G_param": ("SN",),
    "D_param": ("SN",),
    "G_shared": (True,),
    "cross_replica": (False,),
    "mybn": (False,),
    "norm_style": ("bn",),
    "fp16": (False,),
    "use_ema": (False,),
    "z_var": (1, 1.0),
    **{f"num_{player}_{what}": (1,) for player in "GD" for what in ("SVs", "SV_itrs")},
}
"""Keys that would make another model, and the values with which they make this one."""
_RESOLUTION: Final = ("resolution", 128)
_NUM_D_STEPS: Final = "num_D_steps"
_OPTIMS: Final[dict[str, object]] = {"lr": 2e-4, "B1": 0.0, "B2": 0.999}
"""Settings of each of the two optimizers, and what DistQat has without them."""
_EPS: Final = ("adam_eps", 1e-6)
_ADAM: Final = {"lr": "adam_lr", "B1": "adam_betas1", "B2": "adam_betas2"}


def converted_yaml(path: Path) -> str:
    """Return a file of DistQat as one of shoal.

    Raises:
        ConfigError: It is no YAML mapping, or something in it cannot be carried over: all of that at once.
    """
    said: dict[str, object] = {}
    notes: dict[str, str] = {}
    dead: dict[str, str] = {}
    problems: list[str] = []
    elsewhere: dict[str, object] = {}
    of_biggan: dict[str, object] = {}
    for there, value in _leaves(read_file(path)):
        name = ALIASES.get(there, there)
        if there in (PIPELINE, FULL_MODEL_NAME):
            elsewhere[there] = value
        elif there == SECTION or there.startswith(OPTIM):
            of_biggan[there] = value
        elif there in REMOVED:
            if there in NEEDED and value:
                problems.append(f"{path}: {there}: {REMOVED[there]}")
            else:
                dead[there] = REMOVED[there]
        elif name == _SECRET:
            dead[there] = "a secret, which no file should hold: set the environment variable HF_TOKEN"
        elif name not in keys():
            dead[there] = _NO_KEY
        elif value is None and not keys()[name].accepts_none:
            dead[there] = _NULL
        else:
            said[name] = value
            if name != there:
                notes[name] = f"{there} there."
    for name, value in OTHER_DEFAULTS.items():
        if name not in said:
            said[name] = value
            notes[name] = "Said by DistQat's defaults, not by its file."
    model = translated_model(elsewhere.get(PIPELINE), elsewhere.get(FULL_MODEL_NAME))
    said |= model.said
    notes |= model.notes
    if said.get("model.family") == SECTION:
        section = of_biggan.get(SECTION)
        optim = {name.removeprefix(OPTIM): value for name, value in of_biggan.items() if name.startswith(OPTIM)}
        gan = translated_biggan(cast(Mapping[str, Any], section) if isinstance(section, Mapping) else {}, optim)
        said |= gan.said
        notes |= gan.notes
        dead |= gan.dead
        problems += [f"{path}: {problem}" for problem in gan.problems]
    else:
        dead |= {name: REMOVED[name] for name in of_biggan}
    _fit_microbatches(said, notes)
    problems += [f"{path}: {problem}" for problem in model.problems]
    problems += problems_of(said, str(path), is_whole=not problems)
    if problems:
        raise ConfigError("\n".join(problems))
    return _head(path, {**dead, **model.dead}) + commented_yaml(said, notes)


def _leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each value of a file with its dotted name; of what shoal has no section for, the whole."""
    for given, value in values.items():
        name = f"{prefix}{given}"
        key = keys().get(ALIASES.get(name, name))
        if key is not None and section_of(key.info) is not None and isinstance(value, Mapping):
            yield from _leaves(cast(Mapping[Any, Any], value), f"{name}.")
        else:
            yield name, value


def _fit_microbatches(said: dict[str, object], notes: dict[str, str]) -> None:
    batch = said.get(_BATCH)
    if isinstance(batch, int) and 0 < batch < _MICROBATCHES:
        said["model_pipeline.microbatches"] = batch
        notes["model_pipeline.microbatches"] = f"No more than {_BATCH}."


def _head(path: Path, dead: Mapping[str, str]) -> str:
    """Return the comment at the top: what it was made of, and what had no effect, keys with one reason together."""
    lines = [f"# {path.name} of DistQat (aether), as `shoal config convert` translates it."]
    by_reason: dict[str, list[str]] = {}
    for name, reason in dead.items():
        by_reason.setdefault(reason, []).append(name)
    if by_reason:
        lines.append("# Without effect here, and left out:")
    for reason, names in by_reason.items():
        text = f"{', '.join(names)}: {reason}"
        lines += textwrap.wrap(text, _WIDTH, initial_indent="#   ", subsequent_indent="#     ")
    return "\n".join(lines) + "\n"


def translated_biggan(section: Mapping[str, Any], optim: Mapping[str, Any]) -> Translated:
    """Translate the section `biggan`, and `diloco.inner_optim.biggan_...`, to `model.extra` and groups of it."""
    result = Translated()
    for key, values in _ONLY.items():
        if key in section and section[key] not in values:
            result.problems.append(f"{SECTION}.{key} = {section[key]!r}: only {values[0]!r} is here")
    extra = {name: _size(key, section.get(key, default), result) for key, (name, default) in _SIZES.items()}
    result.said["model.extra"] = {name: value for name, value in extra.items() if value is not None}
    result.notes["model.extra"] = f"Its section {SECTION}."
    result.said["data.img_size"] = section.get(*_RESOLUTION)
    result.notes["data.img_size"] = f"{SECTION}.{_RESOLUTION[0]} there."
    _translate_optim(result, section, optim)
    read = {*_SIZES, *_ONLY, _RESOLUTION[0], _NUM_D_STEPS}
    for key in section:
        if key not in read:
            result.dead[f"{SECTION}.{key}"] = _DEAD.get(key, "no effect there either, or said elsewhere in the file")
    return result


def _translate_optim(result: Translated, section: Mapping[str, Any], optim: Mapping[str, Any]) -> None:
    every_steps = section.get(_NUM_D_STEPS, 1)
    of_player = {
        player: {_ADAM[key]: optim.get(f"{player}_{key}", default) for key, default in _OPTIMS.items()}
        for player in ("G", "D")
    }
    group: dict[str, object] = {"name_patterns": ["gan.generator.*"], **of_player["G"]}
    if every_steps != 1:
        group["every_steps"] = every_steps
    said = {"type": "adam", **of_player["D"], "adam_eps": optim.get(*_EPS), "adam_weight_decay": 0.0, "groups": [group]}
    result.said |= {f"diloco.inner_optim.{key}": value for key, value in said.items()}
    result.notes["diloco.inner_optim.type"] = "Two of them there: the generator's is a group."
    result.notes["diloco.inner_optim.groups"] = (
        f"every_steps is {SECTION}.{_NUM_D_STEPS} there, which counts batches also where several make a step."
    )


def _size(key: str, value: Any, result: Translated) -> object:
    if key == "shared_dim":
        return value or None
    if key.endswith("_attn"):
        sizes = f"{value}".split("_")
        if not all(size.isdecimal() for size in sizes):
            result.problems.append(f"{SECTION}.{key} = {value!r}: must be sizes of images, as '32_64', or '0'")
            return None
        return [int(size) for size in sizes if int(size)]
    if key.endswith("_init"):
        if value not in _INITS:
            result.problems.append(f"{SECTION}.{key} = {value!r}: choose {', '.join(_INITS)}")
        return _INITS.get(value)
    return value


_NO_INCEPTION: Final = "no Inception network judges images; see loss/eval, and shoal images"
_DEAD: Final[dict[str, str]] = {
    **dict.fromkeys(("enable_eval", "eval_every", "num_inception_images", "eval_moments_file"), _NO_INCEPTION),
    **dict.fromkeys(("ema", "ema_decay", "ema_start"), "nothing reads that average there, where use_ema is false"),
    "split_D": "the same images are judged either way",
    "batch_size": "see diloco.batch_size_per_step",
    "seed": "see run.seed",
    "device": "see device",
    "num_G_accumulations": "see diloco.gradient_accumulation_steps",
    "num_D_accumulations": "see diloco.gradient_accumulation_steps",
}
