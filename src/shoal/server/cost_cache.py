"""What the units of a model took on this machine, kept for the next start: one small JSON file for each measurement.

The files are in `$XDG_CACHE_HOME/shoal/unit_costs`, or `~/.cache/shoal/unit_costs`, and readable by their owner alone.
A file holds everything that the figures depend on, and is only used if all of it is the same now. No torch is imported,
so that the launcher can look here first.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from shoal import __version__
from shoal.config.dump import public_values
from shoal.config.schema import Config
from shoal.errors import MALFORMED
from shoal.runtime.hardware import processor_name
from shoal.runtime.user_cache import cached_file, keep, user_cache

_FORMAT: Final = 1
_MAX_FILE_BYTES: Final = 1 << 20
_DATA_KEYS: Final = ("task_type", "num_channels", "img_size", "seq_len", "precision", "messages_column")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file: what was measured, and what it took."""

    key: dict[str, Any]
    costs_s: list[float]


def cost_key(config: Config, device: str, *, gpu: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return all that the costs of units depend on, as JSON values.

    Args:
        device: torch device on which the costs are measured.
        gpu: its name in torch; None: the device is no GPU.
        code: name of the code of a family that is not shoal's own.
    """
    values = public_values(config)
    return {
        "format": _FORMAT,
        "shoal": __version__,
        "code": code,
        "model": values["model"],
        "data": {name: values["data"][name] for name in _DATA_KEYS},
        "samples": microbatch_samples(config),
        "threads": config.servers.threads[0],
        "device": device,
        "torch": _torch_version(),
        "processor": processor_name(),
        "gpu": gpu,
    }


def microbatch_samples(config: Config) -> int:
    """Return the samples of a microbatch, the larger ones where they differ."""
    return -(-config.diloco.batch_size_per_step // config.model_pipeline.microbatches)


@dataclass(frozen=True, slots=True)
class CachedCosts:
    """What the cache knows.

    Attributes:
        costs_s: of each unit; None: not known.
        problem: why an existing file cannot be used, in words; None: it can be, or there is none.
    """

    costs_s: list[float] | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CostCache:
    """The measurements of earlier starts.

    Attributes:
        folder: holds the files; made when the first one is written.
    """

    folder: Path

    @classmethod
    def of_user(cls, environment: Mapping[str, str] | None = None) -> CostCache:
        """The cache of whoever runs this process."""
        return cls(user_cache("unit_costs", environment))

    def path(self, key: Mapping[str, Any]) -> Path:
        """The file of a measurement."""
        return cached_file(self.folder, json.dumps(key, sort_keys=True))

    def load(self, key: Mapping[str, Any], num_units: int | None = None) -> CachedCosts:
        """Look a measurement up; a file that cannot be used says why.

        Args:
            num_units: units of the model; None: not known.
        """
        path = self.path(key)
        try:
            with path.open("rb") as file:
                raw = file.read(_MAX_FILE_BYTES + 1)
        except FileNotFoundError:
            return CachedCosts()
        except OSError as error:
            return CachedCosts(problem=f"{path}: {error.strerror}")
        try:
            entry = msgspec.json.decode(raw, type=_Entry)
        except MALFORMED as error:
            return CachedCosts(problem=f"{path} is damaged: {error}")
        if not _plausible(entry, key, num_units):
            return CachedCosts(problem=f"{path} is damaged: it does not hold one cost for each unit of this model")
        return CachedCosts(entry.costs_s)

    def store(self, key: Mapping[str, Any], costs_s: list[float]) -> str | None:
        """Keep a measurement, whole or not at all; return why that was not possible, or None."""
        try:
            keep(self.path(key), msgspec.json.encode(_Entry(dict(key), costs_s)))
        except OSError as error:
            return f"{self.folder}: {error.strerror}"
        return None


def _plausible(entry: _Entry, key: Mapping[str, Any], num_units: int | None) -> bool:
    costs_s = entry.costs_s
    return (
        # As JSON gives it back.
        entry.key == cast("dict[str, Any]", json.loads(json.dumps(key)))
        and (len(costs_s) == num_units if num_units is not None else bool(costs_s))
        and all(math.isfinite(cost_s) and cost_s >= 0 for cost_s in costs_s)
        and sum(costs_s) > 0
    )


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "unknown"
