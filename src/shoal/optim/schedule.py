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
    from shoal.config.diloco import DilocoConfig

ScheduleKind = Literal["constant", "linear", "cosine", "wsd"]
DecayForm = Literal["linear", "1-sqrt"]


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """Linear warm-up to `base_lr`, then constant, or a linear or cosine decay to `min_lr_ratio * base_lr`.

    With `wsd` (warm-up, stable, decay: arXiv 2405.18392) the rate stays at its peak until the last steps, in which it
    decays: a run may then be prolonged from before them.

    Attributes:
        kind: The shape after the warm-up.
        warmup_steps: Steps of the linear warm-up; step 0 has `base_lr / warmup_steps`, so no step is wasted on 0.
        total_steps: Steps of the whole run, including the warm-up. The decay ends at the last one, and later steps keep
            its value. `constant` does not use it.
        min_lr_ratio: The final rate as a share of `base_lr`.
        decay_fraction: The share of `total_steps` in which `wsd` decays, one step at least; it never begins before the
            warm-up has ended.
        decay_form: Of what the rate still is above the final one, with p from 0 to 1 over the decay of `wsd`: 1 - p or
            1 - sqrt(p).
    """

    kind: ScheduleKind
    base_lr: float
    warmup_steps: int = 0
    total_steps: int = 0
    min_lr_ratio: float = 0.0
    decay_fraction: float = 0.2
    decay_form: DecayForm = "1-sqrt"

    @classmethod
    def from_config(cls, diloco: DilocoConfig) -> LrSchedule:
        """The schedule that section `diloco` describes."""
        said = diloco.lr_schedule
        return cls(
            kind=said.type,
            base_lr=diloco.inner_optim.lr,
            warmup_steps=said.warmup_steps,
            total_steps=diloco.total_steps,
            min_lr_ratio=said.min_lr_ratio,
            decay_fraction=said.decay_fraction,
            decay_form=said.decay_form,
        )

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ConfigError(f"the warm-up has {self.warmup_steps} steps; give 0 or more")
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            raise ConfigError(f"min_lr_ratio is {self.min_lr_ratio}; give a share of the peak rate between 0 and 1")
        if not 0.0 < self.decay_fraction <= 1.0:
            raise ConfigError(f"decay_fraction is {self.decay_fraction}; give a share of the steps above 0, at most 1")
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
        remaining = self._remaining_late(step) if self.kind == "wsd" else self._remaining(step)
        return self.base_lr * (self.min_lr_ratio + (1.0 - self.min_lr_ratio) * remaining)

    def _remaining(self, step: int) -> float:
        """What there still is of the decay over all steps behind the warm-up, from 1 down to 0."""
        decay_steps = max(1, self.total_steps - 1 - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / decay_steps)
        return 1.0 - progress if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))

    def _remaining_late(self, step: int) -> float:
        """The same of a decay over the last steps alone, whose first one is below the peak."""
        wanted = max(1, round(self.decay_fraction * self.total_steps))
        decay_steps = max(1, min(wanted, self.total_steps - self.warmup_steps))
        done = step + 1 - (self.total_steps - decay_steps)
        progress = min(1.0, max(0.0, done / decay_steps))
        return 1.0 - (progress if self.decay_form == "linear" else math.sqrt(progress))
