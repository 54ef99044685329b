"""The plain training loop of the same model in one process: the reference of every equality and of every speed ratio.

It shares the stages' modules, the optimizer and the seeds with the swarm, and nothing of how a swarm runs a step: a
microbatch goes through all stages and straight back before the next one starts.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.config.diloco import InnerOptimConfig
from shoal.data.targets import IGNORED
from shoal.errors import ConfigError
from shoal.model.seeding import operation_seed, seeded
from shoal.model.stage import StageModule
from shoal.optim.inner import InnerOptimizer, transposed_matrices
from shoal.optim.loss_scale import LossScale
from shoal.optim.norm import squared_norm


class PlainLoop:
    """Trains a chain of stages with global gradient clipping.

    Attributes:
        stages: In order; each has an optimizer of its own, as in the swarm. A head that the first one hosts comes last
            on the way of a microbatch.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        inner_optim: InnerOptimConfig,
        max_grad_norm: float | None,
        run_seed: int,
        trainer: int,
    ) -> None:
        """Takes the stages over.

        Args:
            stages: All stages of the model, on one device, in training mode.
            max_grad_norm: Gradients are scaled down to this norm over all stages; None does not clip.
            trainer: The slot whose random draws are taken, 0 or more.

        Raises:
            ConfigError: The stages do not make a whole model.
        """
        head = stages[0].head if stages else None
        self._chain = tuple(stages) if head is None else (*stages, head)
        if [stage.stage for stage in self._chain] != list(range(len(self._chain))) or not self._chain[-1].is_last:
            raise ConfigError("a plain loop needs all stages of a model, in order")
        self.stages = tuple(stages)
        self._head_parameters = [] if head is None else list(head.parameters())
        self._head_gradients: list[Tensor | None] = [None] * len(self._head_parameters)
        self._optimizers = [
            InnerOptimizer(stage.named_parameters(), inner_optim, transposed_matrices(stage)) for stage in stages
        ]
        self._max_grad_norm = max_grad_norm
        self._loss_scale = LossScale(is_needed=any(stage.autocast == torch.float16 for stage in stages))
        self._run_seed = run_seed
        self._trainer = trainer
        self._device = next((p.device for stage in stages for p in stage.parameters()), torch.device("cpu"))

    def step(self, microbatches: Sequence[tuple[Tensor, ...]], number: int, lr: float) -> tuple[float, float]:
        """Trains one step; a step whose loss or gradients are not finite changes nothing.

        Args:
            microbatches: Inputs (B, ...), labels (B, ...) and the context of each; B may differ.
            number: Of the step, counted from 0 over the whole run.

        Returns:
            The mean loss over the targets, and the norm of the gradients over all stages before clipping.
        """
        buffers_before = [[buffer.clone() for buffer in stage.buffers()] for stage in self.stages]
        targets = [_num_targets(labels) for _, labels, *_ in microbatches]
        loss = 0.0
        for microbatch, (inputs, labels, *context) in enumerate(microbatches):
            weight = targets[microbatch] / max(1, sum(targets))
            loss += self._forward_backward(inputs, labels, context, number, microbatch, weight)
        self._add_head_gradients()
        norm = math.sqrt(sum(self._squared_norms()))
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        if is_finite:
            self._apply(norm, lr, number)
        else:
            self._restore(buffers_before)
        self._loss_scale.ended(skipped=not is_finite)
        for stage in self.stages:
            stage.zero_grad(set_to_none=True)
        return loss, norm

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[tuple[Tensor, ...]]) -> tuple[float, int]:
        """Runs the model in eval mode.

        Returns:
            The sum of the losses over the targets, and the number of targets.
        """
        loss_sum, num_targets = 0.0, 0
        for stage in self.stages:
            stage.eval()
        for inputs, labels, *context in microbatches:
            count = _num_targets(labels)
            if not count:
                continue
            hidden, *given = (tensor.to(self._device) for tensor in (inputs, *context))
            for stage in self._chain:
                hidden = stage(hidden, *given)
            loss = self._chain[-1].loss(hidden, labels.to(self._device))
            loss_sum += loss.item() * count
            num_targets += count
        for stage in self.stages:
            stage.train()
        return loss_sum, num_targets

    def _forward_backward(
        self, inputs: Tensor, labels: Tensor, context: Sequence[Tensor], number: int, microbatch: int, weight: float
    ) -> float:
        """One microbatch through all stages and back; returns its weighted loss."""
        scale = self._loss_scale.value
        received: list[Tensor] = []
        sent: list[Tensor] = []
        hidden, *given = (tensor.to(self._device) for tensor in (inputs, *context))
        for stage in self._chain:
            # Stages meet at detached tensors, as machines do.
            hidden = hidden.detach().requires_grad_(not stage.is_first)
            received.append(hidden)
            seed = operation_seed(self._run_seed, self._trainer, number, microbatch, stage.stage)
            with seeded(seed, self._device), stage.weighed(weight * scale):
                hidden = stage(hidden, *given)
            sent.append(hidden)
        # The mean over no target is none.
        loss = self._chain[-1].loss(hidden, labels.to(self._device), scale) * weight if weight else 0.0 * hidden.sum()
        with self._own_head_gradients():
            torch.autograd.backward(loss, loss.detach().new_full((), scale))
        for stage in reversed(self._chain[:-1]):
            gradient, output = received[stage.stage + 1].grad, sent[stage.stage]
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
        return loss.item()

    @contextmanager
    def _own_head_gradients(self) -> Generator[None]:
        """Inside, the gradients of a hosted head's parameters are its own: a tied one has others beside them."""
        others = [parameter.grad for parameter in self._head_parameters]
        for parameter, gradient in zip(self._head_parameters, self._head_gradients, strict=True):
            parameter.grad = gradient
        yield
        self._head_gradients = [parameter.grad for parameter in self._head_parameters]
        for parameter, gradient in zip(self._head_parameters, others, strict=True):
            parameter.grad = gradient

    def _add_head_gradients(self) -> None:
        """All gradients of a step are there: those of the head join the others."""
        for number, parameter in enumerate(self._head_parameters):
            of_head, self._head_gradients[number] = self._head_gradients[number], None
            if of_head is not None:
                parameter.grad = of_head if parameter.grad is None else parameter.grad.add_(of_head)

    def _squared_norms(self) -> list[float]:
        """Of each stage: squares in float64, added parameter by parameter."""
        sums: list[float] = []
        for stage in self.stages:
            stage_sum = 0.0
            for parameter in stage.parameters():
                if parameter.grad is not None:
                    stage_sum += float(squared_norm(parameter.grad))
            sums.append(stage_sum / self._loss_scale.value**2)
        return sums

    def _apply(self, norm: float, lr: float, number: int) -> None:
        clipping = 1.0 if self._max_grad_norm is None else min(1.0, self._max_grad_norm / (norm + 1e-6))
        scale = clipping / self._loss_scale.value
        for stage, optimizer in zip(self.stages, self._optimizers, strict=True):
            for parameter in stage.parameters():
                if scale != 1.0 and parameter.grad is not None:
                    parameter.grad.mul_(scale)
            optimizer.step(lr, number)

    @torch.no_grad()
    def _restore(self, buffers_before: list[list[Tensor]]) -> None:
        for stage, before in zip(self.stages, buffers_before, strict=True):
            for buffer, old in zip(stage.buffers(), before, strict=True):
                buffer.copy_(old)


def _num_targets(labels: Tensor) -> int:
    """How many labels the loss counts."""
    return int((labels.long() != IGNORED).sum())
