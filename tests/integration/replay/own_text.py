"""Text of somebody's own, and a model: what a run names as code."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.model.gpt import GptFamily


class Letters:
    """Samples of 16 tokens."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        tokens = np.random.Generator(np.random.Philox(index)).integers(97, 123, 17)
        return tokens[:-1], tokens[1:]


class OwnGpt(GptFamily):
    """The gpt, under a name of somebody's own."""
