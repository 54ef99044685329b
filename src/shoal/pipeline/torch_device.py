"""The torch device of a process: the check that it is there, and what its thread sets before anything else."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.errors import ConfigError
from shoal.runtime.long_turns import take_long_turns


def torch_device(name: str) -> torch.device:
    """Return the device of this name.

    Raises:
        ConfigError: it is a GPU, and this torch sees none.
    """
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device = {name}: this torch ({torch.__version__}) sees no GPU; use --device cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device = mps: this torch ({torch.__version__}) sees no GPU of Apple; use --device cpu")
    return torch.device(name)


def device_initialiser(device: str, num_threads: int) -> Callable[[], None]:
    """Return what a device thread does first: all of it is set per thread, not per process.

    Raises:
        ConfigError: as `torch_device`; at once, since the thread could only say that it is broken.
    """
    where = torch_device(device)

    def initialise() -> None:
        torch.set_num_threads(num_threads)
        take_long_turns()
        if where.type == "cuda":
            torch.cuda.set_device(where)

    return initialise
