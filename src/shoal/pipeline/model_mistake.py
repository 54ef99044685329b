"""Which errors are mistakes in a model of the user's own: it would raise them on any machine, and whenever it is asked.

Only then is a run given up early, so what is not known to be one is none: an error of a device, a driver, memory or a
disk, something that is not installed here, also where the model has made another error of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from shoal.config.own_class import place_of, raises_itself
from shoal.errors import ShoalError
from shoal.pipeline.out_of_memory import DEVICE_ERRORS, is_out_of_memory

_OF_MACHINES: Final = (OSError, ImportError)
_SAY_MACHINE: Final = re.compile(r"cuda|cudnn|cublas|nccl|\bmps\b|\bxpu\b|\bhip\b|\brocm|device|driver|memory", re.I)
_SAY_SHAPE: Final = re.compile(r"shape|size|dimension|same dtype|expected scalar type|must match|in-place|einsum", re.I)
"""Of what torch raises as a RuntimeError, whatever the cause, these come of what it was given."""


def is_of_model(error: BaseException, name: str = "") -> bool:
    """Whether code of the user's own has raised what it would raise anywhere.

    Args:
        name: What the configuration calls the model's family, as for `raised`.
    """
    if any(_is_of_machine(each) for each in _behind(error)) or not place_of(error, name):
        return False
    if isinstance(error, RuntimeError):
        # Those of compilers and devices are classes of their own.
        return raises_itself(error, name) or (type(error) is RuntimeError and bool(_SAY_SHAPE.search(str(error))))
    return True


def is_refused_for(error: Exception, name: str = "") -> bool:
    """Whether a step or an evaluation is refused for an error, and the server goes on with others.

    Args:
        name: As for `is_of_model`. An error of a class of the user's own may be any one.
    """
    return isinstance(error, DEVICE_ERRORS) or (not isinstance(error, ShoalError) and is_of_model(error, name))


def _is_of_machine(error: BaseException) -> bool:
    return isinstance(error, _OF_MACHINES) or is_out_of_memory(error) or bool(_SAY_MACHINE.search(str(error)))


def _behind(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and those during whose handling it was raised."""
    seen = set[int]()
    behind: BaseException | None = error
    while behind is not None and id(behind) not in seen:
        seen.add(id(behind))
        yield behind
        behind = behind.__cause__ or behind.__context__
