"""`shoal.load_model`: a run's folder `model/` as the uncut model, a module of torch.

    model = shoal.load_model("logs/sandbox/model")
    logits = model(tokens)

Nothing that is read is executed: a family of somebody's own is imported only if the caller names it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor, nn

from shoal.checkpoint.model_folder import CONFIG, FORMAT, RECORD, TENSORS
from shoal.checkpoint.model_layout import StageLayout, require_hashes
from shoal.config.model import NATIVE_FAMILIES
from shoal.config.schema import Config
from shoal.errors import ConfigError, RecordRejected, ShoalError, StateMismatch
from shoal.identity import verify
from shoal.model.precision import autocast_of
from shoal.model.registry import load_family
from shoal.model.stage import StageModule, build_stage
from shoal.quant.apply import apply_quant
from shoal.swarm.records import outcome_of, record_hash, signed_from_json, unseal
from shoal.wire.messages.round import Record

_CPU = torch.device("cpu")


def load_model(path: str | Path, *, family: str | None = None) -> StageModule:
    """Load the model that a run has left, in one piece, on the CPU and in eval mode.

    What is loaded hashes to what the record in the folder says, and that record is signed: nothing has changed since.
    That the signer had the swarm key shows `shoal replay --swarm-key-file` on the run's folder, not this.

    Args:
        path: The folder, `logs/<run>/model`.
        family: Of a model whose family is somebody's own code, `package.module:Class`: what the folder names is
            imported only if it is said here as well.

    Returns:
        The module: `model(inputs)` computes the last unit's output, `model.loss(outputs, labels)` the mean loss.

    Raises:
        ConfigError: This is no such folder, of another version, or its family is not the one that was named.
        RecordRejected: The record in it is none of this run, or its signature does not verify.
        StateMismatch: The tensors are not those of the model, or not those that the record names.
        OSError: A file cannot be read.
    """
    folder = Path(path)
    described = _json(folder / CONFIG)
    config = _configuration(described, family, folder)
    record = _record(folder, described)
    stages = _stages(config)
    tensors = _tensors(folder / TENSORS)
    expected = {name for stage in stages for name in _names(stage)}
    if tensors.keys() != expected:
        odd = ", ".join(sorted(tensors.keys() ^ expected)[:5])
        raise StateMismatch(f"{folder / TENSORS} is not of the model that {CONFIG} describes: look at {odd}")
    for stage in stages:
        _fill(stage, tensors, record)
    return _joined(config, stages).eval()


def _configuration(described: Mapping[str, Any], family: str | None, folder: Path) -> Config:
    if described.get("format") != FORMAT:
        raise ConfigError(
            f"{folder / CONFIG} is of format {described.get('format')}, this version of shoal reads {FORMAT}: use the "
            "version that has written it"
        )
    try:
        config = Config.model_validate({**described["configuration"], "device": "cpu"})
    except (KeyError, TypeError, ValidationError) as error:
        raise ConfigError(f"{folder / CONFIG} does not describe a model of this version of shoal: {error}") from None
    if config.model.family not in (*NATIVE_FAMILIES, family):
        raise ConfigError(
            f"the model in {folder} is of {config.model.family!r}, a family of somebody's own: if that code may run "
            f"here, say load_model(..., family={config.model.family!r})"
        )
    return config


def _record(folder: Path, described: Mapping[str, Any]) -> Record:
    try:
        signed = signed_from_json(_json(folder / RECORD))
        record = unseal(signed, str(described.get("run_id")), verify)
    except (KeyError, ValueError, ShoalError) as error:
        raise RecordRejected(f"{folder / RECORD} is no record of run {described.get('run_id')}: {error}") from error
    if record_hash(signed) != described.get("record"):
        raise RecordRejected(f"{folder / RECORD} is not the record that {CONFIG} names: take the folder as it was")
    return record


def _stages(config: Config) -> list[StageModule]:
    """All stages as they were trained: what is quantised may depend on the stage."""
    family, pipeline = load_family(config.model, config.data), config.model_pipeline
    stages: list[StageModule] = []
    for stage in range(pipeline.stages):
        module = build_stage(family, stage, pipeline.stages, seed=config.run.seed, cut=pipeline.cut)
        apply_quant(module, config.quant)
        stages.append(module)
    return stages


def _tensors(path: Path) -> dict[str, Tensor]:
    # Read, not mapped: a mapped file that is cut meanwhile would end the process.
    try:
        return safetensors.torch.load(path.read_bytes())
    except SafetensorError as error:
        raise StateMismatch(f"{path} is damaged ({error}): take it as the run has left it") from error


def _names(stage: nn.Module) -> list[str]:
    return [entry.name for entry in StageLayout.of(stage).entries]


def _fill(stage: StageModule, tensors: Mapping[str, Tensor], record: Record) -> None:
    """Put the tensors into a stage, and compare it with the record."""
    layouts = StageLayout.of(stage)
    for layout in layouts:
        for name, tensor in zip(layout.names, layout.select(stage), strict=True):
            given = tensors[name]
            if (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
                raise StateMismatch(
                    f"{name} is {given.dtype} {tuple(given.shape)}, the model has {tensor.dtype} {tuple(tensor.shape)}"
                )
            with torch.no_grad():
                tensor.copy_(given)
    outcome = outcome_of(record, stage.stage)
    if outcome is None:
        raise RecordRejected(f"record {record.round} says nothing of stage {stage.stage}")
    require_hashes(stage.stage, [each.flatten(each.select(stage)) for each in layouts], outcome.hashes)


def _joined(config: Config, stages: list[StageModule]) -> StageModule:
    family = load_family(config.model, config.data)
    units = nn.ModuleDict({name: unit for stage in stages for name, unit in stage.units.items()})
    autocast = autocast_of(config.data.precision, _CPU)
    return StageModule(family, units, range(family.num_units), 0, 1, autocast)


def _json(path: Path) -> dict[str, Any]:
    try:
        content: object = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} does not exist: give the folder `model` of a run, such as logs/sandbox/model"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON ({error}): take it as the run has left it") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no object: take it as the run has left it")
    return cast("dict[str, Any]", content)
