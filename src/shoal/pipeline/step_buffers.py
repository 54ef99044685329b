"""Buffers of a stage (BatchNorm's running statistics) as part of a step's transaction.

The live buffers change only when a step commits. Each forward works on copies that it may write to:

    live --copy--> base (when the step begins) --copy--> of microbatch 0 --copy--> of microbatch 1 ... --> last
    commit: live still equals base ?  live = last  :  live += last - base      what a step adds up, as a count
                                                   :  live = last + kept * (live - base)     moving averages

A moving average has of the one before what the step's microbatches have kept of it, so one after the other or at once
come to the same. Were differences added, several steps at once would take away more than there is: a variance below 0.

A copy for each microbatch, since a backward may still need what its forward has read. Constants (`persistent=False`)
are nobody's state: no forward may change them, and none is copied.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

_AVERAGES: Final = ("running_mean", "running_var")
_COUNTER: Final = "num_batches_tracked"


class LiveBuffers:
    """The committed buffers of a module; the tensors stay the same objects for ever.

    Attributes:
        live: The buffers themselves; whoever writes to them calls `changed`.
        changes: Counts the changes of the live buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (owner, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()  # pyright: ignore[reportPrivateUsage]
            if buffer is not None and name not in owner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        ]
        self.live = self._bound()
        self._averages = _averages_of(self._places)
        self.changes = 0

    def copy(self) -> list[Tensor]:
        """Copies of the live buffers."""
        return [buffer.clone() for buffer in self.live]

    @contextmanager
    def bound_to(self, buffers: list[Tensor]) -> Generator[list[Tensor]]:
        """Inside, the module uses copies of `buffers`; the yielded list holds, afterwards, what it has made of them."""
        left: list[Tensor] = []
        self._bind([buffer.clone() for buffer in buffers])
        try:
            yield left
            left.extend(self._bound())
        finally:
            self._bind(self.live)

    @torch.no_grad()
    def apply(self, base: list[Tensor], last: list[Tensor], changes: int) -> None:
        """Commits a step that started from `base` when there had been `changes` changes, and ended with `last`."""
        for number, (live, old, new) in enumerate(zip(self.live, base, last, strict=True)):
            if changes == self.changes or live.dtype == torch.bool:
                live.copy_(new)
            elif number in self._averages:
                counter, momentum = self._averages[number]
                kept = (1 - momentum) ** (last[counter] - base[counter]).item()
                live.sub_(old).mul_(kept).add_(new)
            else:
                live.add_(new - old)
        self.changes += 1

    def changed(self) -> None:
        """The live tensors were written by someone else."""
        self.changes += 1

    def _bound(self) -> list[Tensor]:
        return [owner.get_buffer(name) for owner, name in self._places]

    def _bind(self, buffers: list[Tensor]) -> None:
        for (owner, name), buffer in zip(self._places, buffers, strict=True):
            owner._buffers[name] = buffer  # pyright: ignore[reportPrivateUsage]


def _averages_of(places: Sequence[tuple[nn.Module, str]]) -> dict[int, tuple[int, float]]:
    """Of buffers that are moving averages, as BatchNorm's, by number: which one counts their batches, and how much of
    the average is the newest one's."""
    numbers = {place: number for number, place in enumerate(places)}
    found: dict[int, tuple[int, float]] = {}
    for number, (owner, name) in enumerate(places):
        counter, momentum = numbers.get((owner, _COUNTER)), getattr(owner, "momentum", None)
        if counter is not None and name in _AVERAGES and isinstance(momentum, float):
            found[number] = counter, momentum
    return found
