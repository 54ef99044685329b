"""A data set of one's own: small pictures of circles, squares and crosses, drawn when they are read."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

CLASSES = ("circle", "square", "cross")


class Shapes(Dataset[tuple[Tensor, int]]):
    """Map-style, as torch.utils.data has it: a sample is (image, class), an image (1, side, side) in float32."""

    def __init__(self, count: int, side: int = 16, split: str = "train") -> None:
        if side < 8:
            raise ValueError(f"side = {side}: a shape needs 8 pixels")
        self.count, self.side = count, side
        self.first_seed = {"train": 0, "test": 1 << 32}[split]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        # The index is the seed, so that a sample is the same whenever and by whomever it is read.
        random = torch.Generator().manual_seed(self.first_seed + index)
        label = index % len(CLASSES)
        radius = float(torch.empty(()).uniform_(self.side / 8, self.side / 4, generator=random))
        centre = torch.empty(2).uniform_(radius, self.side - 1 - radius, generator=random)
        rows = torch.arange(self.side)[:, None] - centre[0]
        columns = torch.arange(self.side)[None, :] - centre[1]
        if CLASSES[label] == "circle":
            inside = rows**2 + columns**2 <= radius**2
        elif CLASSES[label] == "square":
            inside = (rows.abs() <= radius) & (columns.abs() <= radius)
        else:
            inside = (rows.abs() <= radius) & (columns.abs() <= radius) & ((rows.abs() < 1) | (columns.abs() < 1))
        noise = 0.1 * torch.randn(self.side, self.side, generator=random)
        return (inside.float() + noise)[None], label
