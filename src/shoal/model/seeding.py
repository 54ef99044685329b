"""Seeds: which numbers an operation and a unit's initialisation draw from, and how to draw from them.

Importing this module imports no torch; entering `seeded` does.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shoal.model.device_calls import random_state

if TYPE_CHECKING:
    import torch


def operation_seed(run_seed: int, trainer: int, step: int, microbatch: int, stage: int) -> int:
    """Return the seed of all that one microbatch draws at random in one stage (dropout), in forward and replays.

    The attempt does not count: a step that is replayed over another path draws the same numbers.

    Returns:
        63 bits: a pure function of the five numbers (each from 0 to 2**64 - 1), the same on every machine.
    """
    return _seed(b"shoal.operation", run_seed, trainer, step, microbatch, stage)


def unit_seed(run_seed: int, unit: int) -> int:
    """The seed of the initial parameters of unit `unit` (0-based over the whole model, whatever the cut): 63 bits."""
    return _seed(b"shoal.unit", run_seed, unit)


def adapter_seed(run_seed: int, unit: int) -> int:
    """The seed of the initial parameters of the adapters of unit `unit`, as `unit_seed`."""
    return _seed(b"shoal.adapter", run_seed, unit)


def _seed(purpose: bytes, *numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Generator[None]:
    """Inside, torch's global generators of the CPU and of `device` start at `seed`; afterwards they are as before.

    `torch.random.fork_rng` does the same for every device at several times the cost. Generators belong to the
    process: only one thread may draw at a time, which the device thread of a replica ensures.

    Args:
        seed: 63 bits; see `operation_seed`.
        device: Where the module computes, with its index (0 if it has none); GPUs have generators of their own.
    """
    import torch

    on_device = None if device is None else random_state(device)
    generators = [torch.default_generator, *(() if on_device is None else (on_device,))]
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
