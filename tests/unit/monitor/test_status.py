"""The newest numbers of a run by name."""

from __future__ import annotations

import math

from shoal.ids import PeerId, StageIndex
from shoal.monitor.status import Status
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import Metrics


def _metrics(role: str, values: dict[str, float], round: int = 3, peer: str = "12D3KooWabcdef") -> Metrics:
    return Metrics(role, PeerId(peer), round, values)


def test_numbers_of_the_run_keep_their_names_and_others_are_prefixed() -> None:
    status = Status(2)
    assert status.add(_metrics("client", {"loss/train": 2.5})) == {"loss/train": 2.5, "round": 3.0}
    assert status.add(_metrics("baseline", {"loss/baseline": 2.0}, round=1)) == {"loss/baseline": 2.0}
    assert status.add(_metrics("server", {"loss/train": 0.0})) == {"server/abcdef/loss/train": 0.0}
    assert status.values["loss/train"] == 2.5
    assert status.values["round"] == 3.0


def test_what_is_not_finite_is_left_out() -> None:
    status = Status(2)
    assert status.add(_metrics("baseline", {"a": math.nan, "b": math.inf, "c": 1.0})) == {"c": 1.0}


def test_the_number_of_names_is_bounded() -> None:
    status = Status(2)
    for i in range(5000):
        status.add(_metrics("server", {f"n{i}": 1.0}))
    assert len(status.values) == 2000
    assert status.add(_metrics("server", {"n1": 7.0})) == {"server/abcdef/n1": 7.0}, "known names are still updated"


def test_the_registry_counts_until_the_client_says_better() -> None:
    status = Status(2)
    hop = Hop(PeerId("a"), ())
    status.seen(SwarmView(replicas=(Replica(hop, 0.0, stage=StageIndex(0)),), monitor=hop))
    assert status.values == {"alive_peers": 2.0, "missing_stages": 1.0, "pipelines": 0.0}
    status.add(_metrics("client", {"alive_peers": 9.0}))
    status.seen(SwarmView())
    assert status.values["alive_peers"] == 9.0
    assert status.values["missing_stages"] == 2.0
