"""The only server of a stage is killed, and its next process goes on from what a server of the other stage has kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e.launched import SMALL, completed

from shoal.replay.replay import replay

pytestmark = pytest.mark.slow


def test_a_killed_server_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    # The sixth step of round 1; the run waits until the stage is served again.
    run = completed(
        tmp_path,
        *SMALL,
        "--diloco.inner-steps=10",
        "--servers.replicas=1",
        "--diloco.snapshot-every-steps=1",
        "--emulation.call-s=0.05",
        "--emulation.deaths=server:1@commit#5",
    )
    assert (run.summary()["duplicates"], run.summary()["missing"]) == (0, 0)
    assert run.summary()["steps_lost"]["1"] <= 3
    [resumed] = run.events("server_1", "replica.resumed")
    assert resumed["steps"] >= 3
    assert replay(run.require_log_dir()).agrees
