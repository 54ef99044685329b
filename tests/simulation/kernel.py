"""Virtual time: one queue of calls in the order of their times, and one source of randomness.

An entry is a tuple (time, number, call, arguments): nothing is allocated for a message but that, and calls at one time
come in the order in which they were asked for. So a seed is the same run each time.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from math import log

from tests.simulation.safety import Broken

MAX_EVENTS = 300_000
"""Of one run. What needs more is a storm of messages: two machines that answer each other for ever."""


class Kernel:
    """The clock and the queue of one run.

    Attributes:
        rng: Decides everything that is random in the run.
        now_s: Virtual time; what machines are given as monotonic time.
        num_events: Entries that were made so far.
    """

    def __init__(self, seed: int | str) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.num_events = 0
        self._random = self.rng.random
        self._queue: list[tuple[float, int, Callable[..., object], tuple[object, ...]]] = []

    def at(self, at_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Call at a time, or now if it has passed."""
        self.num_events += 1
        heapq.heappush(self._queue, (at_s, self.num_events, call, arguments))

    def after(self, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Call after a while."""
        self.num_events += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self.num_events, call, arguments))

    def exponential(self, mean_s: float) -> float:
        """A random time with this mean; faster than `random.expovariate`, which this is."""
        return -log(1.0 - self._random()) * mean_s

    def run(self, end_s: float, is_over: Callable[[], bool] | None = None) -> None:
        """Run until a time, or until `is_over` (asked after every event).

        Raises:
            Broken: There was no end to events.
        """
        queue, pop = self._queue, heapq.heappop
        while queue and queue[0][0] <= end_s:
            at_s, _, call, arguments = pop(queue)
            if at_s > self.now_s:
                self.now_s = at_s
            call(*arguments)
            if is_over is not None and is_over():
                return
            if self.num_events > MAX_EVENTS:
                raise Broken("a storm of messages")
        if end_s > self.now_s:
            self.now_s = end_s
