"""Whole runs with every schedule, on devices of any speed: the numbers stay the same, and faults cost no more."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shoal.swarm import flight_window
from shoal.wire.messages.step import Backward
from shoal_lab.emulation.device_pace import DevicePace

from .conftest import MakeCluster, make_config, run_undisturbed


@pytest.mark.usual("gpipe-False", "zero_bubble-True")
@pytest.mark.parametrize("activation_checkpointing", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
async def test_a_run_has_the_hashes_and_losses_of_1f1b(
    make_cluster: MakeCluster, schedule: str, activation_checkpointing: bool
) -> None:
    usual = await run_undisturbed(make_cluster, make_config())
    flow = {"schedule": schedule, "activation_checkpointing": activation_checkpointing}
    async with make_cluster(make_config(model_pipeline=flow)) as cluster:
        result = await cluster.run()
    assert result.hashes == usual.hashes
    assert result.progress.eval_losses == usual.progress.eval_losses


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
async def test_a_run_whose_windows_grow_has_the_hashes_of_one_whose_windows_do_not(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    flow = {"schedule": schedule, "microbatches": 6}
    config = make_config(model_pipeline=flow, diloco={"batch_size_per_step": 6, "inner_steps": 6})
    usual = await run_undisturbed(make_cluster, config)
    sent_at_once = set[int]()

    def far(fed_s: Sequence[float], _done_s: Sequence[float]) -> int:
        sent_at_once.add(fed_s.count(fed_s[0]))
        return len(fed_s)

    # As if the trainers had seen a line.
    monkeypatch.setattr(flight_window, "held", far)
    async with make_cluster(config) as cluster:
        result = await cluster.run()
    assert sent_at_once == {3, 6}
    assert result.hashes == usual.hashes
    assert result.progress.eval_losses == usual.progress.eval_losses


async def test_devices_of_any_pace_end_with_the_same_hashes(make_cluster: MakeCluster) -> None:
    usual = await run_undisturbed(make_cluster, make_config())
    paces = {0: DevicePace(factor=3.0, changes=((8, 1.0),)), 3: DevicePace(forward_s=0.003, weight_gradient_s=0.002)}
    async with make_cluster(make_config(), paces=paces) as cluster:
        result = await cluster.run()
        slowest = cluster.servers[3].process.endpoint.metrics.counts()
    assert result.hashes == usual.hashes
    # The last stage's losses: 3 rounds of 4 steps of 2 microbatches.
    assert slowest["device.busy_us{kind=loss,stage=1}"] >= 24 * 5000


async def test_a_server_that_dies_between_a_gradient_and_its_weights_loses_no_sample(make_cluster: MakeCluster) -> None:
    config = make_config(model_pipeline={"schedule": "zero_bubble", "microbatches": 4})
    async with make_cluster(config, num_train=100, replicas=[0, 1, 0, 1]) as cluster:
        cluster.when(Backward, action=lambda: cluster.kill_server(1), sender=cluster.servers[1].peer, number=7)
        result = await cluster.run()
    assert (result.audit.duplicates, result.audit.missing) == (0, 0)
    assert result.summary["exit"] == "done"
