"""A GAN in the swarm: two optimizers of one stage, recorded, replayed and evaluated like any model."""

from __future__ import annotations

import math
from typing import Any

import anyio
import pytest
from tests.integration.cluster.conftest import MakeCluster, make_config, reproduces

import shoal
from shoal.config import Config
from shoal.data.catalog import open_source
from shoal.inference.evaluation import held_out_figures, held_out_loss
from shoal.wire.messages.step import Open

FIGURES = ("loss/discriminator", "loss/generator", "accuracy/discriminator")
STEPS = 16


def gan(**sections: dict[str, Any]) -> Config:
    data = {"dataset_name": "digits", "task_type": "image_gen", "img_size": 8, "num_channels": 1}
    sizes = {"generator_channels": 4, "discriminator_channels": 4, "latent_size": 8, "generator_attention": [8]}
    groups = [{"name_patterns": ["gan.generator.*"], "every_steps": 2, "adam_lr": 1e-3}]
    optim = {"adam_lr": 2e-3, "adam_betas1": 0.0, "adam_weight_decay": 0.0, "groups": groups}
    steps = {"inner_steps": 4, "outer_steps": 2, "batch_size_per_step": 8, "max_grad_norm": None}
    sections["data"] = {**data, "holdout_fraction": 0.01, **sections.get("data", {})}
    return make_config(
        model={"family": "biggan", "extra": sizes},
        diloco={**steps, "inner_optim": optim},
        **{"model_pipeline": {"stages": 1, "microbatches": 2}, **sections},
    )


ALL_AT_ONCE = {"stages": 1, "microbatches": 2, "schedule": "zero_bubble", "activation_checkpointing": True}


@pytest.mark.usual("plain")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(gan(), id="plain"),
        pytest.param(gan(data={"precision": "bf16-mixed"}, model_pipeline=ALL_AT_ONCE), id="all at once"),
    ],
)
async def test_a_gan_is_recorded_replayed_bit_for_bit_and_loaded(config: Config, make_cluster: MakeCluster) -> None:
    async with make_cluster(config, dataset=None) as cluster:
        result = await cluster.run()
    assert (result.audit.steps, result.audit.duplicates, result.audit.missing) == (STEPS, 0, 0)
    log_dir = cluster.host.log_dir
    reproduces(log_dir, config, None)
    steps = [values for values in cluster.monitor.values if "loss/train" in values]
    assert cluster.monitor.num_steps == STEPS
    assert all(math.isfinite(step[name]) for step in steps for name in FIGURES)
    for step in steps:
        assert step["loss/train"] == pytest.approx(step[FIGURES[0]] + step[FIGURES[1]], abs=1e-4)
        assert 0 <= step[FIGURES[2]] <= 1
    model, holdout = shoal.load_model(log_dir / "model"), open_source(config).holdout
    assert held_out_loss(model, holdout) == pytest.approx(result.summary["eval_loss_last"], abs=2e-3)
    figures = held_out_figures(model, holdout)
    assert figures[FIGURES[0]] + figures[FIGURES[1]] == pytest.approx(held_out_loss(model, holdout), abs=1e-5)


@pytest.mark.slow
async def test_a_gan_whose_replica_dies_goes_on_with_the_other_and_is_replayed(make_cluster: MakeCluster) -> None:
    config = gan(run={"deterministic": False})
    async with make_cluster(config, dataset=None) as cluster:
        cluster.when(Open, action=lambda: cluster.kill_server(0), receiver=cluster.servers[0].peer, number=3)
        with anyio.fail_after(240):
            result = await cluster.run()
    assert result.audit.duplicates == 0
    reproduces(cluster.host.log_dir, config, None)
