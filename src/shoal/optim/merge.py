"""What a replica's own parameters become that it has gone on training while their average was on its way.

    outer parameters   ---- cut ----------- average of what was cut = outer ----.
    own parameters     ---- cut -- local ---------------------------------------'-- merged

Shapes: M elements of the fragment that was averaged.
"""

from __future__ import annotations

import enum

from torch import Tensor


class Merge(enum.StrEnum):
    """How what was learnt since the cut goes on."""

    CARRY = "carry"
    """On top of the average: all of it counts in the next one."""
    MEAN = "mean"
    """Half way to the average (Streaming DiLoCo, arXiv 2501.18512, with its factor of 1/2)."""


def merged(how: Merge, outer_M: Tensor, local_M: Tensor, cut_M: Tensor) -> Tensor:
    """Return the merged parameters, in the memory of `local_M`; each operation is rounded by itself."""
    if how is Merge.CARRY:
        return local_M.sub_(cut_M).add_(outer_M)
    return local_M.add_(outer_M).mul_(0.5)
