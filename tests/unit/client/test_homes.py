"""Whom the trainers of a round may use, and are told of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from shoal.client.homes import Homes
from shoal.ids import PeerId, StageIndex
from shoal.swarm.routing import Pipeline
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.base import Hop


def replica(name: str) -> Replica:
    """One named after its stage, as in a0 b1."""
    return Replica(Hop(PeerId(name), (f"unix:/{name}",)), 0.0, stage=StageIndex(int(name[1])))


class Swarm:
    """The replicas that are there, of which one pipeline is made."""

    def __init__(self, *names: str) -> None:
        path = tuple(replica(name).hop for name in names)
        self.homes = Homes(
            machine=cast(Any, SimpleNamespace(pipelines=(Pipeline(0, path),), holders={})),
            num_stages=2,
            endpoint=cast(Any, SimpleNamespace(post=lambda *_: None)),
            coordinator=cast(Any, SimpleNamespace(holders=None)),
            membership=cast(Any, SimpleNamespace(view=SwarmView())),
            trainers=cast(Any, SimpleNamespace(present={0: Hop(PeerId("trainer"), ())})),
            reassignment=cast(Any, SimpleNamespace(usable=lambda _view, _holders: self.view)),
            employ=lambda *_: b"",
        )
        self.has(*names)

    def has(self, *names: str) -> None:
        self.view = SwarmView(tuple(map(replica, sorted(names, key=lambda name: name[1]))))
        self.homes.tell_trainers()


async def test_whoever_trainers_are_told_of_in_a_round_is_remembered() -> None:
    swarm = Swarm("a0", "b1")
    swarm.has("a0", "b1", "c1")
    swarm.has("a0", "b1")
    assert swarm.homes.named == {"a0", "b1", "c1"}


async def test_replicas_at_home_in_slots_come_before_the_others() -> None:
    swarm = Swarm("b0", "b1")
    swarm.has("a0", "b0", "a1", "b1")
    assert swarm.homes.in_order() == [["b0", "a0"], ["b1", "a1"]]
