"""The replica's end of the training step: connects the machine, the network and the device.

    endpoint -> receive -> StepReplica -> ready -> schedule -> device thread -> StepReplica -> post to the neighbours

Exactly one operation is on the device; the next is chosen when it finishes, out of all that is ready then. What the
operation has computed is posted when the next one is on the device, so that the device does not wait for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import anyio
from anyio.streams.memory import MemoryObjectSendStream
from torch import Tensor

from shoal.clock import Clock, SystemClock
from shoal.config.own_class import raised
from shoal.errors import RoundAborted
from shoal.events.base import emit
from shoal.events.steps import StepCapLowered, StepDoesNotFit, StepFailed, StepTensorRefused
from shoal.ids import PeerId, StepKey
from shoal.pipeline.device_meter import DeviceMeter
from shoal.pipeline.device_operations import DeviceOperations
from shoal.pipeline.model_mistake import is_of_model, is_refused_for
from shoal.pipeline.out_of_memory import is_out_of_memory
from shoal.pipeline.replica_log import ReplicaLog
from shoal.pipeline.role_hooks import NO_HOOKS, RoleHooks
from shoal.pipeline.schedule import choose
from shoal.pipeline.stage_compute import StageCompute
from shoal.pipeline.stage_evaluator import StageEvaluator
from shoal.pipeline.tensor_check import payload_misfit
from shoal.runtime.device_thread import DeviceThread
from shoal.runtime.waking import Signal
from shoal.swarm.cut_rule import EVERY_STEP, CutRule
from shoal.swarm.early_payloads import EarlyPayload, EarlyPayloads
from shoal.swarm.microbatch_cut import lowered
from shoal.swarm.microbatch_pass import Payload
from shoal.swarm.round_orders import StepsClosed
from shoal.swarm.step_operations import BEHIND, Decision, Operation, OperationKind, Schedule, SendStepMessage
from shoal.swarm.step_replica import StepReplica
from shoal.transport.base import Endpoint, Received
from shoal.transport.drive import drive
from shoal.wire.messages import Traffic
from shoal.wire.messages.control import MAX_REFUSAL_CHARS
from shoal.wire.messages.step import (
    Abort,
    AskOutcome,
    Backward,
    Commit,
    EvalForward,
    EvalLabels,
    Fence,
    Forward,
    Labels,
    Open,
    Refused,
    StepEntry,
    StepsTrained,
    TellOutcome,
)
from shoal.wire.tensors import WireTensor

logger = logging.getLogger(__name__)

# Gradients kept per step to answer a repeated backward; repeats are rare and refer to what was sent last.
_KEPT_GRADIENTS = 2


@dataclass(frozen=True, slots=True)
class CapLowered:
    """Event: the device's memory was too small; from now on the replica takes so many samples at a time, see `cap`."""

    cap: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """How much a replica takes at a time.

    Attributes:
        open_steps: it answers Busy to further steps.
        microbatch_samples: larger microbatches are refused; None takes any.
        kept: microbatches of a step in flight, see `pipeline.schedule.choose`; None: any number.
        further: so many more are taken where the way of a step is long.
    """

    open_steps: int
    microbatch_samples: int | None = None
    kept: int | None = None
    further: int = 0

    @property
    def room(self) -> int | None:
        """The most microbatches of a step that are taken at a time; None: any number."""
        return None if self.kept is None else self.kept + self.further


@dataclass(frozen=True, slots=True)
class RoundCuts:
    """Which steps the average of a round has; `taken` is told the round when its cut has been taken, and the targets
    that the replica brings to it."""

    rule: CutRule = EVERY_STEP
    taken: Callable[[int, int], None] = lambda _round, _num_targets: None


@dataclass(frozen=True, slots=True)
class StepRights:
    """Who may do what. `is_client`: whether a peer is the client that the replica follows, which alone may fence
    trainers. `may_open`: whether a peer is, for that client, the trainer of the step that it opens."""

    is_client: Callable[[PeerId], bool] = lambda _: True
    may_open: Callable[[PeerId, Open], bool] = lambda _peer, _step: True


@dataclass(kw_only=True, eq=False, repr=False)
class StageWorker:
    """Serves the steps and evaluations of one replica.

    Attributes:
        replica_log: Is told what changes the state of the device; None keeps no log.
        boundary: Is told the round, the log and what was trained earlier after each commit; the device waits until
            it returns.
        base_round: The round whose record the replica holds; steps of the next one may be opened.
    """

    endpoint: Endpoint
    compute: StageCompute
    device: DeviceThread
    num_stages: int
    limits: StepLimits
    events: MemoryObjectSendStream[CapLowered] | None = None
    clock: Clock = field(default_factory=SystemClock)
    replica_log: ReplicaLog | None = None
    hooks: RoleHooks = NO_HOOKS
    boundary: Callable[[int, tuple[StepEntry, ...], tuple[StepsTrained, ...]], Awaitable[None]] | None = None
    cuts: RoundCuts = RoundCuts()
    rights: StepRights = StepRights()

    def __post_init__(self) -> None:
        self._resumed: Tensor | None = None
        self._inherited: Mapping[str, Tensor] | None = None
        self._machine = StepReplica(
            self.endpoint.peer_id,
            stage=self.compute.stage,
            num_stages=self.num_stages,
            max_open_steps=self.limits.open_steps,
            max_microbatch_samples=self.limits.microbatch_samples,
            room=self.limits.room,
            schedule=self.compute.schedule,
            is_wrapped=self.compute.module.is_wrapped,
            cuts=self.cuts.rule,
        )
        self._max_kept = self.limits.kept
        self._meter = DeviceMeter(self.endpoint.metrics, self.compute.stage, self.clock)
        self._operations = self.hooks.operations(DeviceOperations(self.compute, self.device, self._meter, self.clock))
        self._evaluator = StageEvaluator(self.endpoint, self._operations)
        self._early = EarlyPayloads[Sequence[WireTensor]](self._machine)
        self._payloads: dict[StepKey, dict[tuple[bool, type, int], Sequence[WireTensor]]] = {}
        self._sent_gradients: dict[StepKey, deque[tuple[int, WireTensor]]] = {}
        self._committed_before = 0
        self._round_starts = False
        self._was_evaluation = False
        self._results: tuple[Sequence[SendStepMessage], Sequence[WireTensor]] | None = None
        self._changed = Signal()

    # ---- state

    @property
    def base_round(self) -> int:
        return self._machine.round - 1

    @property
    def log(self) -> tuple[StepEntry, ...]:
        """Steps committed in this round, in apply order."""
        return tuple(self._machine.log)

    @property
    def num_samples(self) -> int:
        """Samples of the steps in `log` that were not skipped."""
        return sum(entry.num_samples for entry in self._machine.log if not entry.skipped)

    @property
    def num_committed(self) -> int:
        """Steps committed since the replica was made, in all rounds."""
        return self._committed_before + self._machine.version

    @property
    def in_doubt(self) -> tuple[StepKey, ...]:
        """Prepared steps whose trainer is lost and whose fate is not known."""
        return self._machine.in_doubt

    @property
    def num_open(self) -> int:
        """Steps that are open now: the replica's load."""
        return len(self._machine.open)

    @property
    def cap(self) -> int | None:
        """The most samples in a microbatch; None: any number. Lowered where the device's memory proves too small."""
        return self._machine.cap

    # ---- events

    def receive(self, event: Received) -> bool:
        """Takes a step message for a replica; see `transport.dispatch.Handler`."""
        message = event.message
        match message:
            case Forward() | Labels() | Backward():
                self._on_payload(event.peer, message, event.tensors)
            case Open() if not self.rights.may_open(event.peer, message):
                # Its client may be one that this replica does not follow any more, or not yet.
                self.endpoint.post(event.peer, Refused(message.key, BEHIND))
            case Open():
                answers = self._machine.receive(event.peer, message, self.clock.now_s())
                step = self._machine.open.get(message.key)
                if step is not None and step.request is message:
                    for hop in message.path:
                        if hop.peer != self.endpoint.peer_id:
                            self.endpoint.introduce(hop)
                self._do(answers)
                for early in self._early.take(message.key):
                    self._on_payload(early.sender, early.message, early.content)
            case Fence() if not self.rights.is_client(event.peer):
                return False  # of no one else's; a client that has just taken the run over repeats it
            case Commit() | Abort() | AskOutcome() | TellOutcome() | Refused() | Fence():
                self._do(self._machine.receive(event.peer, message, self.clock.now_s()))
            case EvalForward() | EvalLabels():
                self._evaluator.receive(event.peer, message, event.tensors, self.base_round, self.cap)
                self._notify()
            case _:
                return False
        return True

    def peer_lost(self, peer: PeerId) -> None:
        self._evaluator.peer_lost(peer)
        self._early.lost(peer)
        self._do(self._machine.lost(peer, self.clock.now_s()))

    def start_round(self, round: int, base: str = "", anew: bool = False, keeps_rest: bool = False) -> None:
        """The module holds D_{round-1}, whose hash is `base`: steps on top of it may be opened; log and version start
        again. `anew`: the optimizer has done no step. `keeps_rest`: see `Swap`."""
        self._committed_before += self._machine.version
        self._round_starts, self._inherited = True, None
        if self.replica_log is not None and round > 0:
            self.replica_log.loaded(round - 1, base, anew, keeps_rest)
        self._early.clear()
        self._do(self._machine.start_round(round, base, keeps_rest))

    def resume(
        self, log: tuple[StepEntry, ...], content: Tensor, generation: int, earlier: tuple[StepsTrained, ...] = ()
    ) -> bool:
        """Right after `start_round`: go on from a snapshot made after these steps; False if one of them was denied.
        `earlier` is what it has of other rounds."""
        if not self._machine.resume(log, earlier):
            return False
        self._resumed = content
        if self.replica_log is not None:
            self.replica_log.resumed(generation, len(log))
        return True

    async def inherit(self, inner: Mapping[str, Tensor], peer: PeerId, generation: int) -> bool:
        """Before the first step of a round: go on with what the inner optimizer of another replica knew at its record;
        False if a step has begun.

        Args:
            inner: As `StageCompute.inner_state` gives it.
            generation: Which of the replicas of `peer` that was.

        Raises:
            StateMismatch: It is not of this stage's optimizer.
        """
        if self._machine.log or self._machine.open or self._machine.round == 0:
            return False
        self.compute.parts.require_inner_state(inner)
        self._inherited = inner
        self._machine.forget_earlier()
        if self.replica_log is not None:
            self.replica_log.resumed(generation, 0, peer)
        self._notify()
        while self._inherited is inner:
            await self._changed.wait()
        return True

    async def close(self, round: int) -> StepsClosed:
        """Refuses new steps, finishes those that have begun, and returns when nothing but doubt is open.

        From then on nothing is committed but by `resolve`, until `start_round`. To be called again after `resolve`: it
        returns when the resolved steps are applied.

        Raises:
            RoundAborted: The replica is in another round, or was put into another one meanwhile.
        """
        self._check_round(round)
        self._do(self._machine.close())
        while self._resumed is not None or self._inherited is not None or not self._machine.closed:
            await self._changed.wait()
            self._check_round(round)
        self._machine.join()
        return StepsClosed(self.num_samples, self.in_doubt, self.log, earlier=self._machine.earlier)

    def resolve(self, key: StepKey, commit: bool, scale: float = 0.0, lr: float = 0.0, skipped: bool = False) -> None:
        """The round has settled a step in doubt; with `commit`, by the numbers of the log entry that holds it."""
        self._do(self._machine.resolve(key, Decision(scale, lr, skipped) if commit else None))

    def _check_round(self, round: int) -> None:
        if round != self._machine.round:
            raise RoundAborted(f"round {round} cannot be closed: this replica is in round {self._machine.round}")

    def _on_payload(self, peer: PeerId, message: Payload, tensors: Sequence[WireTensor]) -> None:
        if self._machine.awaits(message.key):
            early = EarlyPayload(peer, message, tensors, sum(tensor.num_bytes for tensor in tensors))
            if self._early.hold(early):
                return
        if (wanted := self._machine.wanted_by(peer, message)) is not None:
            module = self.compute.module.part(is_head=wanted.is_head)
            problem = payload_misfit(message, tensors, module, self._machine.open[message.key].request)
            if problem is not None:
                emit(logger, StepTensorRefused(str(message.key), peer, problem))
                self._do(self._machine.refuse(message.key, problem))
                return
            payloads = self._payloads.setdefault(message.key, {})
            payloads[wanted.is_head, type(message), message.microbatch] = tensors
        self._do(self._machine.receive(peer, message, self.clock.now_s()))

    # ---- work

    async def run(self) -> None:
        """Works until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(drive, self._machine, self.clock, self._changed, self._do)
            while True:
                changed = self._changed.coming
                if not await self._work():
                    await changed.wait()

    async def _work(self) -> bool:
        """Does one thing on the device; False if there is nothing to do."""
        while self._round_starts:
            self._round_starts = False
            self._post_results()
            content, self._resumed = self._resumed, None
            self._notify()
            cut_after = self._machine.cuts.commits(self._machine.round)
            await self.device.run(self.compute.start_round, content, self._machine.version, cut_after)
        if (inherited := self._inherited) is not None:
            await self.device.run(self.compute.inherit, inherited)
            self._inherited = None
            self._notify()
        operation = choose(self._machine.ready(), self._max_kept)
        # Evaluations take turns with training: neither starves.
        if self._evaluator.is_ready and (operation is None or not self._was_evaluation):
            self._was_evaluation = True
            self._post_results()
            if num_samples := await self._evaluator.run_one():
                self._lower_cap((num_samples,))
        elif operation is not None:
            self._was_evaluation = False
            await self._operate(operation)
        else:
            self._post_results()
            return False
        return True

    async def _operate(self, operation: Operation) -> None:
        key = operation.key
        step = self._machine.open.get(key)
        if self.replica_log is not None and step is not None and not step.begun:
            self.replica_log.begins(step.request)
        self._machine.started(operation)
        inputs = self._take_payloads(operation)
        request = step.request if step is not None else None
        completes = step is not None and step.completes(operation)
        call = self._operations.begin(operation, inputs, request, completes=completes)
        self._post_results()
        try:
            result = await call
        except Exception as error:
            family = self.compute.module.family_name
            # Half a commit cannot be taken back, and what is no error of a device or a model is a bug.
            if operation.kind in (OperationKind.COMMIT, OperationKind.DROP) or not is_refused_for(error, family):
                raise
            emit(logger, StepFailed(str(key), operation.kind.name), error=error)
            if request is not None and is_out_of_memory(error):
                self._lower_cap(request.microbatch_samples)
            said = raised(error, family, max_chars=MAX_REFUSAL_CHARS)
            self._do(self._machine.refuse(key, said, is_model=is_of_model(error, family)))
            return
        if self.replica_log is not None:
            self.replica_log.done(operation, result.totals)
        await self._operations.last(operation, result, request)
        is_gradient = operation.kind in (OperationKind.BACKWARD, OperationKind.LOSS)
        if is_gradient and result.tensor is not None and key in self._machine.open:
            kept = self._sent_gradients.setdefault(key, deque(maxlen=_KEPT_GRADIENTS))
            kept.append((operation.microbatch, result.tensor))
        version = self._machine.version
        # What every stage gets is handed on behind what this one puts out.
        context = inputs[1:] if operation.kind == OperationKind.FORWARD else []
        computed = [] if result.tensor is None else [result.tensor, *context]
        self._results = (self._machine.finished(operation, result.totals), computed)
        self._meter.committed(self._machine.log[version:])
        if operation.kind in (OperationKind.COMMIT, OperationKind.DROP):
            self._payloads.pop(key, None)
            self._sent_gradients.pop(key, None)
        if operation.kind != OperationKind.COMMIT:
            return
        round = self._machine.round
        if self._machine.version == self._machine.cuts.commits(round):
            self.cuts.taken(round, self.cuts.rule.brought(round, self.log, self._machine.earlier).num_targets)
        if self.boundary is not None:
            self._post_results()
            await self.boundary(round, self.log, self._machine.earlier)

    def _post_results(self) -> None:
        """Posts what the last operation has led to."""
        results, self._results = self._results, None
        if results is not None:
            self._do(*results)

    def _lower_cap(self, sizes: Sequence[int]) -> None:
        """Microbatches of these sizes do not fit into the device's memory: take smaller ones from now on."""
        self.endpoint.metrics.counter("step.out_of_memory").add()
        cap = lowered(sizes, self.cap)
        if cap is None:
            emit(logger, StepDoesNotFit(max(sizes)))
            return
        if cap == self.cap:
            return
        emit(logger, StepCapLowered(max(sizes), cap))
        # So were further ones in flight, by the same estimate.
        self._machine.cap, self._machine.room = cap, self._max_kept
        if self.events is not None:
            self.events.send_nowait(CapLowered(cap))

    def _take_payloads(self, operation: Operation) -> list[WireTensor]:
        kinds: dict[OperationKind, tuple[type, ...]] = {
            OperationKind.FORWARD: (Forward,),
            OperationKind.BACKWARD: (Backward,),
            OperationKind.LOSS: (Labels,) if self.compute.schedule == Schedule.GPIPE else (Forward, Labels),
        }
        payloads, part = self._payloads.get(operation.key, {}), operation.is_head
        taken = [payloads.pop((part, kind, operation.microbatch)) for kind in kinds.get(operation.kind, ())]
        return [tensor for tensors in taken for tensor in tensors]

    # ---- effects

    def _do(self, sends: Sequence[SendStepMessage], computed: Sequence[WireTensor] = ()) -> None:
        for send in sends:
            match send.message:
                case Forward():
                    if computed:
                        self.endpoint.post(send.to, send.message, computed, Traffic.ACTIVATIONS)
                case Backward(key, microbatch):
                    gradient = computed[0] if computed else self._sent_gradient(key, microbatch)
                    if gradient is not None:
                        self.endpoint.post(send.to, send.message, (gradient,), Traffic.GRADIENTS)
                case _:
                    self.endpoint.post(send.to, send.message)
        self._notify()

    def _sent_gradient(self, key: StepKey, microbatch: int) -> WireTensor | None:
        return dict(self._sent_gradients.get(key, ())).get(microbatch)

    def _notify(self) -> None:
        self._meter.open(self._machine.open.keys())
        self._changed.notify()
