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

from shoal.config.distqat_biggan import OPTIM, SECTION, translated_biggan
from shoal.config.distqat_models import translated_model
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
