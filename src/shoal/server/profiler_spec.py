"""What a profiler is told when it starts."""

from __future__ import annotations

import msgspec

from shoal.config.load import config_from_json
from shoal.config.schema import Config


class ProfilerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Start parameters of a profiler. It has no identity, because it talks only to the launcher.

    Attributes:
        config_json: The resolved configuration, without the cut.
        log_dir: `logs/<run_id>` of this host.
        device: Torch device, resolved: "cpu", "mps" or "cuda:<i>".
        measure: False takes the family's own figures.
    """

    config_json: bytes
    log_dir: str
    device: str
    measure: bool

    def config(self) -> Config:
        """Return the configuration."""
        return config_from_json(self.config_json)
