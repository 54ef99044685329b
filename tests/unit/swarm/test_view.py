"""Queries of the swarm's picture."""

from __future__ import annotations

from shoal.ids import PeerId, StageIndex
from shoal.swarm.view import Candidate, ClientPeer, Replica, SwarmView
from shoal.wire.messages.base import Hop


def _hop(name: str) -> Hop:
    return Hop(PeerId(name), (f"unix:/{name}",))


VIEW = SwarmView(
    replicas=(
        Replica(_hop("a"), 1.0, stage=StageIndex(0)),
        Replica(_hop("b"), 2.0, stage=StageIndex(0)),
        Replica(_hop("c"), 3.0, stage=StageIndex(2)),
    ),
    candidates=(Candidate(_hop("d"), 4.0),),
    clients=(ClientPeer(_hop("e"), 0.0),),
    monitor=_hop("m"),
)


def test_missing_stages_are_those_without_a_replica() -> None:
    assert VIEW.missing_stages(4) == (1, 3)
    assert VIEW.num_replicas(3) == (2, 0, 1)
    assert VIEW.max_pipelines(3) == 0
    assert VIEW.max_pipelines(1) == 2


def test_a_replica_of_a_stage_that_the_run_does_not_have_counts_nowhere() -> None:
    assert VIEW.num_replicas(2) == (2, 0)


def test_peers_are_counted_in_every_role() -> None:
    assert VIEW.num_servers == 4
    assert VIEW.num_peers == 6


def test_without_takes_a_peer_out_of_every_role() -> None:
    rest = VIEW.without({PeerId("a"), PeerId("d"), PeerId("e"), PeerId("m")})
    assert [r.peer for r in rest.replicas] == ["b", "c"]
    assert (rest.candidates, rest.clients, rest.monitor) == ((), (), None)
    assert rest.replica(PeerId("a")) is None
    assert VIEW.replica(PeerId("a")) is not None
