"""The pipelines of the round, and the replicas that each slot may use now.

membership, coordinator, moves --> usable replicas --> pipelines when a round begins (`swarm.run_client`)
                                                  '--> what each trainer is told whenever that changes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.reassignment import Reassignment
from shoal.control.membership import Membership
from shoal.ids import PeerId
from shoal.swarm.routing import Pipeline, replicas_for
from shoal.swarm.run_client import RunClient
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint
from shoal.wire.messages.base import Replicas, StepRange
from shoal.wire.messages.control import Evaluation, StartRound, UpdateReplicas


@dataclass(kw_only=True, eq=False, repr=False)
class Homes:
    """Which pipeline is the home of which slot.

    Attributes:
        left: of the round in which an earlier start of this client was.
        employ: warrants that a peer is the trainer of a slot, in a generation.
        named: the replicas that trainers of the round have been told of, also those that came in meanwhile.
    """

    machine: RunClient
    num_stages: int
    endpoint: Endpoint
    coordinator: RoundCoordinator
    membership: Membership
    trainers: TrainerSlots
    reassignment: Reassignment
    employ: Callable[[PeerId, int, int], bytes]
    left: Sequence[Pipeline] = ()
    named: set[PeerId] = field(default_factory=set[PeerId], init=False)

    @property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """Of the round; none between two chains of records."""
        return self.machine.pipelines

    async def run(self) -> None:
        """Tell the coordinator and the trainers who is there, whenever that changes, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_moves)
            await self._follow_view()

    async def _follow_moves(self) -> None:
        while True:
            await self.reassignment.moved.wait()
            self.tell_trainers()

    async def _follow_view(self) -> None:
        while True:
            self.tell_coordinator()
            self.tell_trainers()
            await self.membership.changed()

    def start(self, round: int, slot: int, steps: StepRange, base: str, evaluation: Evaluation | None) -> None:
        """Have the trainer of a slot, if it is there, do these steps of a round on top of the record `base`."""
        hop = self.trainers.present.get(slot)
        if hop is None:
            return
        path, replicas = self.pipelines[slot].path, self.name_replicas(slot)
        order = StartRound(
            round=round,
            slot=slot,
            num_slots=len(self.pipelines),
            steps=steps,
            path=path,
            replicas=replicas,
            evaluation=evaluation,
            base=base,
            warrant=self.employ(hop.peer, slot, self.trainers.generations[slot]),
        )
        self.endpoint.post(hop.peer, order)

    def tell_coordinator(self) -> None:
        """Name the coordinator all replicas and mirrors that are there; to be called when these have changed."""
        view = self.membership.view
        self.coordinator.mirrors({mirror.peer: mirror.hop for mirror in view.mirrors})
        self.coordinator.replicas({replica.peer: replica.hop for replica in view.replicas})

    def tell_trainers(self) -> None:
        """Send every trainer of the round the replicas that it may use now; to be called when these have changed."""
        for pipeline in self.pipelines:
            hop = self.trainers.present.get(pipeline.slot)
            if hop is not None:
                self.endpoint.post(hop.peer, UpdateReplicas(self.name_replicas(pipeline.slot)))

    def name_replicas(self, slot: int) -> Replicas:
        """Return all replicas of each stage that a slot may use now, best first; from now on they are `named`."""
        replicas = replicas_for(slot, self.usable(self.machine.holders), self.pipelines, self.num_stages)
        self.named.update(replica.peer for stage in replicas for replica in stage)
        return replicas

    def slots_of(self, peer: PeerId) -> frozenset[int]:
        """Return the slots whose home pipeline runs over a replica."""
        return frozenset(pipeline.slot for pipeline in self.pipelines or self.left if peer in pipeline.peers)

    def in_order(self) -> list[list[PeerId]]:
        """Return the replicas of each stage that may be used: those of slots in their order, then the others."""
        view = self.usable(self.machine.holders)
        homes = [[pipeline.peers[stage] for pipeline in self.pipelines] for stage in range(self.num_stages)]
        return [
            peers + [replica.peer for replica in view.by_stage(stage) if replica.peer not in peers]
            for stage, peers in enumerate(homes)
        ]

    def usable(self, known: Mapping[PeerId, int]) -> SwarmView:
        """Return the view less the replicas that do not hold the record, or leave their stage; their own word comes
        later.

        One that has caught up in the middle of a round is in it at once, one that was started again is not.

        Args:
            known: holds while the coordinator does not know who does.
        """
        now = self.coordinator.holders
        return self.reassignment.usable(self.membership.view, known if now is None else now)
