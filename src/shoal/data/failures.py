"""Errors of a data server's own processes: as what they arrive there."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from shoal.errors import ConfigError, SampleError, ShoalError, StorageError

FailureKind = Literal["config", "sample", "storage"]
FAILURES: Final[Mapping[FailureKind, type[ShoalError]]] = MappingProxyType(
    {"config": ConfigError, "sample": SampleError, "storage": StorageError}
)


def kind_of(error: ShoalError) -> FailureKind:
    """Return as what an error is raised again: a data set that cannot be opened, a bad sample, or else the disk."""
    for kind, each in FAILURES.items():
        if isinstance(error, each):
            return kind
    return "storage"
