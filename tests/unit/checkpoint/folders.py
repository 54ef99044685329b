"""Folders of models without a run: what a swarm would have left, with other parameters than the initial ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.model_folder import ModelFolder
from shoal.checkpoint.model_layout import StageLayout, stage_layouts
from shoal.checkpoint.start_weights import prepared
from shoal.config import Config
from shoal.model.registry import load_family
from shoal.model.stage import StageModule, build_stage
from shoal.optim.flat import state_buffers, trained_parameters
from shoal.quant.apply import apply_quant

GPT = {"num_layers": 3, "hidden_size": 24, "num_heads": 2, "mlp_ratio": 3}


def make_config(**sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {"model": GPT, "data": {"seq_len": 32}, "model_pipeline": {"stages": 2}}
    return Config.model_validate({"device": "cpu", **values, **sections})


def trained_stages(config: Config) -> list[StageModule]:
    """The stages of a model, each tensor that is trained moved away from where it starts."""
    family, pipeline = load_family(config.model, config.data), config.model_pipeline
    generator = torch.Generator().manual_seed(11)
    prepare = prepared(config, family)
    # Under adapters are the weights that the configuration says.
    named: dict[str, Any] = {"seed": config.run.seed if prepare else 5, "cut": pipeline.cut, "prepare": prepare}
    stages = [build_stage(family, stage, pipeline.stages, **named) for stage in range(pipeline.stages)]
    for stage in stages:
        apply_quant(stage, config.quant)
        with torch.no_grad():
            for name, tensor in (*trained_parameters(stage), *state_buffers(stage)):
                if not tensor.is_floating_point():
                    continue
                moved = torch.randn(tensor.shape, generator=generator)
                # What is divided by stays positive.
                tensor.add_(0.1 * moved.abs() * tensor if name.endswith(("step", "running_var")) else 0.1 * moved)
    return stages


def write_model(path: Path, config: Config) -> Path:
    folder = ModelFolder(path, stage_layouts(config))
    for stage in trained_stages(config):
        folder.write_stage(stage.stage, [each.flatten(each.select(stage)) for each in StageLayout.of(stage)], None)
    folder.commit_import(config, "a test")
    folder.discard()
    return path


def state_of(module: StageModule) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters()), **dict(state_buffers(module))}


def assert_same(first: StageModule, second: StageModule) -> None:
    one, other = state_of(first), state_of(second)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
