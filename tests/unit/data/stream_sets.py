"""Streams of a user's own, as `data.dataset_name` names them: good ones and bad ones."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def picture(number: int) -> np.ndarray:
    return np.full((1, 4, 4), number, np.float32)


class Pictures:
    """Row i is a picture of i, of class i % 4, in the split "test" of 1000 + i; `bad` ones have no picture."""

    def __init__(self, count: int = 100, split: str = "train", bad: tuple[int, ...] = (), add: int = 0) -> None:
        self._numbers, self._bad, self._add = range(count), bad, add + {"train": 0, "test": 1000}[split]

    def __iter__(self) -> Iterator[Any]:
        for number in self._numbers:
            yield (Broken() if number in self._bad else picture(number + self._add)), number % 4


class Broken:
    """No array can be made of it."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise OSError("broken file")


def generated(count: int = 100) -> Iterator[Any]:
    """A generator, which can be read once, but is made anew whenever it is called."""
    yield from Pictures(count)


def of_torch() -> Any:
    """As torch has it, which takes long to import."""
    import torch
    from torch.utils.data import IterableDataset

    class OfTorch(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            for number in range(100):
                yield {"inputs": torch.full((1, 4, 4), float(number)), "labels": number % 4}

    return OfTorch()


def of_datasets(count: int = 100) -> Any:
    """A stream of `datasets`, in three shards."""
    import datasets

    def rows(shards: list[int]) -> Iterator[Any]:
        for shard in shards:
            for number in range(count * shard // 3, count * (shard + 1) // 3):
                yield {"inputs": picture(number).tolist(), "labels": number % 4}

    return datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2]})


class Texts:
    """Rows of a table, or texts alone."""

    def __init__(self, count: int = 400, as_rows: bool = True) -> None:
        self._count, self._as_rows = count, as_rows

    def __iter__(self) -> Iterator[Any]:
        for number in range(self._count):
            text = f"row {number:011d}"
            yield {"text": text, "number": number} if self._as_rows else text


class Slow(Pictures):
    """Gives a row when the file of its number is there."""

    def __init__(self, folder: str, step: int) -> None:
        super().__init__()
        self._folder, self._step = Path(folder), step

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(super().__iter__()):
            while number % self._step == 0 and not (self._folder / str(number)).exists():
                time.sleep(0.005)
            yield row


class Deadly(Pictures):
    """Kills who reads row 60, as long as there is a file; which is removed by it, or stays."""

    def __init__(self, once: str, stays: bool = False) -> None:
        super().__init__()
        self._once, self._stays = Path(once), stays

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(super().__iter__()):
            if number == 60 and self._once.exists():
                if not self._stays:
                    self._once.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            yield row


class Stopping(Pictures):
    """Stops who reads row 60, as often as a file says yet."""

    def __init__(self, left: str) -> None:
        super().__init__()
        self._left = Path(left)

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(super().__iter__()):
            if number == 60 and (left := int(self._left.read_text())):
                self._left.write_text(str(left - 1))
                os.kill(os.getpid(), signal.SIGSTOP)
            yield row


class Ending(Pictures):
    """Cannot be read to its end."""

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(super().__iter__()):
            if number == 40:
                raise ConnectionError("the line is gone")
            yield row


class Shuffled(Pictures):
    def __iter__(self) -> Iterator[Any]:
        yield from random.sample(list(super().__iter__()), 100)


class OtherShapes(Pictures):
    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(super().__iter__()):
            yield row if number != 40 else (np.zeros((1, 5, 4), np.float32), 0)


class OtherClasses(Pictures):
    def __iter__(self) -> Iterator[Any]:
        for number, (image, label) in enumerate(super().__iter__()):
            yield image, label if number != 40 else 4


class Once:
    """A class whose objects share what is read: the second one has nothing any more."""

    _left: Iterator[Any] = iter(Pictures(20))

    def __iter__(self) -> Iterator[Any]:
        return self._left


class Nothing:
    def __iter__(self) -> Iterator[Any]:
        return iter(())


class NoStream:
    pass
