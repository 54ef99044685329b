"""The part of the configuration that a whole run shares.

That is what decides the numbers, whichever host computes them, and what a stage needs in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from pydantic import ValidationError

from shoal.config.dump import public_values
from shoal.config.model import NATIVE_FAMILIES
from shoal.config.schema import Config
from shoal.errors import ConfigError

_MISSING: Final = object()
_BATCH: Final = "diloco.batch_size_per_step"
_PIPELINE: Final = ("stages", "cut", "microbatches", "schedule", "activation_checkpointing", "compile", "window")
_CUT: Final = "model_pipeline.cut"
# What a list of stages in DistQat's notation says, see `pipeline_entries`.
_PIPELINE_SETS: Final = (
    "model.family",
    "model.num_layers",
    "model.hidden_size",
    "model.num_classes",
    "model.extra",
    "model_pipeline.stages",
    _CUT,
)


def shared_configuration(config: Config) -> dict[str, Any]:
    """Return, as JSON values, what all peers of a run must agree on; host fields and secrets are left out."""
    values = public_values(config)
    shared = {name: values[name] for name in ("experiment_prefix", "run", "data", "model", "diloco", "quant")}
    shared["model_pipeline"] = {name: values["model_pipeline"][name] for name in _PIPELINE}
    for host_field in ("hf_token", "num_workers"):
        shared["data"].pop(host_field)
    return shared


def adopt_shared(host: Config, origins: Mapping[str, str], shared: Mapping[str, Any]) -> Config:
    """Return a host's configuration with the shared keys from the run.

    A `diloco.batch_size_per_step` below the run's is this host's cap of microbatches (as in DistQat), not a difference.

    Args:
        host: from this host's file, environment and flags.
        origins: the keys that they set, and where.
        shared: what `shared_configuration` returned at the client.

    Raises:
        ConfigError: this host sets a shared key to another value, or its version does not know the run's keys.
    """
    cap = _batch_cap(host, origins, shared)
    problems = list(_differences(shared_configuration(host), shared, origins))
    if cap is not None and host.servers.max_microbatch_samples not in (None, cap):
        problems.append(
            f"{_BATCH} = {cap} ({origins[_BATCH]}) and servers.max_microbatch_samples = "
            f"{host.servers.max_microbatch_samples} both cap the microbatches of this host: remove one"
        )
    family = shared["model"]["family"] if isinstance(shared.get("model"), Mapping) else None
    if family not in (*NATIVE_FAMILIES, host.model.family):
        problems.append(
            f"the run trains {family!r}, a family of somebody's own: say --model.family {family} here as well, if that "
            "code may run on this host"
        )
    if problems:
        raise ConfigError("\n".join(problems))
    values = host.model_dump()
    for section, content in shared.items():
        if section in ("data", "model_pipeline"):
            values[section] = {**values[section], **content}
        else:
            values[section] = content
    values["model_pipeline"]["pipeline"] = None
    if cap is not None:
        values["servers"]["max_microbatch_samples"] = cap
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False))
        raise ConfigError(
            f"the run's configuration does not fit this version of shoal ({reasons}): install the client's version"
        ) from None


def _batch_cap(host: Config, origins: Mapping[str, str], shared: Mapping[str, Any]) -> int | None:
    """The most samples that this host takes at a time, if it says so by a batch that is smaller than the run's."""
    mine, wanted = host.diloco.batch_size_per_step, _at(shared, _BATCH)
    return mine if _BATCH in origins and isinstance(wanted, int) and mine < wanted else None


def _differences(own: Mapping[str, Any], theirs: Mapping[str, Any], origins: Mapping[str, str]) -> Iterator[str]:
    for key, origin in sorted(origins.items()):
        for name in _PIPELINE_SETS if key == "model_pipeline.pipeline" else (key,):
            mine, wanted = _at(own, name), _at(theirs, name)
            if mine is _MISSING or mine == wanted:
                continue
            if name == _BATCH and isinstance(wanted, int) and mine < wanted:
                continue
            if name == _CUT and mine is None:
                continue  # as the run decides
            yield (
                f"{name} = {mine!r} ({origin}): the run has {None if wanted is _MISSING else wanted!r}, which all "
                "hosts share; remove it, servers take it from the run"
            )


def _at(values: Mapping[str, Any], name: str) -> Any:
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping):
            return _MISSING
        found = cast(Mapping[str, Any], found).get(part, _MISSING)
    return found
