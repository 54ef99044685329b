"""The learning rate of an inner step, as a pure function of the step's number. No torch.

The trainer computes it and sends the value with the commit, so that all stages of a step use the same number whatever
their machines' `cos` rounds to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shoal.errors import ConfigError

if TYPE_CHECKING:
    from shoal.config.training import DilocoConfig

ScheduleKind = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """Linear warm-up to `base_lr`, then constant, or a linear or cosine decay to `min_lr_ratio * base_lr`.

    Attributes:
        kind: The shape after the warm-up.
        base_lr: The peak learning rate.
        warmup_steps: Steps of the linear warm-up; step 0 has `base_lr / warmup_steps`, so no step is wasted on 0.
        total_steps: Steps of the whole run, including the warm-up. The decay ends at the last one, and later steps keep
            its value. `constant` does not use it.
        min_lr_ratio: The final rate as a share of `base_lr`.
    """

    kind: ScheduleKind
    base_lr: float
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.0

    @classmethod
    def from_config(cls, diloco: DilocoConfig) -> LrSchedule:
        """The schedule that section `diloco` describes."""
        kind = diloco.lr_schedule
        return cls(kind.type, diloco.inner_optim.lr, kind.warmup_steps, diloco.total_steps, kind.min_lr_ratio)

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"the warm-up has {self.warmup_steps} steps; give 0 or more")
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ConfigError(f"min_lr_ratio is {self.min_lr_ratio}; give a share of the peak rate between 0 and 1")
        if self.kind != "constant" and self.total_steps < 1:
            raise ConfigError(f"a {self.kind} schedule needs the number of steps of the run, got {self.total_steps}")

    def lr(self, step: int) -> float:
        """The learning rate of inner step `step`, counted from 0 over the whole run (not per round).

        Returns:
            The rate, in plain float arithmetic: equal arguments give equal bits on one machine.
        """
        if step < self.warmup_steps:
            return self.base_lr * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.base_lr
        decay_steps = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / decay_steps)
        remaining = 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.base_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * remaining)
