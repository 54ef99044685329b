"""What families of blocks between two ends have in common.

B samples, K classes or tokens of a vocabulary.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.model.stage import Family


class LayeredFamily(Family):
    """Units: one or more at the beginning, each block, the head, which puts out logits.

    Attributes:
        first_units: The names of those at the beginning.
    """

    first_units: ClassVar[tuple[str, ...]]

    def unit_name(self, index: int) -> str:
        num_first = len(self.first_units)
        if index < num_first:
            return self.first_units[index]
        return "head" if index == self.num_units - 1 else f"block_{index - num_first}"

    def loss(self, output: Tensor, labels: Tensor) -> Tensor:
        """Mean cross-entropy in nats of logits (B, .., K) and classes or next tokens (B, ..)."""
        logits = output if output.dtype == torch.float64 else output.float()
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
