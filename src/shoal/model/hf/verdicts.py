"""Which models of transformers were found to be exact when they are cut, kept for the next start. No torch.

One small file for each, in `$XDG_CACHE_HOME/shoal/hf_models` or `~/.cache/shoal/hf_models`: it holds what was asked and
the reason against it, which is empty if the model is exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import msgspec

from shoal.errors import MALFORMED
from shoal.model.hf.described import transformers_version
from shoal.runtime.user_cache import cached_file, keep, user_cache

_MAX_FILE_BYTES = 1 << 20
_COMPARISON = 3
"""Which comparison found a verdict; goes up when another one is made."""


class _Verdict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file."""

    key: str
    reason: str


def twin_key(values: Mapping[str, Any]) -> str:
    """Return all that the verdict on a model depends on: the versions, and what transformers is told.

    Raises:
        ConfigError: transformers is not installed.
    """
    versions = [_COMPARISON, version("shoal"), version("torch"), transformers_version()]
    return json.dumps([versions, values], sort_keys=True)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What earlier starts have found.

    Attributes:
        folder: Holds the files; made when the first one is written.
    """

    folder: Path

    @classmethod
    def of_user(cls) -> Self:
        """The verdicts of whoever runs this process."""
        return cls(user_cache("hf_models"))

    def load(self, key: str) -> str | None:
        """Return the reason against a model, empty if there is none; None: nobody knows, or the file is unreadable."""
        try:
            with cached_file(self.folder, key).open("rb") as file:
                verdict = msgspec.json.decode(file.read(_MAX_FILE_BYTES), type=_Verdict)
        except (OSError, *MALFORMED):
            return None
        return verdict.reason if verdict.key == key else None

    def store(self, key: str, reason: str) -> None:
        """Keep a verdict, whole or not at all; where that is not possible, the next start finds out again."""
        with suppress(OSError):
            keep(cached_file(self.folder, key), msgspec.json.encode(_Verdict(key, reason)))


def exactness_problem(key: str, verdicts: Verdicts | None, compare: Callable[[], str]) -> str | None:
    """Return the reason against a model; None: it is exact.

    Args:
        verdicts: Asked first, and told what is found; None: there are none.
        compare: Finds out; returns the reason, empty if there is none.
    """
    found = None if verdicts is None else verdicts.load(key)
    if found is None:
        found = compare()
        if verdicts is not None:
            verdicts.store(key, found)
    return found or None
