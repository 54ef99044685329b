"""What is asked of a GPU beside computing, of each kind that torch has: NVIDIA's and AMD's as `cuda`, Apple's as `mps`.

Importing this module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class RandomState:
    """Of what draws random numbers on a GPU; all of it is torch's."""

    get_state: Callable[[], Tensor]
    set_state: Callable[[Tensor], object]
    manual_seed: Callable[[int], object]


def random_state(device: torch.device) -> RandomState | None:
    """Return the state of what draws on this device; None: of the CPU, which has torch's default generator."""
    import torch

    if device.type == "cuda":
        generator = torch.cuda.default_generators[device.index or 0]
        return RandomState(generator.get_state, generator.set_state, generator.manual_seed)
    if device.type == "mps":
        return RandomState(torch.mps.get_rng_state, torch.mps.set_rng_state, torch.mps.manual_seed)
    return None


def synchronise(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def name_of(device: torch.device) -> str | None:
    """Return what a GPU is called; None of the CPU. Apple's have no name that tells one generation from another."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "Apple GPU" if device.type == "mps" else None


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64: on its device, or on the CPU if the device has no such numbers, as Apple's."""
    return tensor.cpu().double() if tensor.device.type == "mps" else tensor.double()
