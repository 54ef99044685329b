"""The computation of one replica of a stage: forwards, backwards, commits. No I/O; all of it on the device thread.

Every open step has gradients, activations and buffers of its own, so an abort leaves no trace and steps never mix:

    forward(key, m) ... backward(key, m) ... totals(key) -> commit(key, ...)     or at any point -> drop(key)
                              '-> weights(key, m)      where a backward is split

A step is bit-equal to a plain loop: its first microbatch's gradient is assigned by autograd, later ones are added in
place in microbatch order, and every forward draws from a seed of its own. So neither the schedule nor computing
activations a second time changes a bit. The head that a wrapped first stage hosts (`model.partition`) adds up gradients
of its own, since the parameter that it shares gets some from both sides, in any order; both sums are added in the end.

Parameters are those that are trained: frozen ones are constants, as in torch, and what they take keeps its gradient.
With a loss scale S (`optim.loss_scale`) all gradients are S times as large until the step is summed up and applied.

Shapes: B samples of a microbatch, N elements of the stage's parameters.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.func import functional_call

from shoal.errors import LocalProtocolError
from shoal.events.base import emit
from shoal.events.steps import StepNotSplit
from shoal.ids import StepKey
from shoal.model.device_calls import synchronise, wide
from shoal.model.precision import WeightCasts
from shoal.model.router_loss import RouterPass, RouterTotals
from shoal.model.seeding import operation_seed, seeded
from shoal.model.stage import StageModule
from shoal.optim.flat import trained_parameters
from shoal.optim.inner import InnerOptimizer
from shoal.optim.norm import squared_norm
from shoal.optim.parts import AveragedParts, ReplicaParts
from shoal.optim.vector_memory import is_in_file, leave, left_behind
from shoal.pipeline.host_memory import to_host
from shoal.pipeline.split_backward import SplitBackward, split
from shoal.pipeline.step_buffers import LiveBuffers
from shoal.swarm.step_operations import Schedule, StepTotals
from shoal.wire.messages.base import RouterReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _KeptForward:
    """Of a forward whose backward is still to come. Without `output` it is computed again, from `buffers`. `weight`
    times the loss of a router is what that backward differentiates."""

    received: Tensor
    context: tuple[Tensor, ...]
    output: Tensor | None
    buffers: list[Tensor]
    weight: float


_Place = tuple[bool, int]
"""Whether it is the head that a wrapped first stage hosts, and the microbatch."""


@dataclass(slots=True)
class _StepState:
    """What one open step holds. `later` computes the gradients of the parameters that a backward has put off."""

    base: list[Tensor]
    buffers: list[Tensor]
    changes: int
    gradients: list[Tensor | None]
    gradients_of_head: list[Tensor | None]
    loss_scale: float
    kept: dict[_Place, _KeptForward] = field(default_factory=dict[_Place, _KeptForward])
    later: dict[_Place, Callable[[], None]] = field(default_factory=dict[_Place, Callable[[], None]])
    loss: float = 0.0
    routers: RouterTotals = field(default_factory=RouterTotals)
    figures: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def sum_up(self) -> None:
        """All gradients are there: those of the head join the others."""
        for number, of_head in enumerate(self.gradients_of_head):
            own = self.gradients[number]
            if of_head is not None:
                self.gradients[number] = of_head if own is None else own.add_(of_head)
                self.gradients_of_head[number] = None


@dataclass(eq=False, repr=False)
class StageCompute:
    """One replica's module and optimizer.

    Attributes:
        module: On its device, in training mode.
        schedule: With zero_bubble, a backward leaves to `weights` what it can.
        activation_checkpointing: Keep only the input of a forward, and compute the forward again for the backward.
        module: Its part of the model. Its parameters change in `commit`; loaders change them between rounds.
        version: Commits since the round started, including skipped ones.
        base_parameters: Returns the flat parameters (N) of the round's record, for evaluation after the first commit.
        cut: A copy (N, on the CPU) of what the parameters were at the round's cut (`swarm.cut_rule`), from there on;
            whoever averages it forgets it.
        base_buffers: Returns its buffers, the floating and the integer ones, where a round begins with other parameters
            or buffers than the record's; None: it never does.
    """

    module: StageModule
    optimizer: InnerOptimizer
    _: KW_ONLY
    run_seed: int
    stage: int
    schedule: Schedule = Schedule.ONE_F_ONE_B
    activation_checkpointing: bool = False

    def __post_init__(self) -> None:
        self.version = 0
        self.base_parameters: Callable[[], Tensor] | None = None
        self.base_buffers: Callable[[], tuple[Tensor, Tensor]] | None = None
        self.cut: Tensor | None = None
        self._cut_after: int | None = None
        self._splits = self.schedule == Schedule.ZERO_BUBBLE
        self._is_checked = False
        self._parameters = [parameter for _, parameter in trained_parameters(self.module)]
        self._head_parameters = [] if self.module.head is None else [p for _, p in trained_parameters(self.module.head)]
        self._device = next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))
        self._casts = WeightCasts(self._parameters if self.module.autocast is not None else [])
        self._buffers = LiveBuffers(self.module)
        self._held_buffers = self._buffers.copy()
        self._steps: dict[StepKey, _StepState] = {}
        self.parts = ReplicaParts.of_module(self.module, self.optimizer, self._buffers.changed)

    # ---- a step

    def forward(
        self,
        key: StepKey,
        microbatch: int,
        input: Tensor,
        weight: float = 1.0,
        *context: Tensor,
        is_head: bool = False,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Runs one forward without a loss; microbatches of a step come in order.

        Args:
            key: The step's first microbatch begins it.
            input: (B, *input_spec.shape).
            weight: The microbatch's share of the step's targets; scales the gradients of the stage's routers' loss.
            context: (B, ...) each, as the module's `forward_specs` have them behind the input.
            is_head: Of the head that this stage hosts, and not of its own units.

        Returns:
            (B, *output_spec.shape), on the CPU, without gradient.
        """
        step = self._step(key, loss_scale)
        received, before = self._received(input, is_head), step.buffers
        given = self._given(context)
        output = self._begin(step, key, microbatch, (received, *given), weight, is_head)
        # Also what is computed again was computed with a graph: without one, torch may choose other kernels.
        kept = (
            _KeptForward(received, given, None, before, weight * loss_scale)
            if self.activation_checkpointing
            else _KeptForward(received, given, output, [], weight * loss_scale)
        )
        step.kept[is_head, microbatch] = kept
        return to_host(output)

    def backward(self, key: StepKey, microbatch: int, gradient: Tensor) -> Tensor:
        """Runs the backward of a forward done before; microbatches of a step come in order.

        Args:
            gradient: Of the loss with respect to the result of `forward`; same shape.

        Returns:
            The gradient with respect to the input, on the CPU; for the first stage an empty tensor.
        """
        step = self._steps[key]
        kept = step.kept.pop((False, microbatch))
        output = self._output(kept, key, microbatch, False)
        self._differentiate(step, (False, microbatch), output, kept.received, gradient.to(self._device))
        return self._input_gradient(kept.received)

    def loss(
        self,
        key: StepKey,
        microbatch: int,
        input: Tensor | None,
        labels: Tensor,
        weight: float,
        *context: Tensor,
        loss_scale: float = 1.0,
    ) -> Tensor:
        """Runs forward, loss and backward of the last stage, or of the head; microbatches of a step come in order.

        Args:
            key: The step's first microbatch begins it.
            input: (B, *input_spec.shape); None if `forward` was run before.
            labels: (B, *label_spec.shape).
            weight: The microbatch's share of the step's targets; scales loss and gradients. Without a target there is
                no loss, and its gradients are zeros.
            context: As in `forward`; nothing if that was run before.

        Returns:
            As `backward`.
        """
        step, is_head = self._step(key, loss_scale), self.module.head is not None
        place = (is_head, microbatch)
        if input is None:
            kept = step.kept.pop(place)
            received, output = kept.received, self._output(kept, key, microbatch, is_head)
        else:
            received = self._received(input, is_head)
            output = self._begin(step, key, microbatch, (received, *self._given(context)), weight, is_head)
        if not weight:
            self._differentiate(step, place, output, received, torch.zeros_like(output))
            return self._input_gradient(received)
        with self._casts.kept():
            loss = self.module.loss(output, labels.to(self._device), loss_scale) * weight
        self._differentiate(step, place, loss, received, loss.detach().new_full((), loss_scale))
        step.loss += loss.item()
        for name, figure in self.module.figures(output.detach(), labels.to(self._device)).items():
            share = wide(figure) * weight
            step.figures[name] = step.figures[name] + share if name in step.figures else share
        return self._input_gradient(received)

    def weights(self, key: StepKey, microbatch: int, *, is_head: bool = False) -> None:
        """Computes what the backward of a microbatch has put off, if anything; microbatches of a step come in order."""
        step = self._steps[key]
        later = step.later.pop((is_head, microbatch), None)
        if later is not None:
            with self._own_gradients(step, is_head):
                later()
            # Kernels that are only queued would hold up the backward that arrives next.
            synchronise(self._device)

    def totals(self, key: StepKey) -> StepTotals:
        """Sums the step up when all its gradients are there: squares in float64, added parameter by parameter."""
        step = self._steps[key]
        step.sum_up()
        squares = [squared_norm(gradient) for gradient in step.gradients if gradient is not None]
        total = 0.0
        for square in torch.stack(squares).cpu() if squares else ():
            total += float(square)
        total /= step.loss_scale**2
        loss = step.loss if self.module.has_loss else None
        finite = math.isfinite(total) and (loss is None or math.isfinite(loss))
        figures = (RouterReport(value.item(), 0.0, name) for name, value in step.figures.items())
        return StepTotals(total, finite, loss, (*step.routers.reports(), *figures))

    def commit(self, key: StepKey, scale: float, lr: float, skipped: bool) -> None:
        """Applies the step: gradients times `scale`, one optimizer step with `lr`, its buffers; nothing if `skipped`.

        Raises:
            LocalProtocolError: There is no such step, or a gradient of it is missing.
        """
        step = self._steps.pop(key, None)
        if step is None or step.kept or step.later:
            raise LocalProtocolError(f"{key} cannot be committed: it was not run to its end here")
        self.version += 1
        if skipped:
            self._forget_if_idle()
        else:
            self._apply(key, step, scale / step.loss_scale, lr)
        if self.version == self._cut_after:
            self.cut = self.averaged.parameters.flat().cpu()

    def _apply(self, key: StepKey, step: _StepState, applied: float, lr: float) -> None:
        """Steps with the gradients times `applied`."""
        if applied != 1.0:
            for gradient in step.gradients:
                if gradient is not None:
                    gradient.mul_(applied)
        with self._own_gradients(step, False):
            self.optimizer.step(lr, key.number)
        self._casts.forget()  # of the weights before
        self._buffers.apply(step.base, step.buffers, step.changes)

    def drop(self, key: StepKey) -> None:
        """Forgets the step, if there is one."""
        self._steps.pop(key, None)
        self._forget_if_idle()

    def _step(self, key: StepKey, loss_scale: float) -> _StepState:
        if key not in self._steps:
            base, none = self._buffers.copy(), [None] * len(self._parameters)
            self._steps[key] = _StepState(base, base, self._buffers.changes, list(none), list(none), loss_scale)
        return self._steps[key]

    def _forget_if_idle(self) -> None:
        if not self._steps:
            self._casts.forget()

    def _received(self, input: Tensor, is_head: bool) -> Tensor:
        received = input.to(self._device).detach()
        # The first stage's input is data: nobody needs its gradient.
        return received if self._takes_data(is_head) else received.requires_grad_()

    def _given(self, context: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return tuple(each.to(self._device) for each in context)

    def _takes_data(self, is_head: bool) -> bool:
        return self.module.is_first and not is_head

    def _begin(
        self,
        step: _StepState,
        key: StepKey,
        microbatch: int,
        taken: tuple[Tensor, ...],
        weight: float,
        is_head: bool,
    ) -> Tensor:
        """Return the output of a microbatch's first forward.

        Args:
            taken: What the stage gets, and the context.
        """
        scaled = weight * step.loss_scale
        output, step.buffers, passes = self._run(step.buffers, key, microbatch, taken, scaled, is_head)
        if not is_head:
            step.routers.add(weight, passes)
        return output

    def _run(
        self,
        buffers: list[Tensor],
        key: StepKey,
        microbatch: int,
        taken: tuple[Tensor, ...],
        weight: float,
        is_head: bool,
    ) -> tuple[Tensor, list[Tensor], list[RouterPass]]:
        """Return the output, the buffers as they are after it, and what the routers have come to."""
        # The head draws as a stage behind all others would.
        stage = self.module.num_stages if is_head else self.stage
        seed = operation_seed(self.run_seed, key.trainer, key.number, microbatch, stage)
        weighed = self.module.part(is_head=is_head).weighed(weight)
        bound = self._buffers.bound_to(buffers)
        with seeded(seed, self._device), self._casts.kept(), bound as left, weighed as passes:
            output = self.module(*taken, is_head=is_head)
        return output, left, passes

    def _output(self, kept: _KeptForward, key: StepKey, microbatch: int, is_head: bool) -> Tensor:
        if kept.output is not None:
            return kept.output
        taken = (kept.received, *kept.context)
        return self._run(kept.buffers, key, microbatch, taken, kept.weight, is_head)[0]

    def _differentiate(self, step: _StepState, place: _Place, root: Tensor, received: Tensor, gradient: Tensor) -> None:
        """Gives `received` its gradient, and the parameters theirs, now or later."""
        # A first stage without parameters has nothing to differentiate.
        if not root.requires_grad:
            return
        is_head, _ = place
        if self._splits and self._takes_data(is_head):
            # Nobody waits for the gradient of data.
            step.later[place] = partial(torch.autograd.backward, root, gradient)
            return
        halves = self._halves(root, received, gradient, is_head) if self._splits else None
        with self._own_gradients(step, is_head):
            if halves is None:
                torch.autograd.backward(root, gradient)
            else:
                halves.first_half(gradient)
                step.later[place] = halves.second_half

    def _halves(self, root: Tensor, received: Tensor, gradient: Tensor, is_head: bool) -> SplitBackward | None:
        """How this backward is split; None if it cannot be, or if the first one was not exact."""
        halves = split(root, received, self._head_parameters if is_head else self._parameters)
        if halves is not None and not self._is_checked and _tells(gradient):
            self._is_checked = True
            self._splits = halves.is_exact(gradient)
            if not self._splits:
                emit(logger, StepNotSplit(self.stage))
        return halves if self._splits else None

    @contextmanager
    def _own_gradients(self, step: _StepState, is_head: bool) -> Generator[None]:
        """Inside, the parameters' `.grad` are the step's, or the head's in it; afterwards they are None again."""
        gradients = step.gradients_of_head if is_head else step.gradients
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        try:
            yield
        finally:
            gradients[:] = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def _input_gradient(self, received: Tensor) -> Tensor:
        return torch.empty(0) if received.grad is None else to_host(received.grad)

    # ---- evaluation

    @torch.no_grad()
    def evaluate(self, input: Tensor, labels: Tensor | None = None, *context: Tensor) -> Tensor:
        """Runs one forward in eval mode with the parameters and buffers that the round started from.

        Args:
            input: (B, *input_spec.shape).
            labels: (B, *label_spec.shape) for what computes the loss, the last stage or the head; else None.

        Returns:
            (B, *output_spec.shape) without labels, else the mean loss, a scalar; on the CPU.

        Raises:
            LocalProtocolError: The parameters have moved on and nobody holds the old ones.
        """
        is_head = labels is not None and self.module.head is not None
        self.module.eval()
        try:
            with self._casts.set_aside(), self._buffers.bound_to(self._held_buffers):
                given = None if labels is None else labels.to(self._device)
                taken = self._given((input, *context))
                return self._evaluated(taken, {"is_head": is_head, "labels": given}).cpu()
        finally:
            self.module.train()

    def _evaluated(self, taken: tuple[Tensor, ...], options: dict[str, object]) -> Tensor:
        if self.version == 0 and self.base_buffers is None:
            return self.module(*taken, **options)
        if self.base_parameters is None:
            raise LocalProtocolError(f"stage {self.stage} does not hold the parameters that the round started from")
        layout, base_N = self.parts.averaged.parameters.layout, self.base_parameters()
        base = dict(zip(layout.names, layout.views(base_N.to(self._device)), strict=True))
        typed = {name: base[name].to(p.dtype) for name, p in trained_parameters(self.module)}
        # Compiled code, which is not used here, must find its modules as they were.
        parts = () if self.module.is_compiled or not is_in_file(base_N) else self.module.modules()
        try:
            with left_behind(parts):
                return functional_call(self.module, typed, taken, options)
        finally:
            leave(base_N)

    # ---- between rounds

    def start_round(self, resumed: Tensor | None = None, version: int = 0, cut_after: int | None = None) -> None:
        """The module holds the state of a round's record, or has its part in that: count from here, and keep the
        buffers of the record for evaluation.

        Args:
            resumed: A `snapshot` of this round to go on from.
            version: Number of commits before that snapshot; none is made behind the cut.
            cut_after: Commits of the round after which `cut` is taken; None: never.

        Raises:
            StateMismatch: The snapshot is not one of this stage.
        """
        self.version = version
        self._cut_after, self.cut = cut_after, None
        self._held_buffers = self._buffers_of_base()
        self._steps.clear()
        self._casts.forget()
        if resumed is not None:
            self.parts.restore(resumed)
        self._buffers.changed()

    def inherit(self, inner: Mapping[str, Tensor]) -> None:
        """Before the first step of a round: go on from the round's record with what the inner optimizer of another
        replica knew; see `ReplicaParts.take_inner_state`.

        Raises:
            StateMismatch: It is not of this stage's optimizer.
        """
        self.parts.take_inner_state(inner)
        self.take_base()

    def take_base(self) -> None:
        """Make parameters and buffers those of the round's record, where they are not."""
        if self.base_parameters is None or self.base_buffers is None:
            return
        values = self.base_parameters(), *self.base_buffers()
        for part, vector in zip(self.averaged, values, strict=True):
            part.load(vector)
        self._casts.forget()

    def _buffers_of_base(self) -> list[Tensor]:
        """Copies of the buffers of the round's record."""
        if self.base_buffers is None:
            return self._buffers.copy()
        values = dict[int, Tensor]()
        for part, vector in zip(self.averaged[1:], self.base_buffers(), strict=True):
            values |= {id(own): view for own, view in zip(part.tensors, part.layout.views(vector), strict=True)}
        return [values[id(live)].to(live, copy=True) for live in self._buffers.live]

    def snapshot(self) -> Tensor:
        """A copy, as bytes on the CPU, of all that the steps after this boundary depend on; see `start_round`."""
        return self.parts.snapshot()

    @property
    def averaged(self) -> AveragedParts:
        """What rounds replace."""
        return self.parts.averaged

    @property
    def residual(self) -> tuple[Tensor, ...]:
        """What codecs have left out of the pseudo-gradients so far; see `ReplicaParts`."""
        return self.parts.residual

    @residual.setter
    def residual(self, value: tuple[Tensor, ...]) -> None:
        self.parts.residual = value

    def forget_moments(self) -> None:
        """Has the optimizer begin anew."""
        self.optimizer.reset()


def _tells(gradient: Tensor) -> bool:
    """Whether a backward from this gradient can show a difference; zeros, as of no targets, cannot."""
    return bool(gradient.any())
