"""A swarm that does without every call that only Linux has, which is how it runs elsewhere."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from tests.e2e.hosts import end_whole
from tests.e2e.launched import ENDLESS, START_S, launched, until

from shoal.runtime.linux_calls import FORCE_PORTABLE
from shoal_lab.faults.deaths import KINDS, inflict
from shoal_lab.observed import Swarm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_WITHOUT = {FORCE_PORTABLE: "1"}
_FLAGS = (*ENDLESS, "--log-level=debug")


def test_a_run_gets_over_the_loss_of_a_server_and_of_its_fork_server_and_leaves_nothing(tmp_path: Path) -> None:
    with launched(tmp_path, *_FLAGS, environment=_WITHOUT) as run:
        swarm = Swarm(run, [run], num_slots=2)
        until(swarm.is_training, 2 * START_S, "training")
        for kind in ("server", "fork-server", "p2pd"):
            inflict(KINDS[kind], swarm, Random(kind))
        # Batches lie in a file, which only its owner can read.
        (pool,) = run.runtime_dir.rglob("shoal-batches-*")
        assert pool.stat().st_mode & 0o777 == 0o600
        end_whole(swarm)


def test_of_a_killed_launcher_nothing_is_left(tmp_path: Path) -> None:
    with launched(tmp_path, *_FLAGS, environment=_WITHOUT) as run:
        until(Swarm(run, [run], num_slots=2).is_training, 2 * START_S, "training")
        run.kill()
        run.leaves_nothing()
