"""A seeded network with the promises of `transport.base`.

One loss per connection and end; of one sender, tensors in order and behind the control messages before them, which
themselves are in order and may overtake tensors.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Protocol

from shoal.wire.limits import TENSORS_OF

DEADLINE_S = 2.0
"""A process that is silent for longer loses its connections."""


class Host(Protocol):
    """A process."""

    def deliver(self, sender: str, message: object) -> None: ...

    def lost(self, peer: str) -> None: ...


class Network:
    """Time, connections between processes, and what goes wrong with both."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.hosts: dict[str, Host] = {}
        self.trace: list[tuple[float, str, str, object]] = []
        self._boots: dict[str, int] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._links: dict[frozenset[str], int] = {}
        self._losing: set[tuple[str, str]] = set()
        self._blocked_until_s: dict[frozenset[str], float] = {}
        self._paused_until_s: dict[str, float] = {}
        self._last_s: dict[tuple[str, str, bool], float] = {}
        # In some runs messages arrive a second time, later; in some, a few are slow and hold up what follows them.
        self._repeats = self.rng.random() < 0.3
        self._slowest_s = self.rng.choice([0.0, 0.0, 0.3, 1.0])

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, call))

    def on_host(self, peer: str, delay_s: float, call: Callable[[], None]) -> None:
        """Call within the process that `peer` is now, once it is awake; never after its crash."""
        boot = self._boots[peer]

        def run() -> None:
            if peer not in self.hosts or self._boots[peer] != boot:
                return
            wait_s = self._paused_until_s.get(peer, 0.0) - self.now_s
            if wait_s > 0:
                self.after(wait_s + 1e-6, run)
            else:
                call()

        self.after(delay_s, run)

    def run(self, end_s: float, is_over: Callable[[], bool]) -> None:
        while self._queue and self._queue[0][0] <= end_s and not is_over():
            self.now_s, _, call = heapq.heappop(self._queue)
            call()
            assert self._count < 200_000, "a storm of messages"

    def send(self, sender: str, receiver: str, message: object) -> None:
        pair = frozenset((sender, receiver))
        if (sender, receiver) in self._losing:
            return
        if pair not in self._links:
            if receiver not in self.hosts or self._blocked_until_s.get(pair, 0.0) > self.now_s:
                self._lose(sender, receiver)
                return
            self._count += 1
            self._links[pair] = self._count
        link = self._links[pair]

        def arrive() -> None:
            if self._links.get(pair) == link:
                self.trace.append((self.now_s, sender, receiver, message))
                self.hosts[receiver].deliver(sender, message)

        delay_s = self.rng.expovariate(40) + (self._slowest_s if self.rng.random() < 0.03 else 0.0)
        is_bulk = type(message) in TENSORS_OF
        last_s = [self._last_s.get((sender, receiver, kind), 0.0) for kind in {False, is_bulk}]
        at_s = max(self.now_s + delay_s, max(last_s) + 1e-6)
        self._last_s[sender, receiver, is_bulk] = at_s
        self.on_host(receiver, at_s - self.now_s, arrive)
        if self._repeats and self.rng.random() < 0.05:
            self.on_host(receiver, at_s - self.now_s + self.rng.expovariate(3), arrive)

    def is_linked(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._links

    def start(self, peer: str, host: Host) -> None:
        self._boots[peer] = self._boots.get(peer, 0) + 1
        self.hosts[peer] = host

    def cut(self, one: str, other: str, duration_s: float) -> None:
        pair = frozenset((one, other))
        self.trace.append((self.now_s, one, "CUT", other))
        self._blocked_until_s[pair] = self.now_s + duration_s
        if self._links.pop(pair, None) is not None:
            self._lose(one, other)
            self._lose(other, one)

    def crash(self, peer: str) -> None:
        self.trace.append((self.now_s, peer, "CRASH", None))
        del self.hosts[peer]
        self._losing = {(here, there) for here, there in self._losing if here != peer}
        self._cut_all(peer)

    def pause(self, peer: str, duration_s: float) -> None:
        self.trace.append((self.now_s, peer, "PAUSE", duration_s))
        self._paused_until_s[peer] = self.now_s + duration_s
        boot = self._boots[peer]
        if duration_s > DEADLINE_S:
            self.after(DEADLINE_S, lambda: self._cut_all(peer) if self._boots[peer] == boot else None)

    def _cut_all(self, peer: str) -> None:
        for pair in [pair for pair in self._links if peer in pair]:
            (other,) = pair - {peer}
            del self._links[pair]
            self._lose(peer, other)
            self._lose(other, peer)

    def _lose(self, here: str, there: str) -> None:
        if here not in self.hosts:
            return
        self._losing.add((here, there))

        def tell() -> None:
            self._losing.discard((here, there))
            self.hosts[here].lost(there)

        self.on_host(here, self.rng.uniform(0.001, 0.05), tell)
