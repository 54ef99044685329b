"""The pipelines of the round, and the replicas that each slot may use now.

membership, coordinator, moves --> usable replicas --> pipelines when a round begins (`swarm.routing`)
                                                  '--> what each trainer is told whenever that changes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import anyio
import anyio.lowlevel

from shoal.averaging.coordinator import RoundCoordinator
from shoal.client.reassignment import Reassignment
from shoal.control.membership import Membership
from shoal.ids import PeerId
from shoal.runtime.waking import Signal
from shoal.swarm.routing import Pipeline, form_pipelines, replicas_for
from shoal.swarm.trainer_slots import TrainerSlots
from shoal.swarm.view import SwarmView
from shoal.transport.base import Endpoint
from shoal.wire.messages.base import Replicas, StepRange
from shoal.wire.messages.control import Evaluation, StartRound, UpdateReplicas

_PATIENCE_S = 1.5
"""A spare has the state of its new stage, and a server that was killed is back, within about this time."""


class Homes:
    """Which pipeline is the home of which slot.

    Attributes:
        pipelines: of the round; none between two chains of records.
        holders: the replicas that held the record when the round began, with their stages.
        named: the replicas that trainers of the round have been told of, also those that came in meanwhile.
    """

    def __init__(
        self,
        *,
        num_stages: int,
        endpoint: Endpoint,
        coordinator: RoundCoordinator,
        membership: Membership,
        trainers: TrainerSlots,
        reassignment: Reassignment,
        left: Sequence[Pipeline] = (),
    ) -> None:
        """Form no pipeline yet.

        Args:
            left: of the round in which an earlier start of this client was.
        """
        self.pipelines: tuple[Pipeline, ...] = ()
        self.holders: Mapping[PeerId, int] = {}
        self.named: set[PeerId] = set()
        self._num_stages = num_stages
        self._endpoint = endpoint
        self._coordinator = coordinator
        self._membership = membership
        self._trainers = trainers
        self._reassignment = reassignment
        self._left = left
        self._changed = Signal()

    async def form(self, last_round_s: float) -> None:
        """Form the pipelines of a round; wait, however long, until there is one at least.

        A trainer that has no pipeline when a round begins has none until its end. So if there are fewer than in the
        round before, a spare that takes the place of a lost server, or its next generation, is waited for a moment.

        Args:
            last_round_s: how long the last round took: the longer, the more a moment is worth; 0 if there was none.
        """
        before, self.named = self.pipelines, set()
        self.pipelines = self._formed(before)
        if self.pipelines and len(self.pipelines) >= len(before):
            return
        with self._membership.eager():
            with anyio.move_on_after(min(_PATIENCE_S, last_round_s / 4)):
                while len(self.pipelines) < len(before):
                    await self._changed.wait()
                    self.pipelines = self._formed(before)
            while not self.pipelines:
                await self._changed.wait()
                self.pipelines = self._formed(before)
        # What has brought them may end this chain as well, and cancel the round, which must not begin before.
        await anyio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Tell the coordinator and the trainers who is there, whenever that changes, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_moves)
            await self._follow_view()

    async def _follow_moves(self) -> None:
        while True:
            await self._reassignment.moved.wait()
            self.tell_trainers()

    async def _follow_view(self) -> None:
        while True:
            view = self._membership.view
            self._coordinator.mirrors({mirror.peer: mirror.hop for mirror in view.mirrors})
            self._coordinator.replicas({replica.peer: replica.hop for replica in view.replicas})
            self.tell_trainers()
            await self._membership.changed()

    def start(self, round: int, slot: int, steps: StepRange, base: str, evaluation: Evaluation | None) -> None:
        """Have the trainer of a slot, if it is there, do these steps of a round on top of the record `base`."""
        hop = self._trainers.present.get(slot)
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
        )
        self._endpoint.post(hop.peer, order)

    def tell_trainers(self) -> None:
        """Send every trainer of the round the replicas that it may use now; to be called when these have changed."""
        self._changed.notify()
        for pipeline in self.pipelines:
            hop = self._trainers.present.get(pipeline.slot)
            if hop is not None:
                self._endpoint.post(hop.peer, UpdateReplicas(self.name_replicas(pipeline.slot)))

    def name_replicas(self, slot: int) -> Replicas:
        """Return all replicas of each stage that a slot may use now, best first; from now on they are `named`."""
        replicas = replicas_for(slot, self.usable(), self.pipelines, self._num_stages)
        self.named.update(replica.peer for stage in replicas for replica in stage)
        return replicas

    def slots_of(self, peer: PeerId) -> frozenset[int]:
        """Return the slots whose home pipeline runs over a replica."""
        return frozenset(pipeline.slot for pipeline in self.pipelines or self._left if peer in pipeline.peers)

    def in_order(self) -> list[list[PeerId]]:
        """Return the replicas of each stage that may be used: those of slots in their order, then the others."""
        view = self.usable()
        homes = [[pipeline.peers[stage] for pipeline in self.pipelines] for stage in range(self._num_stages)]
        return [
            peers + [replica.peer for replica in view.by_stage(stage) if replica.peer not in peers]
            for stage, peers in enumerate(homes)
        ]

    def _formed(self, before: tuple[Pipeline, ...]) -> tuple[Pipeline, ...]:
        """As far as possible, slots keep their homes. They count without holes, since batches are dealt out by slot.

        A pipeline whose slot changes gets another trainer, which loses nothing: optimizers live with the replicas.
        """
        formed = form_pipelines(self.usable(), self._num_stages, before)
        return tuple(Pipeline(slot, pipeline.path) for slot, pipeline in enumerate(formed))

    def usable(self) -> SwarmView:
        """The view less the replicas that do not hold the record, or leave their stage; their own word comes later.

        One that has caught up in the middle of a round is in it at once, one that was started again is not.
        """
        now = self._coordinator.holders
        return self._reassignment.usable(self._membership.view, self.holders if now is None else now)
