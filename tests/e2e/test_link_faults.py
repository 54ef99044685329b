"""Hosts of a running swarm lose their links to each other, in one direction, both, or again and again.

The run goes on, what the hosts that were apart still send is refused, and nothing shows it afterwards. How long
trainers are without a step is logged, not asserted: `benchmarks/faults.py` measures it, with the same faults.
"""

from __future__ import annotations

import logging
from pathlib import Path
from random import Random

import pytest
from tests.e2e.deaths import LINK_KINDS
from tests.e2e.hosts import end_whole, two_server_hosts
from tests.e2e.launched import ENDLESS
from tests.e2e.namespaces import Lan
from tests.e2e.needs import needs_namespaces

from shoal_lab.event_log import time_of
from shoal_lab.faults.deaths import Kind, Strike, inflict
from shoal_lab.observed import Swarm

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, needs_namespaces]
logger = logging.getLogger(__name__)

_FLAGS = (*ENDLESS, "--log-level=debug", "--diloco.inner-steps=8")


_RUNS = {
    "a host of servers": ("link-down", "link-mute", "link-deaf"),
    "two hosts and each other": ("link-pair", "partition"),
    "the client, or again and again": ("client-apart", "flapping"),
}
"""Which faults one run gets over, one after the other: three hosts take longer to start than to heal."""


def test_each_kind_of_fault_has_its_run() -> None:
    assert sorted(kind for kinds in _RUNS.values() for kind in kinds) == sorted(LINK_KINDS)


@pytest.mark.parametrize("of", list(_RUNS))
def test_a_run_gets_over_lost_links_of(of: str, tmp_path: Path) -> None:
    with two_server_hosts(tmp_path, _FLAGS, 2) as (swarm, network):
        for name in _RUNS[of]:
            _gets_over(name, swarm, network)
        end_whole(swarm)


def _gets_over(name: str, swarm: Swarm, network: Lan) -> None:
    kind = LINK_KINDS[name](network)
    strike = inflict(kind, swarm, Random(name))
    end_s = strike.at_s + kind.held_s
    longest_s = swarm.longest_pause_s(strike.at_s - 1.0, end_s + 10.0)
    logger.warning("%s: %s, no step for %.2f s at most", name, strike.victim, longest_s)
    if name == "client-apart":
        # What was under way is over when silence has ended the connections.
        assert not swarm.records_between(strike.at_s + kind.held_s / 2, end_s)
    else:
        # A whole round was got over the fault, and not only a step: on a busy machine one takes seconds.
        assert swarm.records_between(strike.at_s, end_s) >= 1, name
    if kind.limit_s is not None:
        _nobody_uses_who_is_away(swarm, strike, kind)


def _nobody_uses_who_is_away(swarm: Swarm, strike: Strike, kind: Kind) -> None:
    """Check the order of events: while the fault lasts a trainer has stepped over others, if it had anything to do, and
    it does so until who was away has caught up."""
    end_s = strike.at_s + kind.held_s
    caught_up = [server.swapped(end_s)[0] for server in strike.away]
    back_at_s = {server.peer: time_of(event) for server, event in zip(strike.away, caught_up, strict=True)}
    assert strike.hit
    for slot in strike.hit:
        first = strike.next_step(swarm, slot)
        assert first is not None
        assert first.at_s < end_s or _had_done_its_round(swarm, slot, first.at_s)
        later = [step for step in swarm.steps(slot) if step.at_s >= first.at_s]
        assert all(step.at_s > back_at_s.get(peer, 0.0) for step in later for peer in step.path)


def _had_done_its_round(swarm: Swarm, slot: int, before_s: float) -> bool:
    """Whether a trainer had no step left of its round when it went without a pipeline until then: such a trainer is
    given no steps of the next rounds."""
    steps_s = [step.at_s for step in swarm.steps(slot) if step.at_s < before_s]
    done = [event for event in swarm.events("client_0", "trainer.done") if event["slot"] == slot]
    return max(time_of(event) for event in done if time_of(event) < before_s) >= max(steps_s)
