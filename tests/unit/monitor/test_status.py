"""The newest numbers of a run by name."""

from __future__ import annotations

import math

from shoal.ids import PeerId, StageIndex
from shoal.monitor.status import Status
from shoal.swarm.view import PeerLabel, Replica, SwarmView
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import Metrics

PEER = PeerId("12D3KooWabcdef")
NAMED = SwarmView(labels={PEER: PeerLabel("server", "box2", 1)})


def _metrics(role: str, values: dict[str, float], round: int = 3, peer: str = PEER) -> Metrics:
    return Metrics(role, PeerId(peer), round, values)


def test_numbers_of_the_run_keep_their_names_and_others_are_prefixed() -> None:
    status = Status(2)
    assert status.add(_metrics("client", {"loss/train": 2.5}), 0.0) == {"loss/train": 2.5, "round": 3.0}
    assert status.add(_metrics("baseline", {"loss/baseline": 2.0}, round=1), 0.0) == {"loss/baseline": 2.0}
    assert status.add(_metrics("server", {"loss/train": 0.0}), 0.0) == {"peer ...oWabcdef/loss/train": 0.0}
    status.seen(NAMED)
    assert status.add(_metrics("server", {"loss/train": 0.0}), 0.0) == {"server 1@box2/loss/train": 0.0}
    assert status.values["loss/train"] == 2.5
    assert status.values["round"] == 3.0


def test_what_is_not_finite_is_left_out() -> None:
    status = Status(2)
    assert status.add(_metrics("baseline", {"a": math.nan, "b": math.inf, "c": 1.0}), 0.0) == {"c": 1.0}


def test_the_number_of_names_is_bounded() -> None:
    status = Status(2)
    for i in range(5000):
        status.add(_metrics("server", {f"n{i}": 1.0}), 0.0)
    assert len(status.values) == 2000
    assert status.add(_metrics("server", {"n1": 7.0}), 0.0) == {"peer ...oWabcdef/n1": 7.0}, "known still"


def test_the_registry_counts_until_the_client_says_better() -> None:
    status = Status(2)
    hop = Hop(PeerId("a"), ())
    status.seen(SwarmView(replicas=(Replica(hop, 0.0, stage=StageIndex(0)),), monitor=hop))
    assert status.values == {
        "alive_peers": 2.0,
        "missing_stages": 1.0,
        "pipelines": 0.0,
        "replicas/0": 1.0,
        "replicas/1": 0.0,
    }
    status.add(_metrics("client", {"alive_peers": 9.0}), 0.0)
    status.seen(SwarmView())
    assert status.values["alive_peers"] == 9.0
    assert status.values["missing_stages"] == 2.0


def test_a_message_from_before_the_first_round_says_nothing_of_the_round() -> None:
    status = Status(2)
    assert status.add(_metrics("client", {"counters/a": 1.0}, round=0), 0.0) == {"counters/a": 1.0}
    assert "round" not in status.values
    status.add(_metrics("client", {"step": 1.0}, round=4), 1.0)
    status.add(_metrics("client", {"counters/a": 2.0}, round=0), 2.0)
    assert status.values["round"] == 4.0


def test_each_number_carries_when_it_came() -> None:
    status = Status(2)
    status.add(_metrics("client", {"step": 1.0, "pipelines": 1.0}), 10.0)
    status.add(_metrics("client", {"pipelines": 0.0}), 45.0)
    assert status.at_s == {"step": 10.0, "pipelines": 45.0, "round": 45.0}


def test_when_the_client_is_gone_the_registry_counts_until_a_client_speaks_again() -> None:
    status = Status(2)
    status.add(_metrics("client", {"replicas/0": 1.0, "step": 9.0}, peer="client"), 0.0)
    status.seen(SwarmView())
    assert status.values["replicas/0"] == 1.0
    assert not status.lost(PeerId("somebody"))
    assert status.values["replicas/0"] == 1.0
    assert status.lost(PeerId("client"))
    assert (status.values["replicas/0"], status.values["step"]) == (0.0, 9.0)
    status.add(_metrics("client", {"replicas/0": 2.0}, peer="client"), 0.0)
    assert status.values["replicas/0"] == 2.0
