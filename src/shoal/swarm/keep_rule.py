"""Of which records checkpoints are wanted. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from shoal.config.schema import Config


@dataclass
class KeepRule:
    """One of so many rounds, one of so many seconds, the first one of each start, the last one, and what was asked for.

    Attributes:
        every_rounds: one of each so many rounds, those that are multiples of it; 0: by time alone.
        every_s: besides, when the last one is so old; infinite: by rounds alone.
        last_round: of the run; it is always wanted.
        is_asked: somebody wants one of the next record.
    """

    every_rounds: int
    every_s: float
    last_round: int
    is_asked: bool = False
    _last: tuple[int, float] | None = None

    @classmethod
    def of(cls, config: Config, times: int = 1) -> Self:
        """As a user has configured it, with distances so many times as long."""
        given = config.param_mirror
        every_s = math.inf if given.every_s is None else given.every_s
        return cls(times * given.every_rounds, times * every_s, config.diloco.outer_steps)

    def is_due(self, round: int, now_s: float) -> bool:
        """Whether one is wanted of a record, which is newer than the last one of which one was, or of another chain."""
        if self.is_asked or self._last is None or round == self.last_round:
            return True
        last_round, last_s = self._last
        is_next = bool(self.every_rounds) and round // self.every_rounds != last_round // self.every_rounds
        return is_next or now_s - last_s >= self.every_s

    def begun(self, round: int, now_s: float) -> None:
        """One of this record is on its way."""
        self._last, self.is_asked = (round, now_s), False
