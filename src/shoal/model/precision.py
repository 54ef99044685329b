"""What `data.precision` means for the stages, and which devices can do it."""

from __future__ import annotations

import torch

from shoal.errors import ConfigError

_AUTOCAST = {"32-true": None, "bf16-mixed": torch.bfloat16}


def autocast_of(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the type in which stages compute on this device, None: in that of their parameters.

    Raises:
        ConfigError: the device cannot.
    """
    dtype = _AUTOCAST[precision]
    if dtype is None or device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False):
        return dtype
    name = torch.cuda.get_device_name(device)
    raise ConfigError(
        f"data.precision = {precision}: {device} ({name}) has no bfloat16, which GPUs have from NVIDIA Ampere on; use "
        "--device cpu on this host, or data.precision 32-true for the run"
    )
