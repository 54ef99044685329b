"""A run in which nothing fails: every sample once, the same hashes every time, and what a plain loop trains."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.clock import SystemClock
from shoal.config import Config
from shoal.errors import ConfigError
from shoal.replay.replay import replay
from shoal.swarm.sample_ranges import count, merge
from shoal.trainer.baseline_run import BaselineReport, run_baseline
from shoal.wire.messages.round import Join
from shoal_lab import ClusterResult

from .conftest import SEQ_LEN, MakeCluster, make_config, make_text, reproduces, run_undisturbed


def times_trained(result: ClusterResult) -> Mapping[tuple[int, int], int]:
    """How many steps contain each (pass, position), from the step logs of all replicas."""
    steps = {line.entry.key: line.entry for lines in result.steps.values() for line in lines}
    return Counter(
        (part.pass_number, position)
        for entry in steps.values()
        for part in entry.samples
        for position in range(part.start, part.stop)
    )


@pytest.mark.usual("3-True", "1-False")
@pytest.mark.parametrize(("trainers", "deterministic"), [(1, True), (2, True), (3, True), (1, False)])
async def test_each_sample_is_trained_exactly_once_in_each_pass(
    make_cluster: MakeCluster, trainers: int, deterministic: bool
) -> None:
    # Batches of 4 do not divide a pass of 23: its last one has 3. 24 or 30 steps are four or five passes of 6.
    inner_steps = {1: 10, 2: 5, 3: 3}[trainers]
    config = make_config(
        run={"deterministic": deterministic},
        diloco={"inner_steps": inner_steps, "outer_steps": 3},
        servers={"replicas": trainers},
    )
    async with make_cluster(config, num_train=23) as cluster:
        result = await cluster.run()
        measured = cluster.client._endpoint.metrics.histograms()
    for phase in ("train", "average"):
        assert sum(measured[f"round.phase_seconds{{phase={phase}}}"].values()) == 3, "of each round"
    num_steps = inner_steps * trainers * 3
    passes, rest = divmod(num_steps, 6)
    expected = {(each, position) for each in range(passes) for position in range(23)}
    expected |= {(passes, position) for position in range(min(23, 4 * rest))}
    assert times_trained(result) == dict.fromkeys(expected, 1)
    assert (result.audit.steps, result.audit.duplicates, result.audit.missing) == (num_steps, 0, 0)
    assert result.audit.samples == len(expected) == result.summary["samples"]
    recorded = merge(part for record in result.records for part in record.samples)
    assert count(recorded) == len(expected)
    assert {line.entry.key.trainer for lines in result.steps.values() for line in lines} == set(range(trainers))
    # Every replica of a stage has weights, and they are the targets of its own steps.
    for record in result.records:
        for stage in record.stages:
            assert sum(stage.weights) == count(record.samples) * SEQ_LEN
            assert stage.steps_lost == 0


async def test_hashes_depend_neither_on_the_run_nor_on_the_order_in_which_servers_join(
    make_cluster: MakeCluster,
) -> None:
    # Three replicas: the sum of two does not depend on their order.
    config = make_config(diloco={"inner_steps": 2}, servers={"replicas": 3})
    results: list[ClusterResult] = []
    for replicas, order in (
        ([0, 1, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5]),
        ([0, 1, 0, 1, 0, 1], [5, 2, 0, 1, 4, 3]),
        ([1, 1, 0, 0, 1, 0], [4, 1, 3, 0, 2, 5]),
    ):
        async with make_cluster(config, replicas=replicas, join_order=order) as cluster:
            results.append(await cluster.run())
            # What the record says is what every replica holds.
            for server in cluster.servers:
                held = hashlib.sha256(server.parameters().numpy().tobytes()).hexdigest()
                assert held == results[-1].hashes[server.stage]
    first = results[0]
    assert len(set(first.hashes.values())) == 2
    for result in results[1:]:
        assert result.hashes == first.hashes
        assert result.progress.eval_losses == first.progress.eval_losses
        for record, expected in zip(result.records, first.records, strict=True):
            assert [stage.hashes for stage in record.stages] == [stage.hashes for stage in expected.stages]
    assert first.summary["exit"] == "done"


async def test_another_seed_gives_other_hashes(make_cluster: MakeCluster) -> None:
    hashes: list[Mapping[int, str]] = []
    for seed in (3, 4):
        config = make_config(run={"seed": seed}, diloco={"inner_steps": 2, "outer_steps": 1})
        async with make_cluster(config) as cluster:
            hashes.append((await cluster.run()).hashes)
    assert hashes[0][0] != hashes[1][0]


GPT = make_config(
    model_pipeline={"stages": 2, "microbatches": 3},
    diloco={"inner_steps": 8, "outer_steps": 1, "gradient_accumulation_steps": 2, "max_grad_norm": 0.3},
    servers={"replicas": 1},
)
RESNET = make_config(
    data={"dataset_name": "digits", "task_type": "cv", "img_size": 8, "num_channels": 1, "holdout_fraction": 0.01},
    model={"family": "resnet18", "num_classes": 10},
    model_pipeline={"stages": 2, "microbatches": 2},
    diloco={"inner_steps": 2, "outer_steps": 1, "batch_size_per_step": 4},
    servers={"replicas": 1},
)
GAN = make_config(
    data={
        "dataset_name": "digits",
        "task_type": "image_gen",
        "img_size": 8,
        "num_channels": 1,
        "holdout_fraction": 0.01,
    },
    model={"family": "biggan", "extra": {"generator_channels": 4, "discriminator_channels": 4, "latent_size": 8}},
    model_pipeline={"stages": 1, "microbatches": 2},
    diloco={
        "inner_steps": 3,
        "outer_steps": 1,
        "batch_size_per_step": 4,
        "inner_optim": {"groups": [{"name_patterns": ["gan.generator.*"], "every_steps": 2, "adam_lr": 1e-3}]},
    },
    servers={"replicas": 1},
)


BY_HAND = make_config(
    model_pipeline={"stages": 2, "microbatches": 3, "cut": [1, 3]},
    diloco={
        "inner_steps": 8,
        "outer_steps": 1,
        "gradient_accumulation_steps": 2,
        "inner_optim": {"type": "muon"},
        "lr_schedule": {"type": "wsd", "warmup_steps": 2, "decay_fraction": 0.5},
    },
    servers={"replicas": 1},
)


COMPILED = GPT.model_copy(update={"model_pipeline": GPT.model_pipeline.model_copy(update={"compile": True})})


@pytest.mark.usual("gpt, cut by hand and trained by muon")
@pytest.mark.usefixtures("user_caches")
@pytest.mark.parametrize(
    ("config", "options", "units"),
    [
        (GPT, {}, [["embedding", "block_0", "block_1"], ["head"]]),
        (BY_HAND, {}, [["embedding"], ["block_0", "block_1", "head"]]),
        (RESNET, {"dataset": None}, None),
        (GAN, {"dataset": None}, None),
        pytest.param(COMPILED, {}, None, marks=pytest.mark.slow),
    ],
    ids=["gpt", "gpt, cut by hand and trained by muon", "resnet18", "biggan", "gpt, compiled"],
)
async def test_one_pipeline_is_bit_equal_to_the_plain_loop_until_the_first_averaging(
    make_cluster: MakeCluster, config: Config, options: dict[str, Any], units: list[list[str]] | None
) -> None:
    async with make_cluster(config, **options) as cluster:
        trained: list[tuple[Tensor, list[Tensor]]] = []

        def look() -> None:
            for server in cluster.servers:
                buffers = [buffer.clone() for buffer in server.replica.compute.module.buffers()]
                trained.append((server.parameters(), buffers))

        # By then each stage has applied all steps, and averaged nothing.
        cluster.when(Join, action=look, round=1, after=config.num_stages - 1)
        result = await cluster.run()
        reports: list[BaselineReport] = []
        async with cluster.reader() as feed:
            plain = await run_baseline(config, feed, cluster.device, "cpu", SystemClock(), reports.append)
    assert len(trained) == config.num_stages
    assert units is None or [list(stage.units) for stage in plain.stages] == units
    for stage, (parameters, buffers) in zip(plain.stages, trained, strict=True):
        expected = torch.cat([parameter.detach().reshape(-1) for parameter in stage.parameters()])
        assert torch.equal(parameters, expected)
        for buffer, wanted in zip(buffers, stage.buffers(), strict=True):
            assert torch.equal(buffer, wanted)
    assert reports[0].eval_loss == result.progress.eval_losses[0], "D_0 is the same model, evaluated the same way"
    assert result.progress.loss_last == reports[-1].loss
    assert result.progress.samples == reports[-1].samples


async def test_every_record_is_evaluated_from_round_0_on_and_nothing_is_worth_a_warning(
    make_cluster: MakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_cluster(make_config()) as cluster:
        result = await cluster.run()
        losses = [values["loss/eval"] for values in cluster.monitor.values if "loss/eval" in values]
    assert list(result.progress.eval_losses) == [0, 1, 2, 3]
    noted = [json.loads(line)["event"] for line in cluster.monitor.noted]
    assert not [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert noted.count("round.recorded") == 3, "the monitor hears of what the client notes"
    assert losses == list(result.progress.eval_losses.values())
    assert losses[0] > losses[-1]
    assert result.summary["eval_loss_first"] == losses[0]
    assert result.summary["eval_loss_last"] == losses[-1]


async def test_only_every_nth_record_is_evaluated_and_always_the_first_and_the_last(make_cluster: MakeCluster) -> None:
    config = make_config(run={"eval_every": 2}, servers={"replicas": 1})
    async with make_cluster(config) as cluster:
        result = await cluster.run()
        reports: list[BaselineReport] = []
        async with cluster.reader() as feed:
            await run_baseline(config, feed, cluster.device, "cpu", SystemClock(), reports.append)
    assert config.diloco.outer_steps == 3
    assert list(result.progress.eval_losses) == [0, 2, 3]
    steps = [report.step for report in reports if report.eval_loss is not None]
    assert steps == [0, 2 * config.diloco.inner_steps, 3 * config.diloco.inner_steps]


async def test_a_spare_server_stays_current_with_weight_0(make_cluster: MakeCluster) -> None:
    # The spare is the last of its stage to join, although it is numbered first.
    async with make_cluster(make_config(), replicas=[0, 0, 0, 1, 1], join_order=[1, 2, 3, 4, 0]) as cluster:
        result = await cluster.run()
        spare, *homes = cluster.servers[:3]
        assert all(torch.equal(spare.parameters(), home.parameters()) for home in homes)
        announced = [cluster.view.replica(server.peer) for server in (spare, *homes)]
        assert [(r.step, r.base_round) for r in announced if r is not None] == [(0, 3), (12, 3), (12, 3)]
    for record in result.records:
        members = dict(zip(record.stages[0].members, record.stages[0].weights, strict=True))
        assert members == {spare.peer: 0, homes[0].peer: 16 * SEQ_LEN, homes[1].peer: 16 * SEQ_LEN}
        assert record.stages[0].members[-1] == spare.peer
    assert result.summary["replicas"] == 5
    assert result.summary["pipelines_max"] == 2


async def test_pseudo_gradients_travel_as_configured_and_a_replay_rounds_them_likewise(
    make_cluster: MakeCluster,
) -> None:
    config = make_config(diloco={"averaging_compression": "bf16"})
    usual = await run_undisturbed(make_cluster, make_config())
    async with make_cluster(config) as cluster:
        result = await cluster.run()
        log_dir = cluster.host.log_dir
    sent, usually_sent = (each.summary["bytes_sent"]["pseudo_gradients"] for each in (result, usual))
    assert 0.4 < sent / usually_sent < 0.6
    assert result.records[0].samples == usual.records[0].samples
    assert all(result.hashes[stage] != usual.hashes[stage] for stage in (0, 1))
    reproduces(log_dir, config, make_text(1000))
    with pytest.raises(ConfigError, match=r"averaging_compression: 'none' instead of 'bf16'"):
        replay(log_dir, config=make_config(), dataset=make_text(1000))
