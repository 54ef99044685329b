"""The computation of one replica of a stage: forwards, backwards, commits. No I/O; all of it on the device thread.

Every open step has gradients, activations and buffers of its own, so an abort leaves no trace and steps never mix:

    forward(key, m) ... backward(key, m) ... totals(key) -> commit(key, ...)     or at any point -> drop(key)

A step is bit-equal to a plain loop: its first microbatch's gradient is assigned by autograd, later ones are added in
place in microbatch order, and every forward draws from a seed of its own.

Shapes: B samples of a microbatch, N elements of the stage's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import functional_call

from shoal.errors import LocalProtocolError
from shoal.ids import StepKey
from shoal.model.seeding import operation_seed, seeded
from shoal.model.stage import StageModule
from shoal.optim.flat import FlatLayout
from shoal.optim.inner import InnerOptimizer
from shoal.optim.norm import squared_norm
from shoal.pipeline.step_buffers import LiveBuffers
from shoal.swarm.step_operations import StepTotals


@dataclass(slots=True)
class _Step:
    """What one open step holds. `saved[m]` are input and output of a forward whose backward is still to come."""

    base: list[Tensor]
    buffers: list[Tensor]
    changes: int
    gradients: list[Tensor | None]
    saved: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])
    loss: float = 0.0


class StageCompute:
    """One replica's module and optimizer.

    Attributes:
        module: The stage; its parameters change in `commit` and by whoever loads them between rounds.
        layout: Of the flat parameters.
        version: Commits since the round started, skipped ones included.
        held_parameters: Gives the flat parameters (N) of the round's record, for evaluation after the first commit.
    """

    def __init__(self, module: StageModule, optimizer: InnerOptimizer, *, run_seed: int, stage: int) -> None:
        self.module = module
        self.optimizer = optimizer
        self.layout = FlatLayout.of_parameters(module)
        self.version = 0
        self.held_parameters: Callable[[], Tensor] | None = None
        self._run_seed = run_seed
        self._stage = stage
        self._parameters = list(module.parameters())
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._buffers = LiveBuffers(module)
        self._held_buffers = self._buffers.copy()
        self._steps: dict[StepKey, _Step] = {}
        self._float_buffers = FlatLayout.of_float_buffers(module)
        self._integer_buffers = FlatLayout.of_integer_buffers(module)

    # ---- a step

    def forward(self, key: StepKey, microbatch: int, input: Tensor) -> Tensor:
        """Runs one forward of a stage that is not the last; microbatches of a step come in order.

        Args:
            key: The step; its first microbatch begins it.
            microbatch: Which.
            input: (B, *input_spec.shape).

        Returns:
            (B, *output_spec.shape), on the CPU, without gradient.
        """
        step = self._step(key)
        received = self._received(input)
        output = self._run(step, key, microbatch, received)
        step.saved[microbatch] = (received, output)
        return output.detach().cpu()

    def backward(self, key: StepKey, microbatch: int, gradient: Tensor) -> Tensor:
        """Runs the backward of a forward done before; microbatches of a step come in order.

        Args:
            key: The step.
            microbatch: Which.
            gradient: Of the loss with respect to what `forward` returned.

        Returns:
            The gradient with respect to the input, on the CPU; for the first stage an empty tensor.
        """
        step = self._step(key)
        received, output = step.saved.pop(microbatch)
        # A first stage without parameters has nothing to differentiate.
        if output.requires_grad:
            with self._own_gradients(step):
                torch.autograd.backward(output, gradient.to(self._device))
        return self._input_gradient(received)

    def loss(self, key: StepKey, microbatch: int, input: Tensor, labels: Tensor, weight: float) -> Tensor:
        """Runs forward, loss and backward of the last stage.

        Args:
            key: The step; its first microbatch begins it.
            microbatch: Which; in order.
            input: (B, *input_spec.shape).
            labels: (B, *label_spec.shape).
            weight: The microbatch's share of the step's samples; scales loss and gradients.

        Returns:
            As `backward`.
        """
        step = self._step(key)
        received = self._received(input)
        output = self._run(step, key, microbatch, received)
        loss = self.module.loss(output, labels.to(self._device)) * weight
        if loss.requires_grad:
            with self._own_gradients(step):
                torch.autograd.backward(loss)
        step.loss += loss.item()
        return self._input_gradient(received)

    def totals(self, key: StepKey) -> StepTotals:
        """Sums the step up after its last backward: squares in float64, added parameter by parameter."""
        step = self._step(key)
        squares = [squared_norm(gradient) for gradient in step.gradients if gradient is not None]
        total = 0.0
        for square in torch.stack(squares).cpu() if squares else ():
            total += float(square)
        loss = step.loss if self.module.is_last else None
        finite = math.isfinite(total) and (loss is None or math.isfinite(loss))
        return StepTotals(total, finite, loss)

    def commit(self, key: StepKey, scale: float, lr: float, skipped: bool) -> None:
        """Applies the step: gradients times `scale`, one optimizer step with `lr`, its buffers; nothing if `skipped`.

        Raises:
            LocalProtocolError: There is no such step, or a backward of it is missing.
        """
        step = self._steps.pop(key, None)
        if step is None or step.saved:
            raise LocalProtocolError(f"{key} cannot be committed: it was not run to its end here")
        self.version += 1
        if skipped:
            return
        if scale != 1.0:
            for gradient in step.gradients:
                if gradient is not None:
                    gradient.mul_(scale)
        with self._own_gradients(step):
            self.optimizer.step(lr)
        self._buffers.apply(step.base, step.buffers, step.changes)

    def drop(self, key: StepKey) -> None:
        """Forgets the step, if there is one."""
        self._steps.pop(key, None)

    def _step(self, key: StepKey) -> _Step:
        if key not in self._steps:
            base = self._buffers.copy()
            self._steps[key] = _Step(base, base, self._buffers.changes, [None] * len(self._parameters))
        return self._steps[key]

    def _received(self, input: Tensor) -> Tensor:
        received = input.to(self._device).detach()
        # The first stage's input is data: nobody needs its gradient.
        return received if self.module.is_first else received.requires_grad_()

    def _run(self, step: _Step, key: StepKey, microbatch: int, received: Tensor) -> Tensor:
        seed = operation_seed(self._run_seed, key.trainer, key.number, microbatch, self._stage)
        with seeded(seed, self._device), self._buffers.bound_to(step.buffers) as left:
            output = self.module(received)
        step.buffers = left
        return output

    @contextmanager
    def _own_gradients(self, step: _Step) -> Generator[None]:
        """Inside, the parameters' `.grad` are the step's; afterwards they are None again."""
        for parameter, gradient in zip(self._parameters, step.gradients, strict=True):
            parameter.grad = gradient
        try:
            yield
        finally:
            step.gradients = [parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def _input_gradient(self, received: Tensor) -> Tensor:
        return torch.empty(0) if received.grad is None else received.grad.cpu()

    # ---- evaluation

    @torch.no_grad()
    def evaluate(self, input: Tensor, labels: Tensor | None = None) -> Tensor:
        """Runs one forward in eval mode with the parameters and buffers that the round started from.

        Args:
            input: (B, *input_spec.shape).
            labels: (B, *label_spec.shape) in the last stage, else None.

        Returns:
            (B, *output_spec.shape) without labels, else the mean loss, a scalar; on the CPU.

        Raises:
            LocalProtocolError: The parameters have moved on and nobody holds the old ones.
        """
        self.module.eval()
        try:
            with self._buffers.bound_to(self._held_buffers):
                output = self._evaluated(input.to(self._device))
        finally:
            self.module.train()
        return (output if labels is None else self.module.loss(output, labels.to(self._device))).cpu()

    def _evaluated(self, input: Tensor) -> Tensor:
        if self.version == 0:
            return self.module(input)
        if self.held_parameters is None:
            raise LocalProtocolError(f"stage {self._stage} does not hold the parameters that the round started from")
        held = dict(zip(self.layout.names, self.layout.views(self.held_parameters().to(self._device)), strict=True))
        typed = {name: held[name].to(p.dtype) for name, p in self.module.named_parameters()}
        return functional_call(self.module, typed, (input,))

    # ---- between rounds

    def start_round(self) -> None:
        """The module holds the state of a round's record: count from here, and keep its buffers for evaluation."""
        self.version = 0
        self._buffers.changed()
        self._held_buffers = self._buffers.copy()
        self._steps.clear()

    def parameters_flat(self, out: Tensor | None = None) -> Tensor:
        """A copy of the parameters as one vector (N)."""
        return self.layout.flatten(self._parameters, out)

    def load_parameters(self, flat_N: Tensor) -> None:
        """Replaces the parameters' values."""
        self.layout.unflatten(flat_N, self._parameters)

    def float_buffers_flat(self) -> Tensor:
        """A copy of the committed floating buffers as one vector."""
        return self._float_buffers.flatten(self._float_buffers.select(self.module))

    def load_float_buffers(self, flat: Tensor) -> None:
        """Replaces the committed floating buffers' values."""
        self._float_buffers.unflatten(flat, self._float_buffers.select(self.module))
        self._buffers.changed()

    def integer_buffers_flat(self) -> Tensor:
        """A copy of the committed integer buffers as one vector."""
        return self._integer_buffers.flatten(self._integer_buffers.select(self.module))

    def load_integer_buffers(self, flat: Tensor) -> None:
        """Replaces the committed integer buffers' values."""
        self._integer_buffers.unflatten(flat, self._integer_buffers.select(self.module))
        self._buffers.changed()
