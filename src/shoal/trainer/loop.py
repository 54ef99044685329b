"""One trainer's work: wait for a round, evaluate, train its steps, report, wait for the next.

StartRound -> (evaluate D_{r-1}) -> lease -> train -> acknowledge -> report ... -> TrainerDone -> wait
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from dataclasses import dataclass, field

import anyio

from shoal.clock import Backoff, Clock
from shoal.config.schema import Config
from shoal.data.feed import Feed, LeasedBatch
from shoal.errors import NoPipeline, RemoteProtocolError, RoundAborted, RoundClosed
from shoal.events.base import emit
from shoal.events.steps import (
    ClientDialledAgain,
    EvaluationFailed,
    EvaluationRepeated,
    RoundWasClosed,
    StepCommitted,
    StepIsStuck,
)
from shoal.ids import PeerId, StepKey
from shoal.model.registry import is_wrapped
from shoal.optim.loss_scale import LossScale
from shoal.optim.schedule import LrSchedule
from shoal.pipeline.driver import StepDriver
from shoal.pipeline.role_hooks import NO_HOOKS, RoleHooks
from shoal.runtime.waking import Signal
from shoal.swarm.step_trainer import Finished
from shoal.transport.base import Endpoint, Received
from shoal.transport.dispatch import dispatch
from shoal.wire.messages.base import Hop, ReplicaRef, Replicas
from shoal.wire.messages.control import (
    MAX_REFUSAL_CHARS,
    EvalReport,
    StartRound,
    StepReport,
    TrainerDone,
    TrainerHello,
    TrainerStuck,
    UpdateReplicas,
)

logger = logging.getLogger(__name__)

_REDIAL_FIRST_S, _REDIAL_MAX_S = 0.05, 0.4
"""Pauses before a lost client is dialled: at the end of the round all wait for it."""
_REFUSED_S = 60.0
"""After that a step is tried again that replicas have refused: they may have been short of memory."""
_MODEL_FAILED_S = 1.0
"""The first pause, of which each further one is twice as long up to that, where all have refused it since the model of
the user's own fails: what they have trained for others meanwhile tells whether it fails at this batch alone."""

_TrainerReport = StepReport | EvalReport | TrainerDone


@dataclass(kw_only=True, eq=False, repr=False)
class TrainerLoop:
    """Drives one slot's steps, as the client's `StartRound` messages say."""

    endpoint: Endpoint
    feed: Feed
    driver: StepDriver
    config: Config
    client: Hop
    slot: int
    generation: int
    clock: Clock
    _replicas: Replicas = ()
    _next: StartRound | None = None
    _changed: Signal = field(default_factory=Signal)
    _avoided: set[PeerId] = field(default_factory=set[PeerId])
    _evaluations: int = 0
    _round_number: int = 0
    _reports: list[_TrainerReport] = field(default_factory=list[_TrainerReport])
    _client_lost: Signal = field(default_factory=Signal)
    _is_alone: bool = False
    _backoff: Backoff = field(default_factory=lambda: Backoff(first_s=_REDIAL_FIRST_S, max_s=_REDIAL_MAX_S))

    def __post_init__(self) -> None:
        self._schedule = LrSchedule.from_config(self.config.diloco)
        self._loss_scale = LossScale(is_needed=self.config.data.precision == "fp16-mixed")
        self._waits = self.endpoint.metrics.histogram("data.wait_seconds")
        self.endpoint.introduce(self.client)

    def receive(self, event: Received) -> bool:
        """Take the client's orders; see `transport.dispatch.Handler`.

        Raises:
            RemoteProtocolError: they are not from the client, or not for this trainer.
        """
        message = event.message
        if not isinstance(message, StartRound | UpdateReplicas):
            return False
        if event.peer != self.client.peer:
            raise RemoteProtocolError(f"{type(message).__name__} from {event.peer}, which is not this trainer's client")
        num_stages = self.config.num_stages
        if len(message.replicas) != num_stages:
            raise RemoteProtocolError(f"replicas of {len(message.replicas)} stages, the model has {num_stages}")
        if isinstance(message, StartRound):
            if message.slot != self.slot or len(message.path) != num_stages:
                raise RemoteProtocolError(f"a round of slot {message.slot} over {len(message.path)} stages is not ours")
            self._next = message
            self._avoided.clear()
            self.driver.round_begun(message.round)
        self._backoff.reset()
        self._replicas = message.replicas
        self._changed.notify()
        return True

    def peer_lost(self, peer: PeerId) -> None:
        """Evaluations avoid it from now on. Steps react by themselves; a lost client is dialled again."""
        self._avoided.add(peer)
        if peer == self.client.peer:
            self._is_alone = True
            self._client_lost.notify()

    async def run(self) -> None:
        """Work until cancelled."""
        await self.feed.hello()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._keep_client)
            self._say_hello()
            while True:
                while self._next is None:
                    await self._changed.wait()
                start, self._next = self._next, None
                await self._round(start)

    async def _keep_client(self) -> None:
        """Dial a lost client until it is there again; the steps of the round do not need it."""
        while True:
            await self._client_lost.take()
            await self._backoff.wait(self.clock)
            self._is_alone = False
            emit(logger, ClientDialledAgain(len(self._reports)))
            self._say_hello()

    def _say_hello(self) -> None:
        """Introduce this trainer, and say all again that a client which was started again may not have counted."""
        round = self._round_number if self._next is None else self._next.round
        self.endpoint.post(self.client.peer, TrainerHello(self.slot, self.generation, self.endpoint.hop, round))
        for report in self._reports:
            self.endpoint.post(self.client.peer, report)

    def _report(self, report: _TrainerReport) -> None:
        self._reports.append(report)
        if not self._is_alone:  # a client that was started again hears first who this is
            self.endpoint.post(self.client.peer, report)

    async def _round(self, start: StartRound) -> None:
        self._round_number = start.round
        self._reports.clear()
        if start.evaluation is not None:
            await self._evaluate(start)
        steps = samples = 0
        for number in start.steps.numbers:
            if self._next is not None:
                # The round was closed without us (we were too slow); its record is committed, so go on with the next.
                return
            batch = await self._lease(start.round, number)
            if batch is None:
                break
            try:
                result = await self._train(start, number, batch)
            except RoundClosed as error:
                emit(logger, RoundWasClosed(start.round, number, str(error)))
                self.feed.give_back(batch)
                break
            if result is None:
                return
            steps, samples = steps + 1, samples + result.num_samples
        sent_bytes = {str(traffic): count for traffic, count in self.endpoint.sent_bytes.items()}
        self._report(TrainerDone(self.slot, start.round, steps, samples, sent_bytes))

    async def _lease(self, round: int, number: int) -> LeasedBatch | None:
        asked_s = self.clock.now_s()
        batch = await self.feed.lease(round, number)
        self._waits.observe(self.clock.now_s() - asked_s)
        return batch

    async def _train(self, start: StartRound, number: int, batch: LeasedBatch) -> Finished | None:
        lr = self._schedule.lr(number)
        microbatches = batch.microbatches(self.config)
        begun_s, pause_s = self.clock.now_s(), _MODEL_FAILED_S

        def note(key: StepKey, path: tuple[PeerId, ...]) -> None:
            self.feed.note(key, path, batch)

        while True:
            try:
                result = await self.driver.train(
                    round=start.round,
                    number=number,
                    microbatches=microbatches,
                    samples=batch.samples,
                    lr=lr,
                    path=start.path,
                    replicas=self._replicas,
                    note=note,
                    base=start.base,
                    loss_scale=self._loss_scale.value,
                    warrant=start.warrant,
                )
                break
            except NoPipeline as error:
                emit(logger, StepIsStuck(start.round, number, str(error)))
                stages = tuple(s for s, replicas in enumerate(self._replicas) if not replicas)
                refusal = error.refusal[:MAX_REFUSAL_CHARS]
                self.endpoint.post(
                    self.client.peer, TrainerStuck(self.slot, start.round, stages, refusal, error.is_model)
                )
                if error.refusal:
                    await self._wait_for_others(min(pause_s, _REFUSED_S) if error.is_model else _REFUSED_S)
                    pause_s *= 2.0
                else:
                    await self._changed.wait()
                if self._next is not None:
                    self.feed.give_back(batch)
                    return None
        self.feed.acknowledge(result.key, batch, committed=result.committed)
        report = StepReport(
            slot=self.slot,
            round=start.round,
            key=result.key,
            num_samples=result.num_samples,
            num_targets=result.num_targets,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=lr,
            skipped=result.skipped,
            duration_s=self.clock.now_s() - begun_s,
            at_s=self.clock.now_s(),
            routers=result.routers,
        )
        if result.committed:
            self._loss_scale.ended(skipped=result.skipped)
            self._report(report)
            # Not computed and not written unless asked for: there may be hundreds in a second.
            emit(logger, StepCommitted(start.round, result.key, result.path, result.num_samples))
        return result

    async def _evaluate(self, start: StartRound) -> None:
        evaluation = start.evaluation
        if evaluation is None or evaluation.start >= evaluation.stop:
            return
        loss_sum, num_targets = 0.0, 0
        try:
            async with aclosing(self.feed.holdout(evaluation.start, evaluation.stop)) as batches:
                async for batch in batches:
                    part_sum, part_targets = await self._evaluate_batch(start, evaluation.base_round, batch)
                    loss_sum, num_targets = loss_sum + part_sum, num_targets + part_targets
        except RoundAborted as error:
            emit(logger, EvaluationFailed(evaluation.base_round, str(error)))
            return
        num_samples = evaluation.stop - evaluation.start
        self._report(EvalReport(self.slot, evaluation.base_round, loss_sum, num_samples, num_targets))

    async def _evaluate_batch(self, start: StartRound, base_round: int, batch: LeasedBatch) -> tuple[float, int]:
        """Evaluate over the home path, or over others where a replica is lost: all hold the same parameters.

        Raises:
            RoundAborted: no path gave an answer.
        """
        microbatches = batch.eval_parts()
        path = self._evaluation_path(start)
        while True:
            self._evaluations += 1
            try:
                return await self.driver.evaluate(
                    evaluation=self._evaluations,
                    base_round=base_round,
                    microbatches=microbatches,
                    path=path,
                    refuses=self._avoided.add,
                )
            except RoundAborted as error:
                tried, path = path, self._evaluation_path(start)
                if path == tried:
                    raise
                emit(logger, EvaluationRepeated(base_round, str(error)))

    def _evaluation_path(self, start: StartRound) -> tuple[ReplicaRef, ...]:
        """Return the home path, with the best other replica in place of each that was lost or refused in this round."""
        return tuple(self._evaluator(*each) for each in zip(start.path, self._replicas, strict=True))

    def _evaluator(self, hop: Hop, listed: tuple[ReplicaRef, ...]) -> ReplicaRef:
        home = next((replica for replica in listed if replica.peer == hop.peer), ReplicaRef(hop))
        return next((replica for replica in (home, *listed) if replica.peer not in self._avoided), home)

    async def _wait_for_others(self, longest_s: float) -> None:
        """Wait for another round or other replicas: what these have refused they would most likely refuse again."""
        refused = self._replicas
        with anyio.move_on_after(longest_s):
            while self._next is None and self._replicas == refused:
                await self._changed.wait()


class Trainer:
    """One slot's trainer: what the role's process runs, and a cluster in one process as well.

    endpoint -> StepDriver (replicas), Feed (data server), TrainerLoop (client)
    """

    def __init__(
        self,
        *,
        config: Config,
        endpoint: Endpoint,
        slot: int,
        generation: int,
        client: Hop,
        data_server: Hop,
        clock: Clock,
        hooks: RoleHooks = NO_HOOKS,
    ) -> None:
        """Connect the parts.

        Args:
            endpoint: `run` takes its events.
            slot: the pipeline that is its home; also its number in step ids.
            generation: counts the starts of this slot's trainer in the run, from 1.
        """
        self._endpoint, self._hooks = endpoint, hooks
        pipeline = config.model_pipeline
        self._feed = Feed(endpoint=endpoint, data_server=data_server, trainer=slot, generation=generation, clock=clock)
        self._driver = StepDriver(
            endpoint=endpoint,
            trainer=slot,
            generation=generation,
            window=pipeline.microbatches_in_flight,
            evaluation_window=pipeline.evaluations_in_flight,
            max_grad_norm=config.diloco.max_grad_norm,
            clock=clock,
            step_timeout_s=pipeline.forward_timeout_s + pipeline.backward_timeout_s,
            is_wrapped=is_wrapped(config),
        )
        self._loop = TrainerLoop(
            endpoint=endpoint,
            feed=self._feed,
            driver=self._driver,
            config=config,
            client=client,
            slot=slot,
            generation=generation,
            clock=clock,
        )

    async def run(self) -> None:
        """Say hello to the client and train until cancelled."""
        async with anyio.create_task_group() as tasks:
            handlers = self._hooks.handlers((self._driver, self._feed, self._loop))
            tasks.start_soon(dispatch, self._endpoint, handlers, self._driver.peer_found)
            tasks.start_soon(self._feed.run)
            tasks.start_soon(self._loop.run)
