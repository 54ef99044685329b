"""DiLoCo in one process, as plainly as it can be written: R workers, one after the other, and the outer step.

It knows nothing of rings, rounds or replicas; what it shares with the swarm is the model, the seeds of operations, and
one agreement: the order in which contributions are added. With n members:

    ring       a vector is cut into n contiguous chunks, the first ones larger by one element where n does not divide;
               chunk j is summed as ((c[j+1] + c[j+2]) + ...) + c[j]
    tree       neighbours first, then neighbouring pairs, and so on: ((c0 + c1) + (c2 + c3)) + (c4 + ...)
    central    c0 + c1 + c2 + ... from left to right

A vector of at most 128 KiB goes through the centre with up to three members and along the tree with more, a larger one
around the ring. With a wire type, float32 sums are cast to it and back wherever they are handed on, and at the end.

With a `Coding` pseudo-gradients are not summed on their way: each worker encodes its own, with what it has left out so
far, and what everybody decodes of all is weighed and added up from left to right. Over senders the sum of a value is
divided by the shares of those that have sent it.

With P fragments round r is about every P-th piece of 4,096 parameters, from piece r mod P on: only these are averaged
and replaced, and a worker weighs what it has trained since the last average of them. Buffers are averaged where r mod P
is P - 1.

With an overlap a worker's parameters are copied after so many steps of a round, but for the last round: what is
averaged is this copy, and what it has learnt since is carried over, or the mean of its parameters and the new ones goes
on. The targets of these steps count in the next average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from tests.reference import payloads
from torch import Tensor, nn

from shoal.model.seeding import operation_seed
from shoal.model.stage import Family, StageModule, build_stage

Batch = Sequence[tuple[Tensor, Tensor]]

Coded = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Of values, what receivers make of them, and which of them are sent."""


@dataclass
class Coding:
    """How pseudo-gradients are encoded; `feedback` is the decay of what was left out, 0: it is forgotten."""

    code: Coded
    feedback: float
    over_senders: bool


def coded_by(name: str) -> Coded:
    """The codec of this name, as plainly as `payloads` has it."""

    def code(values: Tensor) -> tuple[Tensor, Tensor]:
        received = torch.tensor(payloads.encoded(name, values.tolist()).sent)
        return received, received != 0 if name == "sparse" else torch.ones(len(values), dtype=torch.bool)

    return code


class Worker:
    """A whole model in stages, trained by AdamW, or by Muon and AdamW, on its own batches."""

    def __init__(
        self,
        family: Family,
        num_stages: int,
        seed: int,
        trainer: int,
        max_norm: float,
        dtype: torch.dtype,
        muon: bool = False,
    ):
        self.stages = [build_stage(family, s, num_stages, seed=seed, dtype=dtype) for s in range(num_stages)]
        self.seed, self.trainer, self.max_norm, self.muon = seed, trainer, max_norm, muon
        self.reset()

    def reset(self) -> None:
        """Optimizers that have done no step."""
        self.optimizers = [[adamw(stage.named_parameters())] for stage in self.stages]
        if self.muon:
            self.optimizers = [muon_and_adamw(stage) for stage in self.stages]

    def step(self, batch: Batch, number: int, lr: float) -> None:
        total = sum(num_targets(labels) for _, labels in batch)
        for microbatch, (inputs, labels) in enumerate(batch):
            hidden = inputs
            for index, stage in enumerate(self.stages):
                torch.manual_seed(operation_seed(self.seed, self.trainer, number, microbatch, index))
                hidden = stage(hidden)
            (self.stages[-1].loss(hidden, labels) * (num_targets(labels) / total)).backward()
        squares = 0.0
        for stage in self.stages:
            of_stage = 0.0
            for parameter in stage.parameters():
                of_stage += parameter.grad.double().square().sum().item()
            squares += of_stage
        scale = min(1.0, self.max_norm / (math.sqrt(squares) + 1e-6))
        for stage, optimizers in zip(self.stages, self.optimizers, strict=True):
            if scale != 1.0:
                for parameter in stage.parameters():
                    parameter.grad *= scale
            for optimizer in optimizers:
                is_beside = self.muon and isinstance(optimizer, torch.optim.AdamW)
                for group in optimizer.param_groups:
                    group["lr"] = lr * (4e-4 / 0.02) if is_beside else lr
                optimizer.step()
            stage.zero_grad()


def targets_of(batches: Sequence[Batch]) -> int:
    return sum(num_targets(labels) for batch in batches for _, labels in batch)


def num_targets(labels: Tensor) -> int:
    """Labels that count."""
    return int((labels != -100).sum())


def adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    parameters = [p for _, p in named]
    matrices = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)


def muon_and_adamw(stage: StageModule) -> list[torch.optim.Optimizer]:
    """Muon for the matrices in blocks, AdamW for vectors, and for all of the first unit and the last."""
    named = list(stage.named_parameters())
    hidden = {name for name, p in named if p.ndim == 2 and ".block_" in name}
    of_adamw = adamw((name, p) for name, p in named if name not in hidden)
    if not hidden:
        return [of_adamw]
    matrices = [p for name, p in named if name in hidden]
    return [torch.optim.Muon(matrices, weight_decay=0.1, momentum=0.95, nesterov=True), of_adamw]


class OuterStage:
    """The outer state of one stage over all workers."""

    def __init__(
        self,
        stages: Sequence[StageModule],
        lr: float,
        momentum: float,
        wire: torch.dtype | None = None,
        coding: Coding | None = None,
        fragments: int = 1,
        carries: bool = True,
    ) -> None:
        self.carries = carries
        self.stages, self.lr, self.mu, self.wire, self.coding = stages, lr, momentum, wire, coding
        self.fragments, self.since = fragments, [[0 for _ in stages] for _ in range(fragments)]
        self.outer = flat(stages[0].parameters())
        self.momentum = torch.zeros_like(self.outer)
        self.residuals = [torch.zeros_like(self.outer) for _ in stages]

    def round(self, targets: Sequence[int], number: int, copies: Sequence[Tensor | None], after: Sequence[int]) -> None:
        """`copies` are the workers' parameters at their cuts, `after` what they have trained behind these."""
        self.since = [[a + b for a, b in zip(since, targets, strict=True)] for since in self.since]
        targets = [a - b for a, b in zip(self.since[number % self.fragments], after, strict=True)]
        self.since[number % self.fragments] = list(after)
        self.weights, total = tuple(targets), sum(targets)
        if total == 0:
            return
        own = in_fragment(len(self.outer), number, self.fragments)
        locals_ = [flat(stage.parameters()) for stage in self.stages]
        cuts = [local if copy is None else copy for local, copy in zip(locals_, copies, strict=True)]
        deltas = [(self.outer - cut)[own] for cut in cuts]
        if self.coding is None:
            shares = [d * (n / total) if n else 0 * d for d, n in zip(deltas, targets, strict=True)]
            average = agreed_sum(shares, self.wire)
        else:
            shares = [n / total for n in targets]
            average, left = coded_mean(deltas, [each[own] for each in self.residuals], shares, self.coding)
            for residual, values in zip(self.residuals, left, strict=True):
                residual[own] = values
        self.momentum[own] = self.momentum[own] * self.mu + average
        self.outer[own] = self.outer[own] - (self.momentum[own] * self.mu + average) * self.lr
        for stage, local, copy in zip(self.stages, locals_, copies, strict=True):
            merged = self.outer
            if copy is not None:
                merged = self.outer + (local - copy) if self.carries else (self.outer + local) / 2
            unflatten(torch.where(own, merged, local), stage.parameters())
        if number % self.fragments == self.fragments - 1:
            self.average_buffers(targets, total)

    def average_buffers(self, targets: Sequence[int], total: int) -> None:
        floats = [flat(b for b in stage.buffers() if b.is_floating_point()) for stage in self.stages]
        averaged = agreed_sum([f * (n / total) if n else 0 * f for f, n in zip(floats, targets, strict=True)])
        counts = [[b.clone() for b in stage.buffers() if not b.is_floating_point()] for stage in self.stages]
        for stage in self.stages:
            unflatten(averaged, [b for b in stage.buffers() if b.is_floating_point()])
            for index, buffer in enumerate(b for b in stage.buffers() if not b.is_floating_point()):
                buffer.copy_(torch.stack([of_worker[index] for of_worker in counts]).amax(0))


def in_fragment(num_elements: int, round: int, fragments: int) -> Tensor:
    """Which elements a round averages."""
    return torch.arange(num_elements) // 4096 % fragments == round % fragments


def coded_mean(
    deltas: Sequence[Tensor], residuals: Sequence[Tensor], shares: Sequence[float], coding: Coding
) -> tuple[Tensor, list[Tensor]]:
    """The average of what workers send, and what they have left out since they began."""
    left = list(residuals)
    total, senders = torch.zeros_like(deltas[0]), torch.zeros_like(deltas[0])
    for worker, (delta, share) in enumerate(zip(deltas, shares, strict=True)):
        if share == 0:
            continue
        whole = delta + residuals[worker] * coding.feedback if coding.feedback else delta
        received, sent = coding.code(whole)
        total = total + received * share
        senders = senders + sent.to(torch.float32) * share
        if coding.feedback:
            left[worker] = whole - received
    return (torch.where(senders == 0, total, total / senders) if coding.over_senders else total), left


def agreed_sum(contributions: Sequence[Tensor], wire: torch.dtype | None = None) -> Tensor:
    """The sum as a swarm forms it that chooses the collective by itself."""
    if contributions[0].nbytes > 131072:
        return ring_sum(contributions, wire)
    return central_sum(contributions, wire) if len(contributions) <= 3 else tree_sum(contributions, wire)


def ring_sum(contributions: Sequence[Tensor], wire: torch.dtype | None = None) -> Tensor:
    n = len(contributions)
    sizes = [len(contributions[0]) // n + (1 if j < len(contributions[0]) % n else 0) for j in range(n)]
    chunked = [torch.split(c, sizes) for c in contributions]
    result: list[Tensor] = []
    for j in range(n):
        total = chunked[(j + 1) % n][j]
        for step in range(2, n + 1):
            total = handed_on(total, wire) + chunked[(j + step) % n][j]
        result.append(handed_on(total, wire) if n > 1 else total)
    return torch.cat(result)


def tree_sum(contributions: Sequence[Tensor], wire: torch.dtype | None = None) -> Tensor:
    sums = list(contributions)
    while len(sums) > 1:
        pairs = [sums[i : i + 2] for i in range(0, len(sums), 2)]
        sums = [pair[0] if len(pair) == 1 else pair[0] + handed_on(pair[1], wire) for pair in pairs]
    return handed_on(sums[0], wire) if len(contributions) > 1 else sums[0]


def central_sum(contributions: Sequence[Tensor], wire: torch.dtype | None = None) -> Tensor:
    total = contributions[0]
    for contribution in contributions[1:]:
        total = total + handed_on(contribution, wire)
    return handed_on(total, wire) if len(contributions) > 1 else total


def handed_on(values: Tensor, wire: torch.dtype | None) -> Tensor:
    return values if wire is None else values.to(wire).to(values.dtype)


def flat(tensors: Sequence[Tensor] | nn.Module) -> Tensor:
    parts = [t.detach().reshape(-1) for t in tensors]
    return torch.cat(parts) if parts else torch.zeros(0)


def unflatten(values: Tensor, into: Sequence[Tensor]) -> None:
    with torch.no_grad():
        start = 0
        for tensor in into:
            tensor.copy_(values[start : start + tensor.numel()].view(tensor.shape))
            start += tensor.numel()


class PlainDiloco:
    """R workers from one seed, and an outer step over each stage after every round."""

    def __init__(
        self,
        family: Family,
        num_stages: int,
        num_workers: int,
        *,
        seed: int,
        max_norm: float,
        outer_lr: float,
        outer_momentum: float,
        dtype: torch.dtype = torch.float32,
        wire: torch.dtype | None = None,
        coding: Coding | None = None,
        muon: bool = False,
        resets: bool = False,
        fragments: int = 1,
        cut_after: int | None = None,
        last_round: int = 0,
        carries: bool = True,
    ) -> None:
        self.cut_after, self.last_round = cut_after, last_round
        self.workers = [Worker(family, num_stages, seed, t, max_norm, dtype, muon) for t in range(num_workers)]
        self.resets = resets
        self.num_rounds = 0
        self.outer = [
            OuterStage(
                [worker.stages[s] for worker in self.workers],
                outer_lr,
                outer_momentum,
                wire,
                coding,
                fragments,
                carries,
            )
            for s in range(num_stages)
        ]

    def round(self, batches: Sequence[Sequence[Batch]], first_number: int, lr: float) -> None:
        """`batches[k]` are those of worker k in this round."""
        self.num_rounds += 1
        cut_after = None if self.num_rounds == self.last_round else self.cut_after
        copies: list[list[Tensor | None]] = [[None for _ in self.workers] for _ in self.outer]
        after = [0 for _ in self.workers]
        for number, (worker, own) in enumerate(zip(self.workers, batches, strict=True)):
            for index, batch in enumerate(own):
                worker.step(batch, first_number + index, lr)
                if index + 1 == cut_after:
                    for of_workers, stage in zip(copies, worker.stages, strict=True):
                        of_workers[number] = flat(stage.parameters())
                    after[number] = targets_of(own[cut_after:])
        for stage, of_workers in zip(self.outer, copies, strict=True):
            stage.round([targets_of(own) for own in batches], self.num_rounds, of_workers, after)
        if self.resets:
            for worker in self.workers:
                worker.reset()
