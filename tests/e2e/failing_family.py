"""A model with a mistake that shows when a server has trained for a while."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shoal.model.gpt import GptFamily, Head

GOOD_FORWARDS = 8
"""Of a replica; with two microbatches in a step the fifth step is the first one that fails."""


class FailingHead(Head):
    """Has weights that do not fit what it is given, from then on."""

    def __init__(self, *args: object, **named: object) -> None:
        super().__init__(*args, **named)  # type: ignore[arg-type]
        self._num_forwards = 0

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        # An evaluation has no gradient.
        self._num_forwards += hidden_BTC.requires_grad
        if self._num_forwards > GOOD_FORWARDS:
            return hidden_BTC @ torch.ones(7, 3)
        return super().forward(hidden_BTC)


class FailingFamily(GptFamily):
    """GPT with that head."""

    def build_unit(self, index: int) -> nn.Module:
        return FailingHead(self.shape) if index == self.num_units - 1 else super().build_unit(index)
