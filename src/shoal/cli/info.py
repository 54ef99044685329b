"""`shoal info`: what is installed and what this host is, for a report of a problem. Nothing of it is a secret."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from shoal.cli.runs_here import living_runs
from shoal.config.host import NetworkConfig
from shoal.errors import ShoalError
from shoal.identity import load_swarm_key, swarm_key_fingerprint
from shoal.runtime.hardware import installed_version, processor_name, usable_processors
from shoal.runtime.memory import free_memory_bytes
from shoal.wire.handshake import PROTOCOL_VERSION

_PACKAGES: Final = ("shoal", "torch", "hivemind", "numpy", "transformers", "datasets", "peft", "wandb")
_DRIVERS: Final = {"nvidia": Path("/proc/driver/nvidia/version"), "amdgpu": Path("/sys/module/amdgpu")}


def host_information() -> dict[str, Any]:
    """Return it by name; None where there is none."""
    return {
        "versions": {name: installed_version(name) for name in _PACKAGES},
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
        "system": platform.platform(),
        "processor": processor_name(),
        "cores": len(usable_processors()),
        "free_memory_bytes": free_memory_bytes(),
        "gpu_drivers": [name for name, path in _DRIVERS.items() if path.exists()],
        "swarm_key": _key(),
        "runs": [note.run_id for note in living_runs()],
    }


def print_information(*, as_json: bool) -> int:
    """Print it; return the exit code."""
    information = host_information()
    print(json.dumps(information) if as_json else "\n".join(_lines(information)))
    return 0


def _lines(information: dict[str, Any]) -> Iterator[str]:
    for name, version_of in information.pop("versions").items():
        yield f"{name:<18}{version_of or 'not installed'}"
    for name, value in information.items():
        yield f"{name.removesuffix('_bytes').replace('_', ' '):<18}{_told(name, value)}"


def _told(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 2**30:.1f} GiB"
    if isinstance(value, list):
        return ", ".join(cast("list[str]", value)) or "none"
    return str(value)


def _key() -> str:
    """Return the fingerprint of the swarm's key, which is no secret, or why there is none."""
    path = NetworkConfig().swarm_key_file
    if not path.expanduser().exists():
        return f"none in {path}"
    try:
        return f"fingerprint {swarm_key_fingerprint(load_swarm_key(path))}"
    except ShoalError as error:
        return str(error)
