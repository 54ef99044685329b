"""Buffers of a stage (BatchNorm's running statistics) as part of a step's transaction.

The live buffers change only when a step commits. Each forward works on copies that it may write to:

    live --copy--> base (when the step begins) --copy--> of microbatch 0 --copy--> of microbatch 1 ... --> last
    commit: live still equals base ?  live = last  :  live += last - base

A copy for each microbatch, since a backward may still need what its forward has read. Constants (`persistent=False`)
are nobody's state: no forward may change them, and none is copied.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class LiveBuffers:
    """The committed buffers of a module; the tensors stay the same objects for ever."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (owner, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()  # pyright: ignore[reportPrivateUsage]
            if buffer is not None and name not in owner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        ]
        self._live = self._bound()
        self._changes = 0

    @property
    def live(self) -> list[Tensor]:
        """The live buffers themselves; whoever writes to them calls `changed`."""
        return self._live

    @property
    def changes(self) -> int:
        """Counts the changes of the live buffers."""
        return self._changes

    def copy(self) -> list[Tensor]:
        """Copies of the live buffers."""
        return [buffer.clone() for buffer in self._live]

    @contextmanager
    def bound_to(self, buffers: list[Tensor]) -> Generator[list[Tensor]]:
        """Inside, the module uses copies of `buffers`; the yielded list holds, afterwards, what it has made of them."""
        left: list[Tensor] = []
        self._bind([buffer.clone() for buffer in buffers])
        try:
            yield left
            left.extend(self._bound())
        finally:
            self._bind(self._live)

    @torch.no_grad()
    def apply(self, base: list[Tensor], last: list[Tensor], changes: int) -> None:
        """Commits a step that started from `base` when there had been `changes` changes, and ended with `last`."""
        for live, old, new in zip(self._live, base, last, strict=True):
            if changes == self._changes or live.dtype == torch.bool:
                live.copy_(new)
            else:
                live.add_(new - old)
        self._changes += 1

    def changed(self) -> None:
        """The live tensors were written by someone else."""
        self._changes += 1

    def _bound(self) -> list[Tensor]:
        return [owner.get_buffer(name) for owner, name in self._places]

    def _bind(self, buffers: list[Tensor]) -> None:
        for (owner, name), buffer in zip(self._places, buffers, strict=True):
            owner._buffers[name] = buffer  # pyright: ignore[reportPrivateUsage]
