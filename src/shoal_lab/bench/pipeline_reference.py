"""The reference of the benchmark `pipeline`: a plain loop over the whole model, as a user of torch would write it.

It is given the same model, samples in memory, optimizer and clipping, and may handle the batch of a step as it likes:
it first tries the whole batch at once and in parts, and goes on with what is fastest.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from shoal.clock import Clock, SystemClock
from shoal.config.load import load_config
from shoal.config.schema import Config
from shoal.data.catalog import open_source
from shoal.model.registry import load_family
from shoal.model.stage import build_stage
from shoal.runtime.process_info import cpu_s
from shoal_lab.bench.peer import Calls, Seat

_BATCHES = 4
"""Different batches in memory, taken in turn."""
_TRIED = 3
"""How often the optimizer is tried; once for each way costs its own first use."""
_TRIED_SHARE = 4
"""Of a batch that is cut, one part of so many is tried: they are all alike."""


@contextmanager
def main(seat: Seat) -> Generator[Calls, None, None]:
    """Offer `choose`, and `train` with a number of steps, which returns samples per second and CPU seconds a sample."""
    torch.set_num_threads(seat.arguments["threads"])
    loop = PlainTraining(load_config(overrides=list(seat.arguments["flags"])), SystemClock())
    yield {"choose": loop.choose, "train": loop.train}


class PlainTraining:
    """The whole model, its optimizer and some batches.

    Attributes:
        parts: into how many the batch of a step is cut.
    """

    def __init__(self, config: Config, clock: Clock) -> None:
        self.parts = 1
        self._clock = clock
        self._max_parts = config.model_pipeline.microbatches
        self._max_grad_norm = config.diloco.max_grad_norm
        self._adam = config.diloco.inner_optim
        self._model = build_stage(load_family(config.model, config.data), 0, 1, seed=config.run.seed)
        self._optimizer = self._build_optimizer(fused=True)
        self._batches = _read(config)
        self._steps = 0

    def choose(self) -> int:
        """Try ways to handle a batch and to apply a step, and stay with the fastest; returns the number of parts."""
        self._warm_up()
        ways = sorted({1, self._max_parts // 2, self._max_parts} - {0})
        seconds = {parts: self._seconds_per_sample(parts) for parts in ways}
        self.parts = min(seconds, key=seconds.__getitem__)
        self._optimizer = min(
            (self._build_optimizer(fused=fused) for fused in (False, True)), key=self._seconds_per_update
        )
        return self.parts

    def train(self, num_steps: int) -> list[float]:
        """Train some steps, warmed up; return samples per second, and CPU seconds a sample of all threads."""
        self._warm_up()
        begun_cpu_s = cpu_s(os.getpid())
        step_s = self._seconds_per_step(num_steps)
        spent_s = cpu_s(os.getpid()) - begun_cpu_s
        num_samples = len(self._batches[0][1])
        return [num_samples / step_s, spent_s / num_steps / num_samples]

    def step(self) -> float:
        """Train one step; return its loss."""
        inputs, labels = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        self._optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for part, wanted in zip(inputs.chunk(self.parts), labels.chunk(self.parts), strict=True):
            total += self._differentiate(part, wanted, len(labels))
        if self._max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        self._optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        return total

    def _differentiate(self, part: Tensor, wanted: Tensor, batch: int) -> float:
        """Add the gradients of a part of a batch; return its share of the loss."""
        loss = self._model.loss(self._model(part), wanted) * (len(wanted) / batch)
        torch.autograd.backward(loss)
        return loss.item()

    def _warm_up(self) -> None:
        """Have code and parameters in the caches again; the next step forgets the gradients."""
        inputs, labels = self._batches[0]
        self._differentiate(inputs.chunk(self._max_parts)[0], labels.chunk(self._max_parts)[0], len(labels))

    def _seconds_per_sample(self, parts: int) -> float:
        """Forward and backward of a batch that is cut into so many parts."""
        inputs, labels = self._batches[0]
        cut = list(zip(inputs.chunk(parts), labels.chunk(parts), strict=True))
        tried = cut[: max(1, len(cut) // _TRIED_SHARE)]
        begun_s = self._clock.now_s()
        for part, wanted in tried:
            self._differentiate(part, wanted, len(labels))
        return (self._clock.now_s() - begun_s) / sum(len(wanted) for _, wanted in tried)

    def _seconds_per_step(self, num_steps: int) -> float:
        begun_s = self._clock.now_s()
        for _ in range(num_steps):
            self.step()
        return (self._clock.now_s() - begun_s) / num_steps

    def _seconds_per_update(self, optimizer: AdamW) -> float:
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        tried_s: list[float] = []
        for _ in range(_TRIED):
            begun_s = self._clock.now_s()
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            tried_s.append(self._clock.now_s() - begun_s)
        return min(tried_s)

    def _build_optimizer(self, *, fused: bool) -> AdamW:
        adam = self._adam
        return AdamW(
            self._model.parameters(),
            lr=adam.adam_lr,
            betas=(adam.adam_betas1, adam.adam_betas2),
            weight_decay=adam.adam_weight_decay,
            fused=fused,
            foreach=not fused,
        )


def _read(config: Config) -> list[tuple[Tensor, Tensor]]:
    """Return some batches of the data set that the configuration names."""
    source, size = open_source(config).train, config.diloco.batch_size_per_step
    starts = range(0, min(_BATCHES * size, source.num_samples - size + 1), size)
    batches = [source.read(np.arange(start, start + size, dtype=np.int64)) for start in starts]
    return [(torch.tensor(inputs), torch.tensor(labels)) for inputs, labels, _ in batches]
