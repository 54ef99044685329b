"""The part of the configuration that a whole run shares: what decides the numbers, whichever host computes them."""

from __future__ import annotations

from typing import Any

from shoal.config.dump import public_values
from shoal.config.schema import Config


def shared_configuration(config: Config) -> dict[str, Any]:
    """Return, as JSON values, what all peers of a run must agree on; host fields and secrets are left out."""
    values = public_values(config)
    shared = {name: values[name] for name in ("experiment_prefix", "run", "data", "model", "diloco", "quant")}
    shared["model_pipeline"] = {name: values["model_pipeline"][name] for name in ("stages", "microbatches")}
    for host_field in ("hf_token", "num_workers"):
        shared["data"].pop(host_field)
    return shared
