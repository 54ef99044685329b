"""Code that a configuration names, `package.module:Class`, is imported only if a person at this host has named it too.

said here: by a flag, a variable, a file of this host, an argument   '-> imported
from elsewhere: by a folder, a checkpoint, peers of a run            '-> imported if it was said here as well

So it is with files of this host that peers name as data: what is trained on is shown to the servers of the run.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Container
from pathlib import Path
from typing import Final

from shoal.config.model import NATIVE_FAMILIES
from shoal.config.own_class import is_class_name
from shoal.config.schema import Config

FAMILY: Final = "model.family"
DATASET: Final = "data.dataset_name"
EVAL_SPLIT: Final = "data.eval_split"


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


def files_problems(config: Config, said_here: Container[str], where: str) -> list[str]:
    """Return why files of this host that a configuration from elsewhere names as data may not be read.

    Args:
        said_here: the keys that a person at this host has set, to what they are in the configuration.
        where: the configuration is from, in words.
    """
    data = config.data
    named = {DATASET: data.dataset_name if not data.is_own and _is_file_here(data.dataset_name) else None}
    named[EVAL_SPLIT] = data.eval_split if data.eval_split is not None and "/" in data.eval_split else None
    return [
        f"{where} names files of this host by {key}, {name!r}, and what is trained on is shown to all its servers: if "
        f"that may be, say --{key.replace('_', '-')} {shlex.quote(name)}"
        for key, name in named.items()
        if name is not None and key not in said_here
    ]


def _is_file_here(name: str) -> bool:
    """Whether a data set is none of the hub, or hides one: a folder or a file of this host, or a pattern of such."""
    return name.startswith((".", "/", "~")) or "*" in name or "?" in name or os.path.lexists(Path(name).expanduser())


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
