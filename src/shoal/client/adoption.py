"""What a client that was started again takes over from its launcher: trainers that run on, and what broke meanwhile."""

from __future__ import annotations

from shoal.client.diary import RoundPlan
from shoal.client.trainers import TrainerPool
from shoal.client.watch import Watch
from shoal.runtime.launcher_messages import Adoption

SAME_LOSS_S = 1.0
"""An earlier start of the client may have seen a loss of which the launcher tells."""


def adopt(adoption: Adoption, plan: RoundPlan | None, trainers: TrainerPool, watch: Watch) -> None:
    """Take over what the launcher still runs, and note what broke while there was no client."""
    known = {} if plan is None else plan.generations
    trainers.adopt({**known, **adoption.generations}, adoption.running)
    slots = () if plan is None else tuple(pipeline.slot for pipeline in plan.pipelines)
    for each in adoption.lost:
        # Of the client's own end nobody else tells.
        if watch.failovers.is_known(each.role, each.at_s, 0.0 if each.role == "client" else SAME_LOSS_S):
            continue
        hit = slots if each.peer is None else watch.slots_of_replica(each.peer)
        watch.lost(each.role, (each.index,) if each.role == "trainer" else hit, each.at_s)
