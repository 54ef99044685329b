"""The reference of the benchmark `data`: torch's DataLoader with one worker process, as it is meant to be used."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import torch
from torch.utils.data import DataLoader, Dataset

from shoal.clock import SystemClock
from shoal_lab.bench.data_samples import BATCHES, MEASURED_S, gigabytes_per_s, make_samples, use
from shoal_lab.bench.measure import seconds_per_call
from shoal_lab.bench.peer import Calls, Seat

Sample = tuple[torch.Tensor, torch.Tensor]


class InMemoryDataset(Dataset[Sample]):
    """Samples that lie in two tensors."""

    def __init__(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        self._inputs, self._labels = inputs, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        return self._inputs[index], self._labels[index]


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer `consume(batch_samples)`: GB/s of shuffled batches, each one used."""
    samples, labels = make_samples()
    dataset = InMemoryDataset(torch.as_tensor(samples), torch.as_tensor(labels))
    loaders = {samples: _passes(dataset, samples) for samples in BATCHES.values()}

    def consume(batch_samples: int) -> float:
        batch_s = seconds_per_call(_user(loaders[batch_samples]), SystemClock().now_s, MEASURED_S)
        return gigabytes_per_s(1, batch_samples, batch_s)

    yield {"consume": consume}
    loaders.clear()


def _passes(dataset: InMemoryDataset, batch_samples: int) -> Iterator[Sample]:
    """Yield batches of pass after pass; the worker goes on from one to the next."""
    loader = DataLoader(dataset, batch_samples, shuffle=True, num_workers=1, drop_last=True, persistent_workers=True)
    while True:
        yield from loader


def _user(batches: Iterator[Sample]) -> Callable[[], None]:
    def use_next() -> None:
        inputs, labels = next(batches)
        use(inputs.numpy(), labels.numpy())

    return use_next
