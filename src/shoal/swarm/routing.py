"""Disjoint complete pipelines over the replicas of a view, and which replica to take when one is lost.

Forming is deterministic given the view and stable: a pipeline whose replicas are all there stays as it is, and one
that lost some keeps the others, as long as there are enough replicas to complete it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from shoal.ids import PeerId
from shoal.swarm.view import Replica, SwarmView
from shoal.wire.messages.base import Hop, Replicas


@dataclass(frozen=True)
class Pipeline:
    """A complete path that one trainer has as its home.

    Attributes:
        slot: the trainer's number; slots of pipelines that are gone are given out again, lowest first.
        path: one replica of each stage, in stage order.
    """

    slot: int
    path: tuple[Hop, ...]

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers of the path, in stage order."""
        return tuple(hop.peer for hop in self.path)


def form_pipelines(view: SwarmView, num_stages: int, existing: Sequence[Pipeline] = ()) -> tuple[Pipeline, ...]:
    """Return as many disjoint complete pipelines as the replicas allow, in slot order."""
    free = [list(view.by_stage(stage)) for stage in range(num_stages)]
    num_pipelines = min((len(replicas) for replicas in free), default=0)
    kept: dict[int, list[Replica | None]] = {}
    # Complete ones first: none of them may lose a replica to the repair of another.
    ordered = sorted(existing, key=lambda p: (_num_lost(p, free), p.slot))
    for pipeline in ordered[:num_pipelines]:
        kept[pipeline.slot] = [_take(free[stage], hop.peer) for stage, hop in enumerate(pipeline.path[:num_stages])]
    new_slots = (slot for slot in count() if slot not in kept)
    while len(kept) < num_pipelines:
        kept[next(new_slots)] = [None] * num_stages
    return tuple(
        Pipeline(slot, tuple((replica or free[stage].pop(0)).hop for stage, replica in enumerate(path)))
        for slot, path in sorted(kept.items())
    )


def replicas_for(slot: int, view: SwarmView, pipelines: Sequence[Pipeline], num_stages: int) -> Replicas:
    """Return the replicas of each stage in the order in which the trainer of `slot` should try them.

    Its own first, then those of no pipeline, then those of other pipelines; each by load, then by seniority.
    """
    home = {peer for pipeline in pipelines if pipeline.slot == slot for peer in pipeline.peers}
    taken = {peer for pipeline in pipelines for peer in pipeline.peers}

    def preference(replica: Replica) -> tuple[bool, bool, float]:
        return (replica.peer not in home, replica.peer in taken, replica.load)

    return tuple(
        tuple(replica.ref for replica in sorted(view.by_stage(stage), key=preference)) for stage in range(num_stages)
    )


def _num_lost(pipeline: Pipeline, free: Sequence[Iterable[Replica]]) -> int:
    there = [{replica.peer for replica in replicas} for replicas in free]
    return sum(peer not in peers for peer, peers in zip(pipeline.peers, there, strict=False))


def _take(free: list[Replica], peer: PeerId) -> Replica | None:
    """Remove a peer's replica from `free` and return it; None if it is not there."""
    for replica in free:
        if replica.peer == peer:
            free.remove(replica)
            return replica
    return None
