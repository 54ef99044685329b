"""What `data.precision` means for the stages, which devices can do it, and what is kept of what autocast casts."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.errors import ConfigError

_AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}


def autocast_of(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the type in which stages compute on this device, None: in that of their parameters.

    Raises:
        ConfigError: the device cannot.
    """
    dtype = _AUTOCAST[precision]
    if dtype != torch.bfloat16 or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return dtype
    name = torch.cuda.get_device_name(device)
    raise ConfigError(
        f"data.precision = {precision}: {device} ({name}) has no bfloat16, which GPUs have from NVIDIA Ampere on; use "
        "--device cpu on this host, or data.precision fp16-mixed for the run"
    )


class WeightCasts:
    """Autocast's copies of weights, from one forward to the next, as long as the weights do not change.

    Autocast forgets its copies when its outermost context ends. Each microbatch in flight would then have some of its
    own, two bytes a parameter, and would cast all weights anew. Inside `kept`, a forward's context is not the outermost
    one. Gradients stay as they are: each backward passes the same cast on its own.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Nothing is cast yet.

        Args:
            parameters: What forwards inside `kept` cast; empty if the stage is computed without autocast. What a family
                casts by itself then lives as long as its own context.
        """
        self._parameters = parameters
        self._versions = self._current()

    @contextmanager
    def kept(self) -> Generator[None]:
        """Inside, on one thread and with gradients, forwards share the copies."""
        if not self._parameters:
            yield
            return
        if (current := self._current()) != self._versions:
            self.forget()
            self._versions = current
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()

    @contextmanager
    def set_aside(self) -> Generator[None]:
        """Inside, a forward without gradients casts what it needs, takes no copy and leaves those that are there."""
        if not self._parameters:
            yield
            return
        was_enabled = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            torch.autocast_decrement_nesting()
            torch.set_autocast_cache_enabled(was_enabled)

    def forget(self) -> None:
        """The copies are not needed any more, or are not of the weights as they are; those in open graphs stay.

        Whoever steps an optimizer calls this: fused ones count no change of the weights.
        """
        if self._parameters:
            torch.clear_autocast_cache()

    def _current(self) -> list[int]:
        # Copying into a weight counts one up, as rounds and snapshots do.
        return [parameter._version for parameter in self._parameters]
