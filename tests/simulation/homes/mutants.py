"""What a client decides around a round, with a rule left out each; `test_mutants.py` runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tests.simulation.homes.world import Decisions, World

from shoal.ids import PeerId
from shoal.swarm.contribution_guard import scales_of
from shoal.swarm.ring_order import Links, ring_order
from shoal.swarm.round_boundary import boundary_s, deadline_s
from shoal.swarm.routing import Pipeline, form_pipelines, replicas_for
from shoal.swarm.view import SwarmView
from shoal.wire.messages.base import Replicas
from shoal.wire.messages.round import Join, LinkReport


def forms_anew(view: SwarmView, num_stages: int, existing: Sequence[Pipeline] = ()) -> tuple[Pipeline, ...]:
    """Does not ask which pipelines there were."""
    return form_pipelines(view, num_stages)


def forgets_the_spares(slot: int, view: SwarmView, pipelines: Sequence[Pipeline], num_stages: int) -> Replicas:
    """Gives a trainer only what is in some pipeline."""
    found = replicas_for(slot, view, pipelines, num_stages)
    used = {peer for pipeline in pipelines for peer in pipeline.peers}
    return tuple(tuple(replica for replica in stage if replica.peer in used) for stage in found)


def forgets_its_own(slot: int, view: SwarmView, pipelines: Sequence[Pipeline], num_stages: int) -> Replicas:
    """Gives each trainer the replicas in one and the same order."""
    return replicas_for(-1, view, pipelines, num_stages)


def waits_for_the_hung(durations_s: Sequence[float], first_deadline_s: float) -> float:
    """Never ends a round before all are done."""
    return math.inf if durations_s else boundary_s(durations_s, first_deadline_s)


def believes_even_rounds(durations_s: Sequence[float], first_deadline_s: float) -> float:
    """Takes rounds for as even as the last ones were."""
    return deadline_s(durations_s, 0.0, first_deadline_s)


def stands_as_it_came(members: Sequence[PeerId], links: Links) -> tuple[PeerId, ...]:
    """Does not look at the links."""
    return tuple(members)


def knows_no_hosts(members: Sequence[PeerId], links: Links) -> tuple[PeerId, ...]:
    """Takes each member for one on a host of its own."""
    far = {peer: [LinkReport(r.peer, r.round_trip_ms, r.bandwidth_mbit) for r in links[peer]] for peer in links}
    return ring_order(members, far)


def clips_nobody(joins: Mapping[PeerId, Join], max_ratio: float | None) -> dict[PeerId, float]:
    """Leaves out what is not finite, and nothing else."""
    return scales_of(joins, None)


def averages_anything(joins: Mapping[PeerId, Join], max_ratio: float | None) -> dict[PeerId, float]:
    """Counts also what is not finite."""
    return {peer: scale for peer, scale in scales_of(joins, max_ratio).items() if scale}


def believes_the_longest(joins: Mapping[PeerId, Join], max_ratio: float | None) -> dict[PeerId, float]:
    """Does not divide by the root of the steps, and allows no more than the usual length."""
    return scales_of(joins, 1.001)


def _make(**decisions: object) -> Callable[[int], World]:
    return lambda seed: World(seed, replace(Decisions(), **decisions))  # type: ignore[arg-type]


MUTANTS: dict[str, tuple[Callable[[int], World], int]] = {
    "FormsAnew": (_make(form=forms_anew), 0),
    "ForgetsTheSpares": (_make(replicas=forgets_the_spares), 0),
    "ForgetsItsOwn": (_make(replicas=forgets_its_own), 0),
    "WaitsForTheHung": (_make(boundary_s=waits_for_the_hung), 0),
    "BelievesEvenRounds": (_make(boundary_s=believes_even_rounds), 0),
    "StandsAsItCame": (_make(order=stands_as_it_came), 7),
    "KnowsNoHosts": (_make(order=knows_no_hosts), 6),
    "ClipsNobody": (_make(scales=clips_nobody), 0),
    "AveragesAnything": (_make(scales=averages_anything), 0),
    "BelievesTheLongest": (_make(scales=believes_the_longest), 0),
}
