"""The run from its first round to its last, as the client sees it.

    wait for servers -> lead -> [ form pipelines -> start the trainers -> all done -> close -> record ] ... -> evaluate

What a round decides is the coordinator's; this module says when it begins and ends, and writes down what came of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import anyio
import anyio.to_thread

from shoal.averaging.coordinator import RoundCoordinator, RoundOutcome
from shoal.averaging.journal import write_round
from shoal.client.data_link import DataLink
from shoal.client.reports import Reports
from shoal.client.takeover import Takeover
from shoal.client.trainers import TrainerPool
from shoal.clock import Clock
from shoal.config.schema import Config
from shoal.control.membership import Membership
from shoal.errors import ControlError, NoPipeline
from shoal.ids import PeerId
from shoal.swarm.round_deadline import deadline_s
from shoal.swarm.routing import Pipeline, form_pipelines, replicas_for
from shoal.swarm.view import NOTHING_HELD, SwarmView
from shoal.transport.base import Endpoint
from shoal.wire.messages.base import Hop
from shoal.wire.messages.control import Evaluation, StartRound, UpdateReplicas
from shoal.wire.messages.round import StageHashes

logger = logging.getLogger(__name__)

_DEVIATIONS = 8.0
_SLOWER_IS_NORMAL = 1.5
"""A boundary deadline is never closer than this factor above the median: very even rounds have almost no deviation."""
_MAX_IDLE_ROUNDS = 2
"""So many rounds in a row without a single step may follow losses; more, and the trainers themselves cannot work."""
_MAX_EVALUATIONS = 3
_SETTLE_S = 1.0


class RoundLoop:
    """Runs the outer rounds.

    Attributes:
        hashes: of each stage's outer parameters after the last record.
        rounds: records decided by this client.
        num_replicas: replicas that took part at most, all stages together.
    """

    def __init__(
        self,
        *,
        config: Config,
        log_dir: Path,
        endpoint: Endpoint,
        coordinator: RoundCoordinator,
        membership: Membership,
        trainers: TrainerPool,
        reports: Reports,
        takeover: Takeover,
        data: DataLink,
        clock: Clock,
        expected_servers: int,
        patient: bool = False,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connect the parts; `run` does the work.

        Args:
            expected_servers: servers to wait for before the first round, for at most `bootstrap_timeout_s`.
            notice: tells the user something that stays on the screen.
            patient: wait for them, or for one complete pipeline if there are 0, however long it takes.
        """
        self.hashes: dict[int, str] = {}
        self.rounds = 0
        self.num_replicas = 0
        self._config = config
        self._log_dir = log_dir
        self._endpoint = endpoint
        self._coordinator = coordinator
        self._membership = membership
        self._trainers = trainers
        self._reports = reports
        self._takeover = takeover
        self._notice = notice
        self._data = data
        self._clock = clock
        self._expected_servers = expected_servers
        self._patient = patient
        self._pipelines: tuple[Pipeline, ...] = ()
        self._holders: Mapping[PeerId, int] = {}
        self._durations_s: list[float] = []
        self._idle_rounds = 0

    @property
    def num_pipelines(self) -> int:
        """Pipelines of the current round."""
        return len(self._pipelines)

    def slots_of(self, peer: PeerId) -> frozenset[int]:
        """Return the slots whose home pipeline runs over a replica."""
        return frozenset(pipeline.slot for pipeline in self._pipelines if peer in pipeline.peers)

    async def run(self) -> None:
        """Train all rounds, then evaluate what came out.

        Raises:
            NoPipeline: a stage has no replica, and none came in time.
            RoundAborted: another client coordinates the run now.
            ControlError: no trainer could be started, or none of them trains.
            OSError: records or step logs cannot be written.
        """
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._follow_view)
            await self._wait_for_servers()
            leading = await self._coordinator.lead()
            self._holders = leading.holders
            round = leading.held_round + 1
            while round <= self._config.diloco.outer_steps:
                await self._round(round)
                round += 1
            await self._evaluate_last(round)
            tasks.cancel_scope.cancel()

    async def _evaluate_last(self, round: int) -> None:
        """Evaluate the last record; again, with new trainers, if some were lost with their shares."""
        for _ in range(_MAX_EVALUATIONS):
            await self._train(round, inner_steps=0)
            if not self._reports.num_holdout or round - 1 in self._reports.progress.eval_losses:
                return
            logger.warning("evaluation.incomplete", extra={"held": round - 1})

    async def _round(self, round: int) -> None:
        begun_s = self._clock.now_s()
        await self._train(round, self._config.diloco.inner_steps)
        slots = {peer: pipeline.slot for pipeline in self._pipelines for peer in pipeline.peers}
        lowest = {
            slot: incarnation + (slot not in self._trainers.present)
            for slot, incarnation in self._trainers.incarnations.items()
        }
        self._coordinator.close_round(
            round, slots, lowest, None if self._config.run.deterministic else self._config.diloco.averaging_timeout_s
        )
        outcome = await self._finished(round)
        await self._recorded(outcome)
        self._durations_s.append(self._clock.now_s() - begun_s)

    async def _train(self, round: int, inner_steps: int) -> None:
        """Let the trainers evaluate the record that stands and do their steps; returns at the boundary."""
        self._pipelines = self._form()
        if not self._pipelines:
            await self._wait_for_pipelines()
        await self._trainers.ensure(len(self._pipelines))
        progress = self._reports.progress
        progress.pipelines_max = max(progress.pipelines_max, len(self._pipelines))
        progress.trainers_max = max(progress.trainers_max, len(self._trainers.present))
        self.num_replicas = max(self.num_replicas, len(self._holders))
        self._reports.begin_round(round, trains=inner_steps > 0)
        if inner_steps:
            self._data.plan(round, len(self._pipelines), inner_steps)
        first_step = (round - 1) * self._config.diloco.inner_steps
        shares = self._shares(round - 1)
        for slot in range(len(self._pipelines)):
            self._start(round, slot, first_step, inner_steps, shares[slot])

        def go_on(slot: int, first_step: int, num_steps: int) -> None:
            has_share = progress.has_share(round - 1, slot)
            self._start(round, slot, first_step, num_steps, None if has_share else shares[slot])

        slots = frozenset(pipeline.slot for pipeline in self._pipelines)
        with anyio.move_on_after(self._boundary_deadline_s()):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._require_all_stages)
                tasks.start_soon(self._takeover.run, slots, first_step, inner_steps, go_on)
                await self._reports.all_done(slots)
                tasks.cancel_scope.cancel()

    async def _require_all_stages(self) -> None:
        """Fail when a stage has been without a replica for too long: its trainers would wait for ever."""
        num_stages, timeout_s = self._config.num_stages, self._config.diloco.averaging_timeout_s
        while True:
            while not self._usable().missing_stages(num_stages):
                await self._membership.changed()
            missing = self._usable().missing_stages(num_stages)
            logger.warning("training.stopped", extra={"stages": missing, "waits_s": timeout_s})
            self._notice(f"training has stopped: no replica serves stage {_names(missing)}; it waits for servers")
            with anyio.move_on_after(timeout_s) as scope, self._membership.eager():
                while self._usable().missing_stages(num_stages):
                    await self._membership.changed()
            if scope.cancelled_caught:
                raise NoPipeline(_no_replica(self._usable().missing_stages(num_stages)))
            logger.info("training.resumed", extra={"stages": missing})
            self._notice(f"stage {_names(missing)} is served again: training goes on")

    def _start(self, round: int, slot: int, first_step: int, num_steps: int, evaluation: Evaluation | None) -> None:
        hop = self._trainers.present.get(slot)
        if hop is None:
            return
        self._endpoint.post(
            hop.peer,
            StartRound(
                round=round,
                slot=slot,
                num_slots=len(self._pipelines),
                first_step=first_step,
                inner_steps=num_steps,
                path=self._pipelines[slot].path,
                replicas=self._replicas_for(slot),
                evaluation=evaluation,
            ),
        )

    def _shares(self, held: int) -> list[Evaluation | None]:
        """Cut the held-out set into one share for each pipeline."""
        num, parts = self._reports.num_holdout, len(self._pipelines)
        bounds = [num * part // parts for part in range(parts + 1)]
        return [Evaluation(held, start, stop) if stop > start else None for start, stop in pairwise(bounds)]

    async def _finished(self, round: int) -> RoundOutcome:
        """Wait for the record; a stage that nobody serves any more ends the run, by name, after a while."""
        while True:
            with anyio.move_on_after(self._config.diloco.averaging_timeout_s):
                return await self._coordinator.finish_round(round)
            if stages := self._coordinator.stuck:
                raise NoPipeline(_no_replica(stages))
            logger.warning("round.slow", extra={"round": round, "waited_s": self._config.diloco.averaging_timeout_s})

    async def _recorded(self, outcome: RoundOutcome) -> None:
        """Write the record down and act on it.

        Raises:
            ControlError: too many rounds in a row have trained nothing.
            OSError: it cannot be written.
        """
        record = outcome.record
        # It is forced to the disk, which may take long; the event loop has connections to keep.
        await anyio.to_thread.run_sync(write_round, self._log_dir, record, outcome.signed, outcome.logs)
        self._data.record(record.round, tuple(sorted((*record.samples, *record.skipped))))
        self._holders = outcome.holders
        self.rounds += 1
        hashes: dict[int, StageHashes] = {stage.stage: stage.hashes for stage in record.stages}
        self.hashes = {stage: each.parameters for stage, each in hashes.items()}
        self._reports.progress.add_sent(outcome.sent_bytes)
        loss = self._reports.progress.take_round_loss()
        logger.info("round.recorded", extra={"round": record.round, "loss": loss, "hashes": self.hashes})
        if loss is not None:
            self._reports.post({"loss/round": loss, "samples": float(self._reports.progress.samples)})
        self._idle_rounds = 0 if record.samples or record.skipped else self._idle_rounds + 1
        if self._idle_rounds > _MAX_IDLE_ROUNDS:
            raise ControlError(f"{self._idle_rounds} rounds have passed without a step: see the trainers' logs")

    # -- the view

    async def _follow_view(self) -> None:
        """Tell the coordinator and the trainers who is there, whenever that changes."""
        while True:
            view = self._membership.view
            self._coordinator.replicas({replica.peer: replica.hop for replica in view.replicas})
            self.update_trainers()
            await self._membership.changed()

    def update_trainers(self) -> None:
        """Send every trainer of the round the replicas that it may use now."""
        for pipeline in self._pipelines:
            hop = self._trainers.present.get(pipeline.slot)
            if hop is not None:
                self._endpoint.post(hop.peer, UpdateReplicas(self._replicas_for(pipeline.slot)))

    async def _wait_for_servers(self) -> None:
        """Wait for the servers that were started with this client; go on with fewer if some do not come."""
        stages = self._config.num_stages
        with anyio.move_on_after(None if self._patient else self._config.network.bootstrap_timeout_s):
            await self._membership.wait_for(
                lambda view: len(view.replicas) >= self._expected_servers and view.max_pipelines(stages) > 0
            )
            if not self._expected_servers:
                await self._settled()
            return
        if not self._membership.view.max_pipelines(stages):
            raise NoPipeline(_no_replica(self._membership.view.missing_stages(stages)))
        logger.warning(
            "servers.fewer",
            extra={"expected": self._expected_servers, "found": len(self._membership.view.replicas)},
        )

    async def _settled(self) -> None:
        """Let servers that are just starting into the first round: return when nobody has come for a moment."""
        alone = False
        with self._membership.eager():
            while not alone:
                with anyio.move_on_after(_SETTLE_S) as timer:
                    await self._membership.changed()
                alone = timer.cancelled_caught

    async def _wait_for_pipelines(self) -> None:
        with anyio.move_on_after(self._config.diloco.averaging_timeout_s), self._membership.eager():
            while not self._pipelines:
                await self._membership.changed()
                self._pipelines = self._form()
            return
        raise NoPipeline(_no_replica(self._usable().missing_stages(self._config.num_stages)))

    def _form(self) -> tuple[Pipeline, ...]:
        """Form the pipelines of a round; slots count without holes, since batches are dealt out by slot.

        A pipeline whose slot changes gets another trainer, which loses nothing: optimizers live with the replicas.
        """
        formed = form_pipelines(self._usable(), self._config.num_stages, self._pipelines, NOTHING_HELD)
        return tuple(Pipeline(slot, pipeline.path) for slot, pipeline in enumerate(formed))

    def _replicas_for(self, slot: int) -> tuple[tuple[Hop, ...], ...]:
        return replicas_for(slot, self._usable(), self._pipelines, self._config.num_stages, NOTHING_HELD)

    def _usable(self) -> SwarmView:
        """The view less the replicas that do not hold the record; what they announce about that comes later.

        One that has caught up in the middle of a round is in it at once, one that was started again is not.
        """
        view = self._membership.view
        now = self._coordinator.holders
        holders = self._holders if now is None else now
        return view.without([replica.peer for replica in view.replicas if replica.peer not in holders])

    def _boundary_deadline_s(self) -> float | None:
        if self._config.run.deterministic:
            return None
        usual_s = deadline_s(self._durations_s, _DEVIATIONS, self._config.run.first_deadline_s)
        slowest = sorted(self._durations_s)
        return max(usual_s, _SLOWER_IS_NORMAL * slowest[len(slowest) // 2]) if slowest else usual_s


def _no_replica(stages: Sequence[int]) -> str:
    return (
        f"no replica serves stage {_names(stages)} any more: start servers for it; "
        "see the servers' logs for why they ended"
    )


def _names(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages)) or "of some pipeline"
