"""Notices that training has diverged: steps that are skipped again and again. Plain bookkeeping, no I/O.

A single step whose loss or gradient is not finite is skipped and counted, which is harmless. Parameters that have
become so large that every step is skipped do not come back by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.config.diloco import DilocoConfig
from shoal.errors import TrainingDiverged

MANY_IN_A_ROW = 10
"""After so many skipped steps the user is told."""
ALONE_IN_A_ROW = 20
"""After so many skipped steps of one slot while others train the user is told. A loss scale that begins anew is at its
least after seventeen."""
MAX_SKIPPED_ROUNDS = 3
"""After so many rounds of nothing but skipped steps the run fails; after fewer if it has no more."""


class Divergence:
    """Counts the skipped steps of one run."""

    def __init__(self, config: DilocoConfig) -> None:
        self._max_rounds = min(MAX_SKIPPED_ROUNDS, config.outer_steps)
        inner, outer = config.inner_optim, config.outer_optim
        self._lower = (
            f"lower diloco.inner_optim.{inner.type}_lr (now {inner.lr:g}) or diloco.outer_optim.sgd_lr "
            f"(now {outer.sgd_lr:g})"
        )
        self._steps_in_a_row = self._rounds_in_a_row = 0
        self._has_trained = False

    @property
    def _advice(self) -> str:
        if self._has_trained:
            return self._lower
        # No rate has been applied yet, at least by this client.
        return f"no step has given a number yet: look at the samples and at the model's loss first, else {self._lower}"

    def step(self, skipped: bool) -> str | None:
        """Count a step; returns what the user should be told, if anything."""
        self._has_trained |= not skipped
        self._steps_in_a_row = self._steps_in_a_row + 1 if skipped else 0
        if self._steps_in_a_row != MANY_IN_A_ROW:
            return None
        return f"{MANY_IN_A_ROW} steps in a row were skipped, because loss or gradient was not finite; {self._advice}"

    def round_over(self, num_trained: int, num_skipped: int) -> None:
        """Count a round's samples.

        Raises:
            TrainingDiverged: too many rounds in a row have only skipped.
        """
        if num_trained:
            self._rounds_in_a_row = 0
        elif num_skipped:
            self._rounds_in_a_row += 1
        if self._rounds_in_a_row >= self._max_rounds:
            raise TrainingDiverged(
                f"training has diverged: in {self._rounds_in_a_row} rounds in a row every step was skipped, because "
                f"loss or gradient was not finite; {self._advice} and start again"
            )


@dataclass
class _Skipping:
    """A slot whose last steps were all skipped, and how many of other slots were trained meanwhile."""

    skipped: int = 0
    trained: int = 0
    is_told: bool = False


class SkipsAlone:
    """Notices a slot whose steps are skipped while those of others are trained: a server of it computes what is no
    number, and its samples would be passed over for good, without a word."""

    def __init__(self) -> None:
        self._skipping: dict[int, _Skipping] = {}

    def step(self, slot: int, *, skipped: bool) -> bool:
        """Count a step; returns whether the user should be told of its slot."""
        if not skipped:
            self._skipping.pop(slot, None)
            for each in self._skipping.values():
                each.trained += 1
            return False
        own = self._skipping.setdefault(slot, _Skipping())
        own.skipped += 1
        is_due = not own.is_told and min(own.skipped, own.trained) >= ALONE_IN_A_ROW
        own.is_told |= is_due
        return is_due
