"""`shoal model`: what the units of a model cost on this machine, and where a run would cut it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.config.schema import Config
    from shoal.server.cost_cache import CostCache
    from shoal.server.unit_costs import UnitCosts


def profile_model(config: Config) -> Mapping[str, Any]:
    """Measure the units and cut the model by what comes out, in this process; see `report_lines` for people.

    Returns:
        JSON values: the units with their costs, the cuts by measured costs and by the family's own figures, and which
        of the two a run takes.

    Raises:
        ConfigError: the model does not fit the configuration, or there is no such device.
    """
    from shoal.cli.cuts import profiled_device
    from shoal.model.partition import counts_by_cost
    from shoal.server.cost_cache import microbatch_samples

    static = costs_on_device_thread(config, measure=False)
    # Measured anew: whoever asks wants to see what it is now.
    measured = costs_on_device_thread(config, measure=True)
    has_measured = measured.source == "measured"
    by_hand, decides = config.model_pipeline.cut, measured if has_measured and not config.run.deterministic else static

    def cut_by(costs: Sequence[float]) -> list[int]:
        return list(counts_by_cost(costs, config.num_stages, is_tied=static.is_tied))

    return {
        "family": config.model.family,
        "device": profiled_device(config),
        "threads": config.servers.threads[0],
        "microbatch_samples": microbatch_samples(config),
        "units": [
            {"name": name, "measured_s": cost_s if has_measured else None, "static": own}
            for name, cost_s, own in zip(static.names, measured.costs, static.costs, strict=True)
        ],
        "stages": config.num_stages,
        "is_tied": static.is_tied,
        "measured_cut": cut_by(measured.costs) if has_measured else None,
        "static_cut": cut_by(static.costs),
        "cut": list(by_hand or cut_by(decides.costs)),
        "decided_by": "hand" if by_hand else decides.source,
        "elapsed_s": None if measured.profile is None else round(measured.profile.elapsed_s, 3),
        "warnings": measured.warnings,
    }


def costs_on_device_thread(config: Config, *, measure: bool, cache: CostCache | None = None) -> UnitCosts:
    """Find out what the units cost as a server would compute: in a thread of its own, with the server's threads.

    Raises:
        ConfigError: as `unit_costs` does.
    """
    import anyio

    from shoal.cli.cuts import profiled_device
    from shoal.clock import SystemClock
    from shoal.pipeline.torch_device import device_initialiser
    from shoal.runtime.device_thread import DeviceThread
    from shoal.server.unit_costs import unit_costs

    device = profiled_device(config)

    def find() -> UnitCosts:
        return unit_costs(config, device, SystemClock(), measure=measure, cache=cache)

    async def run() -> UnitCosts:
        async with DeviceThread(device_initialiser(device, config.servers.threads[0])) as thread:
            return await thread.run(find)

    return anyio.run(run)


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the report as a table for people: one line for each unit, with its stage in the run's cut."""
    from shoal.model.partition import units_by_counts

    units: Sequence[Mapping[str, Any]] = report["units"]
    cut: Sequence[int] = report["cut"]
    total_s = sum(unit["measured_s"] or 0.0 for unit in units)
    total = sum(unit["static"] for unit in units) or 1.0
    lines = [
        f"{report['family']} on {report['device']}, {report['threads']} threads, microbatches of "
        f"{report['microbatch_samples']} samples: forward and backward",
        f"{'stage':>5}  {'unit':<16}{'measured':>11}{'share':>8}{'own figures':>13}",
    ]
    stages = units_by_counts(cut, len(units), len(cut), is_tied=report["is_tied"])
    stage_of = {index: stage for stage, indices in enumerate(stages) for index in indices.indices}
    stages_s = [0.0] * len(cut)
    for index, unit in enumerate(units):
        unit_s = unit["measured_s"]
        shown = f"{unit_s * 1000:>8.2f} ms{unit_s / total_s:>8.1%}" if unit_s is not None else f"{'-':>11}{'-':>8}"
        lines.append(f"{stage_of[index]:>5}  {unit['name']:<16}{shown}{unit['static'] / total:>13.1%}")
        stages_s[stage_of[index]] += unit_s or 0.0
    how = {"hand": "by hand", "measured": "as measured", "static": "by the family's own figures"}[report["decided_by"]]
    lines.append(f"cut: {' + '.join(map(str, cut))} units, {how}")
    if total_s:
        slowest_s = max(stages_s)
        lines.append(f"slowest stage: {slowest_s * 1000:.2f} ms, {slowest_s * len(cut) / total_s:.2f} times the mean")
    lines += [f"warning: {warning}" for warning in report["warnings"]]
    return lines


def print_profile(config: Config, *, as_json: bool) -> int:
    """Print what `profile_model` finds; return the exit code: 1 if a unit has failed, as it would in a server."""
    report = profile_model(config)
    print(json.dumps(report, indent=2) if as_json else "\n".join(report_lines(report)), flush=True)
    return int(report["measured_cut"] is None)


def print_check(name: str, config: Config) -> None:
    """Print whether a model of transformers is the same when it is cut, and what was compared to find that out.

    Args:
        name: a folder with config.json, a name on the hub, or a kind of model.
        config: what else is said of the model.

    Raises:
        ConfigError: there is no such model, or it is not the same.
    """
    from shoal.errors import ConfigError
    from shoal.model.hf.described import config_values, transformers_version
    from shoal.model.hf.family import HfFamily
    from shoal.model.hf.library import is_kind

    # A folder may be named like a kind.
    is_of_kind = is_kind(name) and not (Path(name) / "config.json").is_file()
    said = {"extra": {"model_type": name, **config.model.extra}} if is_of_kind else {"name_or_path": name}
    model = config.model.model_copy(update=said)
    values = config_values(model)
    family = HfFamily(values, config.data.seq_len, named=model.extra)
    print(f"{family.config.model_type} of transformers {transformers_version()}, {family.num_units} units", flush=True)
    print(
        "comparing a small twin of it with transformers' own class: in one piece, in halves, in thirds and every unit "
        "alone; output and all gradients, float32",
        flush=True,
    )
    families = [family]
    if family.is_tied:
        families.append(HfFamily({**values, "tie_word_embeddings": False}, config.data.seq_len))
    for each in families:
        if (problem := each.exactness_problem()) is not None:
            raise ConfigError(problem)
    if family.is_tied:
        print("its embeddings are tied: the first of several stages has the head as well")
    print("every bit is the same: it can be cut at any unit", flush=True)
