"""What a key of the configuration names as `package.module:Class`: code of the user's own. It is only imported."""

from __future__ import annotations

import importlib
import sys

from shoal.errors import ConfigError


def is_class_name(name: str) -> bool:
    """Whether a name is of the form `package.module:Class`."""
    module_name, _, class_name = name.partition(":")
    return class_name.isidentifier() and all(part.isidentifier() for part in module_name.split("."))


def own_class(name: str, key: str) -> object:
    """Import what a name stands for; whether it is of the right kind is the caller's to check.

    Args:
        key: Of the configuration, which has the name.

    Raises:
        ConfigError: The name is not of this form, its module comes with Python, cannot be imported, or has nothing of
            that name.
    """
    if not is_class_name(name):
        raise ConfigError(f"{key}: {name!r} is not of the form package.module:Class")
    module_name, _, class_name = name.partition(":")
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise ConfigError(f"{key}: {name!r} is of a module that comes with Python; name a class of your own")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise ConfigError(
            f"{key}: cannot import {module_name} for {name!r} ({error}); is it installed here, or on PYTHONPATH?"
        ) from error
    except Exception as error:  # what code of the user's own raises is its own business
        raise ConfigError(f"{key}: {module_name} raises {type(error).__name__} when imported: {error}") from error
    found: object = getattr(module, class_name, None)
    if found is None:
        raise ConfigError(f"{key}: the module {module_name} has no {class_name}; check the part after the colon")
    return found
