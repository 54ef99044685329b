"""Samples that can all be read until a file says that none can: what ends a run at once, with a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np

LENGTH = 64
WHY = "no row can be read any more"


class EndingRows:
    """A map-style data set of symbols.

    Args:
        ended: A path; when there is a file, no sample is given any more.
    """

    def __init__(self, ended: str) -> None:
        self._ended = Path(ended)

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
        if self._ended.exists():
            raise ValueError(WHY)
        symbols = np.arange(index, index + LENGTH + 1) % 256
        return symbols[:-1], symbols[1:]
