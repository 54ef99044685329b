"""Which device each server of this host computes on, without loading torch into the launcher."""

from __future__ import annotations

from pathlib import Path

from shoal.config import Config
from shoal.config.per_server import of_server
from shoal.errors import ConfigError

_GPU_NODES = "/dev"


def num_gpus(device_files: Path = Path(_GPU_NODES)) -> int:
    """Return the NVIDIA GPUs of this machine, by their device files."""
    return sum(1 for path in device_files.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal())


def devices_of_servers(config: Config) -> list[str]:
    """Return the torch device of each server of this host.

    Raises:
        ConfigError: there is no such device, or the configuration says something for another number of servers.
    """
    if problem := config.servers_problem():
        raise ConfigError(problem)
    servers = range(config.num_servers)
    return [device_of_server(of_server(config.devices, index), index) for index in servers]


def device_of_server(device: str, index: int, gpus: int | None = None) -> str:
    """Return the torch device of server `index` for the configured `device`.

    "auto" puts server i on GPU i modulo the number of GPUs, or on the CPU where there are none.

    Raises:
        ConfigError: there is no such device.
    """
    gpus = num_gpus() if gpus is None else gpus
    if device == "cpu":
        return "cpu"
    if device == "auto":
        return f"cuda:{index % gpus}" if gpus else "cpu"
    ordinal = int(device.partition(":")[2] or 0)
    if ordinal >= gpus:
        have = f"{gpus} GPU(s): cuda:0 to cuda:{gpus - 1}" if gpus else "no GPU"
        raise ConfigError(f"device = {device}: this machine has {have}; use --device auto or --device cpu")
    return f"cuda:{ordinal}"
