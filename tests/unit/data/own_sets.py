"""Data sets of a user's own, as `data.dataset_name` names them: good ones and bad ones."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from shoal.data.fields import Fields
from shoal.data.source import Array, ArraySpec, DataSet, Indices, Source, split

NOT_A_CLASS = 3


class Pictures(Dataset[Any]):
    """Sample i is a picture of the number i, of class i % 4; in the split "test", of 1000 + i."""

    def __init__(self, count: int = 20, split: str = "train", bad: tuple[int, ...] = ()) -> None:
        self.count, self.first, self.bad = count, {"train": 0, "test": 1000}[split], bad

    def __len__(self) -> int:
        return self.count

    def picture(self, index: int) -> torch.Tensor:
        return torch.full((1, 4, 4), self.first + index, dtype=torch.float64)

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise OSError(f"broken file {index}.png")
        return self.picture(index), index % 4


class WithoutSplit(Pictures):
    """Takes a number of samples alone."""

    def __init__(self, count: int = 20, bad: tuple[int, ...] = ()) -> None:
        super().__init__(count, "train", bad)


class Named(WithoutSplit):
    def __getitem__(self, index: int) -> Any:
        return {"image": self.picture(index).numpy(), "label": index % 4}


class Nameless(WithoutSplit):
    def __getitem__(self, index: int) -> Any:
        return {"image": self.picture(index), "label": 0, "weight": 1.0}


class Triples(WithoutSplit):
    def __getitem__(self, index: int) -> Any:
        return self.picture(index), 0, 1


class OfWords(WithoutSplit):
    def __getitem__(self, index: int) -> Any:
        return self.picture(index), "cat"


class Growing(WithoutSplit):
    def __getitem__(self, index: int) -> Any:
        return self.picture(index) if index != 7 else torch.zeros(1, 5, 4), 0


class ManyClasses(WithoutSplit):
    def __getitem__(self, index: int) -> Any:
        return self.picture(index), 4 if index == 7 else 0


class Drawn(WithoutSplit):
    def __getitem__(self, index: int) -> Any:
        return self.picture(index) + random.random(), 0


class Raising:
    def __init__(self, path: str = "nowhere") -> None:
        raise FileNotFoundError(f"there is no {path}")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield torch.zeros(1, 4, 4), 0


class Texts(WithoutSplit):
    """Eight tokens and those that follow them; the first one is not counted."""

    def __getitem__(self, index: int) -> Any:
        tokens = [*range(index, index + 9)]
        return {"input_ids": tokens[:8], "labels": [-100, *tokens[2:]]}


class Numbers(Source):
    """A source of shoal's own: sample i is the picture of i."""

    def __init__(self, count: int = 20) -> None:
        self._count = count

    @property
    def inputs(self) -> ArraySpec:
        return ArraySpec("float32", (1, 4, 4))

    @property
    def labels(self) -> ArraySpec:
        return ArraySpec("uint8", ())

    @property
    def num_samples(self) -> int:
        return self._count

    def read_into(self, indices: Indices, batch: Fields[Array]) -> None:
        batch.inputs[...] = indices[:, None, None, None]
        batch.labels[...] = indices % 4


def with_its_own_held_out(count: int) -> DataSet:
    """A function serves as well; its last two samples are held out."""
    train, holdout = split(Numbers(count), 2 / count)
    return DataSet("whatever", train, holdout, num_classes=4)


def numpy_only(count: int) -> Any:
    """What has a length and an index is a data set, whatever it is."""
    return [(np.full((1, 4, 4), index, np.float16), np.int32(index % 4)) for index in range(count)]


class Unmeasured(Pictures):
    """Has no length, by a mistake."""

    def __len__(self) -> int:
        raise AttributeError("no attribute 'cuont'")
