"""DistQat's BigGAN: its section `biggan` and its two optimizers, as `model.extra` and groups of the inner optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from shoal.config.distqat_models import Translated

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


def translated_biggan(section: Mapping[str, Any], optim: Mapping[str, Any]) -> Translated:
    """Translate the section `biggan`, and what follows `biggan_` in `diloco.inner_optim`."""
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
