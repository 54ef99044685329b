"""Whether the model takes the samples: asked before a run begins, since servers would refuse each step for it."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.config.model import NATIVE_FAMILIES
from shoal.config.schema import Config
from shoal.data.source import ArraySpec, DataSet
from shoal.errors import ConfigError
from shoal.model.registry import load_family


def require_taken(config: Config, dataset: DataSet) -> None:
    """Check that a family of somebody's own takes the samples; of shoal's own that is known when they are opened.

    Raises:
        ConfigError: It does not.
    """
    if config.model.family in NATIVE_FAMILIES:
        return
    try:
        problems = list(_problems(config, dataset))
    except ConfigError:
        return  # what is wrong with it is said by those who build it
    if problems:
        raise ConfigError("\n".join(problems))


def _problems(config: Config, dataset: DataSet) -> Iterator[str]:
    family, given = load_family(config.model, config.data), dataset.fields
    asked = {"input_spec": (family.input_spec(), given.inputs), "label_spec": (family.label_spec(), given.labels)}
    for spec, (wanted, found) in asked.items():
        if found.shape == wanted.shape and wanted.takes(found.dtype):
            continue
        what = "inputs" if spec == "input_spec" else "labels"
        yield (
            f"a sample of data.dataset_name = {config.data.dataset_name} has {what} {_text(found)}, and {spec}() of "
            f"model.family = {config.model.family} says {_text(ArraySpec(wanted.dtype, wanted.shape))}; make them agree"
        )


def _text(spec: ArraySpec) -> str:
    return f"{spec.dtype}{list(spec.shape)}"
