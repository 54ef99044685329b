"""Code that a configuration names, `package.module:Class`, is imported only if a person at this host has named it too.

said here: by a flag, a variable, a file of this host, an argument   '-> imported
from elsewhere: by a folder, a checkpoint, peers of a run            '-> imported if it was said here as well
"""

from __future__ import annotations

from typing import Final

from shoal.config.model import NATIVE_FAMILIES
from shoal.config.own_class import is_class_name
from shoal.config.schema import Config

FAMILY: Final = "model.family"
DATASET: Final = "data.dataset_name"


def family_problem(config: Config, named: str | None, where: str, typed: str) -> str | None:
    """Return why the family of a configuration from elsewhere may not be imported; None: it may, or is shoal's own.

    Args:
        named: the family that a person at this host has named; None: nobody has named one.
        where: the configuration stands, in words.
        typed: what names it, with `{name}` for the name.
    """
    return _problem(FAMILY, own_family(config), named, where, typed)


def dataset_problem(config: Config, named: str | None, where: str, typed: str) -> str | None:
    """Return why the class of a configuration's data set may not be imported; None: it may, or there is none.

    Arguments as of `family_problem`.
    """
    return _problem(DATASET, own_dataset(config), named, where, typed)


def own_family(config: Config) -> str | None:
    """Return the family of somebody's own that a configuration names; None: it is one of shoal's."""
    return None if config.model.family in NATIVE_FAMILIES else config.model.family


def own_dataset(config: Config) -> str | None:
    """Return the class of somebody's own that a configuration takes its samples from; None: it takes none."""
    return config.data.dataset_name if config.data.is_own else None


def naming_options(config: Config) -> tuple[str, ...]:
    """Return the options that name this code to a command which is given the folder of a run or of a model."""
    family, dataset = own_family(config), own_dataset(config)
    named = () if family is None else ("--family", family)
    return named if dataset is None else (*named, "--dataset-name", dataset)


def _problem(key: str, name: str | None, named: str | None, where: str, typed: str) -> str | None:
    if name is None or name == named:
        return None
    said = f"{where} names {name!r} by {key}"
    if not is_class_name(name):
        return f"{said}, which is not of the form package.module:Class"
    return f"{said}, code of somebody's own: if that may run on this host, say {typed.format(name=name)}"
