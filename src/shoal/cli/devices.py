"""Which device each server of this host computes on."""

from __future__ import annotations

from pathlib import Path

from shoal.config import Config
from shoal.config.per_server import of_server
from shoal.errors import ConfigError
from shoal.server.visible_gpus import visible_gpus

_DEVICE_FILES = Path("/dev")
_DRIVERS = ("nvidia*", "nvhost*", "kfd", "dxg")
"""Files of NVIDIA's driver, of the one on NVIDIA's boards, of AMD's, and of the one that Linux has below Windows."""


def has_gpu_driver(device_files: Path = _DEVICE_FILES) -> bool:
    """Whether some driver for GPUs is loaded. Without one "auto" means the CPU, and torch need not be asked."""
    return any(path for pattern in _DRIVERS for path in device_files.glob(pattern))


def devices_of_servers(config: Config) -> list[str]:
    """Return the torch device of each server of this host.

    Raises:
        ConfigError: there is no such device, or the configuration says something for another number of servers.
    """
    if problem := config.servers_problem():
        raise ConfigError(problem)
    names = _gpu_names(config)
    servers = range(config.num_servers)
    if "mps" in config.devices and not visible_gpus().mps:
        raise ConfigError(f"device = mps: {visible_gpus()}; use --device auto or --device cpu")
    return [device_of_server(of_server(config.devices, index), index, len(names)) for index in servers]


def device_of_server(device: str, index: int, num_gpus: int) -> str:
    """Return the torch device of server `index` for the configured `device`.

    "auto" puts server i on GPU i modulo the number of GPUs, or on the CPU where there are none. Apple's is no such GPU:
    who wants it says "mps", until somebody has measured it.

    Raises:
        ConfigError: there is no such device.
    """
    if device in ("cpu", "mps"):
        return device
    if device == "auto":
        return f"cuda:{index % num_gpus}" if num_gpus else "cpu"
    ordinal = int(device.partition(":")[2] or 0)
    if ordinal >= num_gpus:
        raise ConfigError(f"device = {device}: {visible_gpus()}; use --device auto or --device cpu")
    return f"cuda:{ordinal}"


def name_of_gpu(device: str) -> str | None:
    """Return the name of a resolved device if it is a GPU."""
    if device == "mps":
        return visible_gpus().mps
    return None if device == "cpu" else visible_gpus().names[int(device.partition(":")[2])]


def unused_gpus(config: Config) -> str | None:
    """Return what to tell the user if this host has a driver for GPUs, its servers may use GPUs, and torch cannot."""
    if "auto" not in config.devices or not has_gpu_driver() or not visible_gpus().reason:
        return None
    return f"servers compute on the CPU, although this host has a driver for GPUs: {visible_gpus()}"


def _gpu_names(config: Config) -> tuple[str, ...]:
    wanted = any(device.startswith("cuda") for device in config.devices)
    possible = "auto" in config.devices and has_gpu_driver()
    return visible_gpus().names if wanted or possible else ()
