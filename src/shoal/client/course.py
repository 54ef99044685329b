"""The course of a run for who looks at it: its newest events, its losses, and how long it still takes. Plain
bookkeeping, no I/O; it begins anew with each start of a client.

event --take--> Course --> `shoal status`
"""

from __future__ import annotations

import logging
import math
from collections import deque
from statistics import median

from shoal.clock import Clock
from shoal.events.base import Event, level_name
from shoal.events.incidents import IncidentOpened
from shoal.events.run import RoundBegun, RoundRecorded, StepReported
from shoal.wire.messages.control import MAX_CURVE, MAX_SAYS_CHARS, MAX_TOLD_EVENTS, ToldEvent

_ROUTINE = 16
"""Of what the numbers show anyway so much is told."""
_TYPICAL_ROUNDS = 8
"""How long a round takes is the median of so many: one of them may have been paused."""


class LossCurve:
    """A loss from the first step to the last, by a bounded number of means of equally many steps each."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._open: list[float] = []
        self._steps_each = 1

    def add(self, loss: float) -> None:
        """Take the loss of the next step, unless it is not finite."""
        if not math.isfinite(loss):
            return
        self._open.append(loss)
        if len(self._open) < self._steps_each:
            return
        self._means.append(sum(self._open) / len(self._open))
        self._open = []
        if len(self._means) == MAX_CURVE:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(one + other) / 2 for one, other in pairs]
            self._steps_each *= 2

    @property
    def values(self) -> tuple[float, ...]:
        """The means in order; the last one may be of fewer steps."""
        last = [sum(self._open) / len(self._open)] if self._open else []
        return (*self._means, *last)


class Course:
    """What has happened since this client was started.

    Attributes:
        losses: of training, in nats.
    """

    def __init__(self, clock: Clock) -> None:
        self.losses = LossCurve()
        self._clock = clock
        self._events = deque[ToldEvent](maxlen=MAX_TOLD_EVENTS - _ROUTINE)
        self._routine = deque[ToldEvent](maxlen=_ROUTINE)
        self._number = 0
        self._round_s = deque[float](maxlen=_TYPICAL_ROUNDS)
        self._begun_s: float | None = None
        self._recorded: int | None = None

    def take(self, event: Event, said: str) -> None:
        """Something has happened.

        Args:
            said: what people are told of it at once; empty: nothing.
        """
        match event:
            case StepReported(skipped=False):
                self.losses.add(event.loss)
            case RoundBegun():
                self._begun_s = self._clock.now_s()
            case RoundRecorded():
                # What is left are whole rounds, until the next one begins.
                self._recorded, self._begun_s = event.round, self._clock.now_s()
                if event.duration_s is not None:
                    self._round_s.append(event.duration_s)
            case _:
                pass
        if isinstance(event, IncidentOpened):
            said = event.what  # also where another one shows it on the client's own screen
        routine = not said
        said = said or event.brief_said()
        if said and event.level > logging.DEBUG:
            # Also the events of the client's next start have greater numbers.
            self._number = max(self._number + 1, int(self._clock.unix_s() * 1e6))
            told = ToldEvent(self._number, level_name(event.level), event.name, said[:MAX_SAYS_CHARS], routine)
            (self._routine if routine else self._events).append(told)

    def events(self, since: int) -> tuple[ToldEvent, ...]:
        """Return the events after the one of this number, in order; old ones may be forgotten, first the routine."""
        known = (*self._events, *self._routine)
        return tuple(sorted((event for event in known if event.number > since), key=lambda event: event.number))

    def left_s(self, round: int, num_rounds: int) -> float | None:
        """Estimate how long the run still takes.

        Returns:
            None before the record of a round.
        """
        if not self._round_s or self._begun_s is None:
            return None
        typical_s = median(self._round_s)
        rounds = num_rounds - (round - 1 if self._recorded is None else self._recorded)
        age_s = min(typical_s, self._clock.now_s() - self._begun_s)
        return max(0.0, rounds * typical_s - age_s)
