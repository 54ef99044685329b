"""How much a loss in float16 is scaled up, so that its small gradients do not become zero: dynamic loss scaling.

    S * loss  ->  backward  ->  S * gradients  ->  finite: divide by S, apply        not: skip the step, halve S

Micikevicius et al. 2018 (arXiv:1710.03740), section 3.2; the numbers are those of torch's `GradScaler`. S is a power of
two, so that scaling and dividing round nothing.
"""

from __future__ import annotations

from typing import Final

from shoal.swarm.step_operations import LARGEST_LOSS_SCALE

_FIRST: Final = 2.0**16
_SMALLEST: Final = 1.0
_STEPS_TO_DOUBLE: Final = 2000


class LossScale:
    """The scale of one trainer's steps.

    Attributes:
        value: For the next step, with all its attempts.
    """

    def __init__(self, *, is_needed: bool) -> None:
        """Begins with 65,536.

        Args:
            is_needed: Whether stages compute in float16; otherwise it is 1 for ever.
        """
        self._is_needed = is_needed
        self._num_finite = 0
        self.value = _FIRST if is_needed else 1.0

    def ended(self, *, skipped: bool) -> None:
        """A step is committed; `skipped`: without effect, because something of it was not finite."""
        if not self._is_needed:
            return
        self._num_finite = 0 if skipped else self._num_finite + 1
        if skipped:
            self.value = max(_SMALLEST, self.value / 2)
        elif self._num_finite == _STEPS_TO_DOUBLE:
            self._num_finite = 0
            self.value = min(LARGEST_LOSS_SCALE, self.value * 2)
