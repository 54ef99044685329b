"""What a family of somebody's own says of itself, looked at before anything is built of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, cast

from shoal.config.own_class import kind_of
from shoal.errors import ConfigError, MisfitError
from shoal.model.own_errors import asked, configured_name
from shoal.model.stage import Family, TensorSpec, checked_unit_costs
from shoal.wire.tensors import ITEM_BYTES

_MOST_NAMED: Final = 6
"""Problems that are named: those of many units are mostly the same."""


def require_sound(family: object, kind: type[Family]) -> None:
    """Ask somebody's own family all that it says of itself.

    Args:
        kind: Whose `from_config` has given it.

    Raises:
        MisfitError: Some of it is wrong, or cannot be said; all of that is named.
    """
    name = configured_name(kind)
    if not isinstance(family, Family):
        raise MisfitError(
            f"model.family: from_config of {name} gives {kind_of(family)}, and has to give the family, as cls(...)"
        )
    with asked(kind, "num_units"):
        num_units = cast("object", family.num_units)
    if not isinstance(num_units, int) or num_units < 1:
        raise MisfitError(
            f"model.family: num_units of {name} is {num_units!r}, and has to be a whole number of 1 or more"
        )
    questions: dict[str, Callable[[], object]] = {"input_spec()": family.input_spec, "label_spec()": family.label_spec}
    for index in range(num_units):
        questions[f"boundary_spec({index})"] = partial(family.boundary_spec, index)
    problems = [problem for what, ask in questions.items() if (problem := _spec_problem(kind, name, what, ask))]
    try:
        with asked(kind, "unit_costs()"):
            checked_unit_costs(family)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        more = [f"and {len(problems) - _MOST_NAMED} more"] if len(problems) > _MOST_NAMED else []
        raise MisfitError("\n".join([*problems[:_MOST_NAMED], *more]))


def _spec_problem(kind: type[Family], name: str, what: str, ask: Callable[[], object]) -> str | None:
    """Return what is wrong with a spec that a family gives; None: nothing."""
    try:
        with asked(kind, what):
            spec = ask()
    except MisfitError as error:
        return str(error)
    said = f"model.family: {what} of {name} gives"
    if not isinstance(spec, TensorSpec):
        return f"{said} {kind_of(spec)}, and has to give a TensorSpec"
    if spec.dtype not in ITEM_BYTES:
        return f"{said} the type {spec.dtype!r}, and has to give one of {', '.join(ITEM_BYTES)}, as text"
    shape = cast("object", spec.shape)
    sizes = cast("tuple[object, ...]", shape) if isinstance(shape, tuple) else (None,)
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return f"{said} the shape {shape!r}, and has to give a tuple of whole numbers, that of one sample"
    return None
