"""A model whose head computes for long when a test wants it, as a large model does, or with the GIL held; or one that
needs more memory than there is.

In the folder BUSY_FAMILY_DIR a file `computes` or `holds-the-gil` with a number of seconds, or `needs-memory` with a
number of bytes, is an order, which one forward of one replica carries out; then there is `computes.done`, and so on,
with the process id.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from shoal.model.gpt import GptFamily, Head


def _hold_the_gil(seconds: float) -> None:
    # Called with the GIL, unlike the functions of a CDLL.
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def _need_memory(num_bytes: float) -> None:
    torch.empty(int(num_bytes), dtype=torch.uint8)


ORDERS: dict[str, Callable[[float], None]] = {
    "computes": time.sleep,
    "holds-the-gil": _hold_the_gil,
    "needs-memory": _need_memory,
}


class BusyHead(Head):
    """Carries out what a test has ordered."""

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        folder = Path(os.environ["BUSY_FAMILY_DIR"])
        for name, carry_out in ORDERS.items():
            mine = folder / f"{name}.{os.getpid()}"
            # Whoever renames it first is the one; its batch has a gradient, so it is no evaluation.
            if not hidden_BTC.requires_grad:
                break
            with suppress(FileNotFoundError):
                (folder / name).rename(mine)
                try:
                    carry_out(float(mine.read_text()))
                finally:
                    mine.write_text(str(os.getpid()))
                    mine.rename(folder / f"{name}.done")
        return super().forward(hidden_BTC)


class BusyFamily(GptFamily):
    """GPT with that head."""

    def build_unit(self, index: int) -> nn.Module:
        return BusyHead(self.shape) if index == self.num_units - 1 else super().build_unit(index)
