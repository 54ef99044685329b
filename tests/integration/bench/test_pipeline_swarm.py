"""A swarm that trains in bursts: real processes, a tiny model; nothing here judges speed."""

from __future__ import annotations

import pytest

from shoal_lab.bench.peers import PeerProcesses

pytestmark = pytest.mark.slow

TINY = (
    "--model.hidden-size=16",
    "--model.num-heads=2",
    "--model.num-layers=2",
    "--model-pipeline.stages=2",
    "--data.seq-len=16",
    "--data.holdout-fraction=0.001",
    "--diloco.batch-size-per-step=8",
    "--diloco.inner-steps=1000000",
)


def test_bursts_tell_what_their_steps_took_and_between_them_nothing_is_trained() -> None:
    with PeerProcesses("shoal_lab.bench.pipeline_swarm:main", 1, {"flags": TINY}, timeout_s=120.0) as peers:
        [first], [second] = peers.call("burst", 20), peers.call("burst", 20)
    for burst in (first, second):
        assert burst["num_steps"] >= 19
        assert burst["step_s"] > 0
        assert burst["cpu_s"] > 0
        assert len(burst["device_s"]) == 2
    assert second["steps"] == first["steps"] + second["num_steps"]
