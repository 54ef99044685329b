"""Any one process of a running swarm dies or freezes: the run goes on, and nothing shows it afterwards.

How long that takes is not asserted here: `benchmarks/faults.py` measures it, with the same faults.
"""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import pytest
from tests.e2e.hosts import end_whole, two_server_hosts
from tests.e2e.launched import END_S, ENDLESS, START_S, launched, until
from tests.e2e.needs import needs_namespaces

from shoal_lab.faults.deaths import KINDS, inflict
from shoal_lab.observed import Swarm
from shoal_lab.verdict import require_whole

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_FLAGS = (*ENDLESS, "--log-level=debug", "--diloco.inner-steps=8")
_FROZEN_AND_NOT_WAITED_FOR = ("server-stopped", "data-server-stopped")
_RUNS = {
    "a server": ("server", "server-stopped"),
    "a trainer or the data": ("trainer", "trainer-stopped", "data-server", "data-server-stopped"),
    "the client or the monitor": ("client", "client-stopped", "p2pd", "monitor", "monitor-stopped"),
    "the fork server or the mirror": ("fork-server", "mirror", "mirror-stopped"),
}
"""Which deaths one run gets over, one after the other: a swarm takes longer to start than to heal."""


def test_each_kind_of_death_has_its_run() -> None:
    assert sorted(kind for kinds in _RUNS.values() for kind in kinds) == sorted(KINDS)


@pytest.mark.parametrize("of", list(_RUNS))
def test_a_run_gets_over_the_loss_of(of: str, tmp_path: Path) -> None:
    with launched(tmp_path, *_FLAGS) as run:
        swarm = Swarm(run, [run], num_slots=2)
        until(swarm.is_training, 2 * START_S, "training")
        for kind in _RUNS[of]:
            strike = inflict(KINDS[kind], swarm, Random(kind))
            if kind in _FROZEN_AND_NOT_WAITED_FOR:
                # A whole round was got over the fault, and not only a step: on a busy machine one takes seconds.
                assert swarm.records_between(strike.at_s, strike.at_s + KINDS[kind].held_s) >= 1, kind
        end_whole(swarm)


@needs_namespaces
def test_a_killed_supervisor_takes_its_own_host_with_it_and_no_other(tmp_path: Path) -> None:
    with two_server_hosts(tmp_path, _FLAGS, 2) as (swarm, _):
        left, right = swarm.server_hosts
        at_s = time.time()
        left.kill()
        left.leaves_nothing()
        until(lambda: swarm.num_records(at_s) >= 2, START_S, "rounds over the other host")
        swarm.client.kill()
        swarm.client.leaves_nothing()
        # Servers wait for a client that comes back; they do not take their time to leave when they are told to.
        assert right.process.poll() is None, right.output
        right.interrupt()
        assert right.ends(END_S) == 130, right.output
        right.leaves_nothing()
        require_whole(swarm)
