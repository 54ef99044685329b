"""What a key of the configuration names as `package.module:Class`: code of the user's own. It is only imported."""

from __future__ import annotations

import difflib
import importlib
import os
import re
import sys
import traceback
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError

_SHOAL: Final = f"{Path(__file__).parents[1]}/"
_PYTHON: Final = f"{Path(os.__file__).parent}/"
_INSTALLED: Final = ("site-packages", "dist-packages")
"""Folders of what pip and a system install."""
_RAISE: Final = re.compile(r"(raise|assert)\b")


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
    except SyntaxError as error:
        raise ConfigError(
            f"{key}: cannot import {module_name} for {name!r}: {error.msg} ({error.filename} line {error.lineno}); "
            "mend it there"
        ) from error
    except ImportError as error:
        place = place_of(error, name)
        at = f", imported by {place}" if place else ""
        raise ConfigError(
            f"{key}: cannot import {module_name} for {name!r} ({error}{at}); is it installed here, or on PYTHONPATH?"
        ) from error
    except Exception as error:  # what code of the user's own raises is its own business
        raise ConfigError(f"{key}: {module_name}, when it is imported, raises {raised(error, name)}") from error
    found: object = getattr(module, class_name, None)
    if found is None:
        near = difflib.get_close_matches(class_name, vars(module), n=1)
        said = f"did you mean {near[0]}?" if near else "check the part after the colon"
        raise ConfigError(f"{key}: the module {module_name} has no {class_name}; {said}")
    return found


def raised(error: BaseException, name: str = "", *, max_chars: int | None = None) -> str:
    """Say what code of the user's own has raised, and where.

    Args:
        name: What the configuration calls the code, `package.module:Class`; empty: that is not known.
        max_chars: Of the answer, in which the place stands before the end of a long text.
    """
    place, text = place_of(error, name), kind_and_text(error)
    where = f" ({place})" if place else ""
    if max_chars is None:
        return text + where
    return (text[: max(0, max_chars - len(where))] + where)[:max_chars]


def kind_and_text(error: BaseException) -> str:
    """Return an error as Python's own last line of a traceback says it."""
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def kind_of(value: object) -> str:
    """Return what kind of thing a value is, for people."""
    return "None" if value is None else f"a {type(value).__module__}.{type(value).__qualname__}"


def place_of(error: BaseException, name: str) -> str:
    """Return the last line of the user's own code that an error has come through, as `FILE line 12`; empty: none.

    Args:
        name: As of `raised`. What pip has installed is the user's own where this names it.
    """
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename, name)]
    return f"{own[-1].filename} line {own[-1].lineno}" if own else ""


def raises_itself(error: BaseException, name: str = "") -> bool:
    """Whether a line of the user's own has raised an error, and nothing that it has called.

    Args:
        name: As of `place_of`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_own(frames[-1].filename, name) and bool(_RAISE.match(frames[-1].line or ""))


def _is_own(file: str, name: str) -> bool:
    """Whether a file is of the package or module that the configuration names, or of nobody else."""
    package = sys.modules.get(name.partition(":")[0].partition(".")[0])
    folders = tuple(f"{folder}/" for folder in getattr(package, "__path__", ()))
    if file.startswith(folders) or file == getattr(package, "__file__", None):
        return True
    is_installed = any(part in _INSTALLED for part in Path(file).parts)
    return not is_installed and not file.startswith(("<", _SHOAL, _PYTHON))
