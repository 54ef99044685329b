"""The part of the configuration that a whole run shares.

That is what decides the numbers, whichever host computes them, and what a stage needs in memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

from pydantic import ValidationError

from shoal.config.dump import public_values
from shoal.config.named_code import DATASET, FAMILY, dataset_problem, family_problem, files_problems
from shoal.config.schema import FOUND_BY, SHARED_SECTIONS, UNITS_BY, Config
from shoal.config.sources import Layer
from shoal.errors import ConfigError

_MISSING: Final = object()
_BATCH: Final = "diloco.batch_size_per_step"
_SHARED: Final = ("experiment_prefix", *SHARED_SECTIONS)
_DATA_OF_HOST: Final = ("hf_token", "num_workers", "cache_dir")
_PIPELINE: Final = ("stages", "cut", "microbatches", "schedule", "activation_checkpointing", "compile", "window")
_STAGES: Final = "model_pipeline.stages"
_CUT: Final = "model_pipeline.cut"
# What a list of stages in DistQat's notation says, see `pipeline_entries`.
_PIPELINE_SETS: Final = (
    FAMILY,
    "model.num_layers",
    "model.hidden_size",
    "model.num_classes",
    "model.extra",
    _STAGES,
    _CUT,
)


def shared_configuration(config: Config) -> dict[str, Any]:
    """Return, as JSON values, what all peers of a run must agree on; host fields and secrets are left out."""
    values = public_values(config)
    shared = {name: values[name] for name in _SHARED}
    shared["model_pipeline"] = {name: values["model_pipeline"][name] for name in _PIPELINE}
    for host_field in _DATA_OF_HOST:
        shared["data"].pop(host_field)
    return shared


def require_shared(shared: Mapping[str, Any]) -> None:
    """Check that a configuration from elsewhere says nothing of what each host decides for itself, as which programs
    it starts.

    Args:
        shared: what `shared_configuration` is said to have returned.

    Raises:
        ConfigError: it does.
    """
    if odd := list(_not_shared(shared)):
        raise ConfigError(
            f"the configuration of the run says {', '.join(map(repr, odd))}, which no run of this version of shoal "
            "shares: install the client's version, or begin from another checkpoint"
        )


def _not_shared(shared: Mapping[str, Any]) -> Iterator[str]:
    yield from (section for section in shared if section not in _SHARED)
    for section in ("data", "model_pipeline"):
        content = shared.get(section, {})
        if not isinstance(content, Mapping):
            yield section
            continue
        for name in cast(Mapping[str, Any], content):
            if name in _DATA_OF_HOST if section == "data" else name not in _PIPELINE:
                yield f"{section}.{name}"


class ChangedKey(NamedTuple):
    """A shared key that a host sets to another value than the run has.

    Attributes:
        wanted: what the run has; None also where it has no such key.
        origin: where the host sets it.
    """

    name: str
    mine: object
    wanted: object
    origin: str


def has_same_samples(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether a position in a pass over the data names the same sample in both runs.

    Args:
        one: what `shared_configuration` returned.
        other: the same of another run.
    """
    # What a run of an earlier version does not say has its default.
    defaults = shared_configuration(Config())["data"]
    data = [{**defaults, **each["data"], "precision": None, "max_bad_fraction": None} for each in (one, other)]
    return data[0] == data[1] and one["run"]["seed"] == other["run"]["seed"]


def adopt_shared(
    host: Config,
    origins: Mapping[str, str],
    shared: Mapping[str, Any],
    *,
    told_by: str = "the run",
    opens_data: bool = True,
    from_peers: bool = True,
) -> Config:
    """Return a host's configuration with the shared keys from the run.

    A `diloco.batch_size_per_step` below the run's is this host's cap of microbatches (as in DistQat), not a difference.

    Args:
        host: from this host's file, environment and flags.
        origins: the keys that they set, and where.
        shared: what `shared_configuration` returned at the client.
        told_by: who has told it, in words.
        opens_data: this host opens the data set; one of servers never does.
        from_peers: hosts of others have a part in the run and see what it trains on.

    Raises:
        ConfigError: this host sets a shared key to another value, has not named the code of somebody's own that it is
            to run, or files of its own that it is to read, or its version does not know the run's keys.
    """
    cap = _batch_cap(host, origins, shared)
    problems = [
        f"{name} = {mine!r} ({origin}): the run has {wanted!r}, which all hosts share; remove it, servers take it from "
        "the run"
        for name, mine, wanted, origin in changed_keys(host, origins, shared)
        if name != _BATCH or cap is None
    ]
    if cap is not None and host.servers.max_microbatch_samples not in (None, cap):
        problems.append(
            f"{_BATCH} = {cap} ({origins[_BATCH]}) and servers.max_microbatch_samples = "
            f"{host.servers.max_microbatch_samples} both cap the microbatches of this host: remove one"
        )
    config = _with_shared(host, shared, cap)
    problems += _unnamed(host, origins, config, told_by, opens_data=opens_data)
    if opens_data and from_peers:
        problems += files_problems(config, origins, told_by)
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def fork_shared(
    host: Config,
    origins: Mapping[str, str],
    changed: Iterable[ChangedKey],
    shared: Mapping[str, Any],
    *,
    told_by: str = "the run",
) -> Config:
    """Return a host's configuration with the shared keys from a run, but for those that it sets otherwise.

    The run's cut goes with its number of stages and of units.

    Args:
        origins: the keys that the host sets, and where.
        changed: `changed_keys` of the host.
        shared: what `shared_configuration` returned at the client of the run.
        told_by: who has told it, in words.

    Raises:
        ConfigError: the keys do not go together, the host has not named the code of somebody's own that it is to run,
            or its version does not know the run's keys.
    """
    layer = Layer(copy.deepcopy(dict(shared)))
    for name, mine, _, origin in changed:
        if name in (_STAGES, *UNITS_BY):
            layer.put(_CUT, host.model_pipeline.cut, origin)
        for found in FOUND_BY.get(name, ()):
            layer.put(found, _at(shared_configuration(host), found), origin)
        layer.put(name, mine, origin)
    config = _with_shared(host, layer.values, misfit="it does not go with the rest of the run's configuration: {}")
    if problems := [*_unnamed(host, origins, config, told_by), *config.run_problems()]:
        raise ConfigError("\n".join(problems))
    return config


def _unnamed(
    host: Config, origins: Mapping[str, str], config: Config, told_by: str, *, opens_data: bool = True
) -> list[str]:
    """Return what keeps this host from importing code that a run names. Arguments as of `adopt_shared`.

    Args:
        config: of this host, with what the run shares.
    """
    # A host that resumes has in `host` what the checkpoint says: only what has an origin was said here.
    family = host.model.family if FAMILY in origins else None
    dataset = host.data.dataset_name if DATASET in origins else None
    problems = [family_problem(config, family, told_by, "--model.family {name}")]
    if opens_data:
        problems.append(dataset_problem(config, dataset, told_by, "--data.dataset-name {name}"))
    return [problem for problem in problems if problem is not None]


def _with_shared(
    host: Config,
    shared: Mapping[str, Any],
    cap: int | None = None,
    misfit: str = "the run's configuration does not fit this version of shoal ({}): install the client's version",
) -> Config:
    """Return a host's configuration with shared keys; nothing that it names is imported.

    Args:
        cap: of the host's microbatches, if it has one.
        misfit: what it means if this is no configuration, with a place for the reasons.

    Raises:
        ConfigError: it is none, or says what no run shares.
    """
    require_shared(shared)
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
        raise ConfigError(misfit.format(reasons)) from None


def _batch_cap(host: Config, origins: Mapping[str, str], shared: Mapping[str, Any]) -> int | None:
    """The most samples that this host takes at a time, if it says so by a batch that is smaller than the run's."""
    mine, wanted = host.diloco.batch_size_per_step, _at(shared, _BATCH)
    return mine if _BATCH in origins and isinstance(wanted, int) and mine < wanted else None


def changed_keys(host: Config, origins: Mapping[str, str], theirs: Mapping[str, Any]) -> Iterator[ChangedKey]:
    """Yield the shared keys that a host sets to another value than a run has. Arguments as of `adopt_shared`."""
    own = shared_configuration(host)
    decided = {name: origin for key, origin in origins.items() for name in _set_by(key, origins)}
    for name, origin in sorted((decided | dict(origins)).items()):
        mine, wanted = _at(own, name), _at(theirs, name)
        if mine is _MISSING or mine == wanted:
            continue
        if name == _CUT and mine is None:
            continue  # as the run decides
        yield ChangedKey(name, mine, None if wanted is _MISSING else wanted, origin)


def _set_by(key: str, origins: Mapping[str, str]) -> tuple[str, ...]:
    """The keys whose values a key decides, of a host that sets those of `origins`."""
    if key == "model_pipeline.pipeline":
        return _PIPELINE_SETS
    return (_STAGES, _CUT) if key == _CUT and _STAGES not in origins else (key,)


def _at(values: Mapping[str, Any], name: str) -> Any:
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping):
            return _MISSING
        found = cast(Mapping[str, Any], found).get(part, _MISSING)
    return found
