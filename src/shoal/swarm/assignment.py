"""Which stage a server takes that was given none, by a rule that everybody computes alike.

Servers that start together must not race into one gap. So nobody grabs a stage: each announces itself as a candidate,
waits until it sees the others, and computes the assignment of *all* of them, oldest first, each to the stage that has
the least capacity at that point. Who has announced its stage a moment earlier is counted as if it were still a
candidate (as long as it has trained nothing), so that it does not matter in which order the announcements are seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.ids import PeerId, StageIndex
from shoal.swarm.view import Candidate, Replica, SwarmView


def assign(view: SwarmView, num_stages: int, stage_bytes: Sequence[int] = ()) -> dict[PeerId, StageIndex]:
    """Return the stage of every server that is still free to choose.

    Args:
        view: the servers that are there.
        num_stages: stages are 0..num_stages-1.
        stage_bytes: memory that each stage needs; a server that says it has less does not take it. Empty: any fits.

    Returns:
        A stage for each candidate and for each replica that is not pinned and has trained nothing yet. A candidate
        that no stage fits is left out.
    """
    settled = [r for r in view.replicas if r.pinned or _has_trained(r)]
    movable = [r for r in view.replicas if not (r.pinned or _has_trained(r))]
    assigned = _fill(settled, [*view.candidates, *movable], num_stages, stage_bytes)
    if all(assigned.get(replica.peer) == replica.stage for replica in movable):
        return assigned
    # Somebody who was counted on has left, or chose by another view: what is announced counts, not what should be.
    return {r.peer: r.stage for r in movable} | _fill(view.replicas, view.candidates, num_stages, stage_bytes)


def _has_trained(replica: Replica) -> bool:
    # Not `serving` alone: the first servers of a start serve before the last have chosen, who would then count anew.
    return replica.serving and (replica.step > 0 or replica.held_round > 0 or replica.capacity > 0)


def _fill(
    settled: Sequence[Replica], choosers: Iterable[Candidate], num_stages: int, stage_bytes: Sequence[int]
) -> dict[PeerId, StageIndex]:
    """Give each chooser, oldest first, the stage that has the least capacity with those before it."""
    measured = [r.capacity for r in settled if r.capacity > 0]
    # A server that has not measured itself counts as an average one.
    average = sum(measured) / len(measured) if measured else 1.0
    counts = dict.fromkeys(range(num_stages), 0)
    capacity = dict.fromkeys(range(num_stages), 0.0)
    for replica in settled:
        if replica.stage < num_stages:
            counts[replica.stage] += 1
            capacity[replica.stage] += replica.capacity or average
    assigned: dict[PeerId, StageIndex] = {}
    for chooser in sorted(choosers, key=lambda c: c.seniority):
        fitting = [s for s in range(num_stages) if _fits(chooser, s, stage_bytes)]
        if not fitting:
            continue
        stage = min(fitting, key=lambda s: _need(s, counts, capacity))
        counts[stage] += 1
        capacity[stage] += average
        assigned[chooser.peer] = StageIndex(stage)
    return assigned


def _need(stage: int, counts: Mapping[int, int], capacity: Mapping[int, float]) -> tuple[bool, float, int, int]:
    """Order stages by need, the neediest first: none at all, then least capacity, then fewest replicas."""
    return (counts[stage] > 0, capacity[stage], counts[stage], stage)


def _fits(server: Candidate, stage: int, stage_bytes: Sequence[int]) -> bool:
    return not stage_bytes or not server.free_memory_bytes or stage_bytes[stage] <= server.free_memory_bytes
