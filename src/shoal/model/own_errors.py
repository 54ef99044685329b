"""What code of somebody's own family raises or gives, said as their error: what was asked of it, what is wrong, where.

A family of shoal's own that raises has a bug, which passes as it is.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from shoal.config.own_class import kind_of, raised
from shoal.errors import MisfitError, ShoalError


@contextmanager
def asked(family: type[object], what: str) -> Generator[None]:
    """Inside, what a family of somebody's own raises becomes a MisfitError that says where.

    Args:
        what: Is asked of it, for people, as `build_unit(2)`.
    """
    try:
        yield
    except Exception as error:
        if is_ours(family) or isinstance(error, ShoalError | MemoryError | torch.OutOfMemoryError):
            raise
        name = configured_name(family)
        raise MisfitError(f"model.family: {what} of {name} raises {raised(error, name)}; mend it there") from error


def require_module(family: type[object], index: int, unit: object) -> nn.Module:
    """Return what a family has built as a unit; raises MisfitError if it is no module."""
    if isinstance(unit, nn.Module):
        return unit
    raise MisfitError(
        f"model.family: build_unit({index}) of {configured_name(family)} gives {kind_of(unit)}, and has to give a "
        "torch.nn.Module"
    )


def is_ours(family: type[object]) -> bool:
    """Whether a family comes with shoal."""
    return family.__module__.startswith("shoal.")


def configured_name(family: type[object]) -> str:
    """Return what the configuration calls the class of a family of somebody's own."""
    return f"{family.__module__}:{family.__qualname__}"
