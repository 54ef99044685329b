"""Disjoint complete pipelines, and the order in which replicas are tried."""

from __future__ import annotations

import random

import pytest

from shoal.ids import PeerId, StageIndex
from shoal.swarm.routing import Pipeline, form_pipelines, replicas_for
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.base import Hop


def _replica(name: str, stage: int, join_unix_s: float = 0.0, **fields: float) -> Replica:
    hop = Hop(PeerId(name), (f"unix:/{name}",))
    return Replica(hop, join_unix_s, stage=StageIndex(stage), **fields)


def _view(*replicas: Replica) -> SwarmView:
    return SwarmView(tuple(sorted(replicas, key=lambda r: (r.stage, r.seniority))))


def _check(view: SwarmView, num_stages: int, pipelines: tuple[Pipeline, ...]) -> None:
    peers = [peer for pipeline in pipelines for peer in pipeline.peers]
    assert len(peers) == len(set(peers)), "disjoint"
    for pipeline in pipelines:
        found = [view.replica(peer) for peer in pipeline.peers]
        assert [replica.stage for replica in found if replica is not None] == list(range(num_stages)), "complete"
    assert len(pipelines) == view.max_pipelines(num_stages), "as many as possible"
    slots = [pipeline.slot for pipeline in pipelines]
    assert slots == sorted(set(slots))


@pytest.mark.parametrize("seed", range(60))
def test_pipelines_stay_disjoint_complete_and_stable_while_replicas_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    num_stages = rng.randint(1, 4)
    alive: list[Replica] = []
    pipelines: tuple[Pipeline, ...] = ()
    for i in range(40):
        if alive and rng.random() < 0.4:
            alive.remove(rng.choice(alive))
        else:
            alive.append(_replica(f"p{i}", rng.randrange(num_stages), rng.random()))
        view = _view(*alive)
        before, pipelines = pipelines, form_pipelines(view, num_stages, pipelines)
        _check(view, num_stages, pipelines)
        assert form_pipelines(view, num_stages, before) == pipelines, "deterministic"
        whole = [p for p in before if all(view.replica(peer) for peer in p.peers)]
        assert set(whole) <= set(pipelines), "what is whole stays as it is"
        after = {p.slot: p for p in pipelines}
        for broken in (p for p in before if p not in whole and p.slot in after):
            kept = [peer for peer in broken.peers if view.replica(peer)]
            assert set(kept) <= set(after[broken.slot].peers), "what is left of a pipeline stays in it"


def test_the_slot_of_a_pipeline_that_is_gone_is_given_out_again() -> None:
    four = [_replica("a0", 0, 0), _replica("b0", 0, 1), _replica("a1", 1, 0), _replica("b1", 1, 1)]
    two = form_pipelines(_view(*four), 2)
    assert [p.peers for p in two] == [("a0", "a1"), ("b0", "b1")]
    one = form_pipelines(_view(four[1], four[3]), 2, two)
    assert one == (two[1],)
    again = form_pipelines(_view(four[1], four[3], _replica("c0", 0, 2), _replica("c1", 1, 2)), 2, one)
    assert [(p.slot, p.peers) for p in again] == [(0, ("c0", "c1")), (1, ("b0", "b1"))]


def test_a_trainer_tries_its_own_replica_then_idle_ones_then_those_of_others_by_load() -> None:
    view = _view(
        _replica("busy", 0, 0, load=3.0),
        _replica("home", 0, 1, load=9.0),
        _replica("calm", 0, 2, load=1.0),
        _replica("idle", 0, 3, load=5.0),
    )
    pipelines = tuple(Pipeline(slot, (Hop(PeerId(name), ()),)) for slot, name in enumerate(["busy", "home", "calm"]))
    assert [replica.peer for replica in replicas_for(1, view, pipelines, 1)[0]] == ["home", "idle", "calm", "busy"]
