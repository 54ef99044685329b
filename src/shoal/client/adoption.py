"""What a client that was started again takes over from its launcher: trainers that run on, and what broke meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.client.diary import RoundPlan
from shoal.client.trainers import TrainerPool
from shoal.client.watch import Watch
from shoal.ids import PeerId

SAME_LOSS_S = 1.0
"""An earlier start of the client may have seen a loss of which the launcher tells."""


def adopt(reply: Mapping[str, Any], plan: RoundPlan | None, trainers: TrainerPool, watch: Watch) -> None:
    """Take over what the launcher still runs, and note what broke while there was no client.

    Args:
        reply: to "adopt": `trainers`, each with `slot`, `incarnation` and `running`; `lost`, each with `kind`, `peer`
            (a server) or `slot` (a trainer), and `at_s`, seconds since the launch. The client itself is among the lost.
    """
    known = {} if plan is None else plan.incarnations
    incarnations = {each["slot"]: each["incarnation"] for each in reply["trainers"]}
    trainers.adopt({**known, **incarnations}, [each["slot"] for each in reply["trainers"] if each["running"]])
    slots = () if plan is None else tuple(pipeline.slot for pipeline in plan.pipelines)
    for each in reply["lost"]:
        kind, at_s = each["kind"], each["at_s"]
        # Of the client's own end nobody else tells.
        if watch.failovers.is_known(kind, at_s, 0.0 if kind == "client" else SAME_LOSS_S):
            continue
        hit = {"server": watch.slots_of_replica(PeerId(each.get("peer", ""))), "trainer": (each.get("slot"),)}
        watch.lost(kind, hit.get(kind, slots), at_s)
