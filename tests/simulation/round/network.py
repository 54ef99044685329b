"""A seeded network of processes in one thread: delays, duplicates, cut connections, pauses, crashes.

In the runs that keep an order it is that of `transport.base`: control messages may overtake tensors, which are the
contributions to rings here (tuples), and nothing else overtakes.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Protocol


class Host(Protocol):
    """A process on the network."""

    def deliver(self, sender: str, message: object) -> None: ...

    def lost(self, peer: str) -> None: ...


class Network:
    """Connections are made on demand; everybody hears of the end of his own ones, a little later."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.hosts: dict[str, Host] = {}
        self.boots: dict[str, int] = {}
        self.trace: list[tuple[float, str, str, object]] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._links: dict[frozenset[str], int] = {}  # connection number of each connected pair
        self._links_made = 0
        self._blocked_until_s: dict[frozenset[str], float] = {}
        self._paused_until_s: dict[str, float] = {}
        self._outages: list[tuple[frozenset[str], float, float]] = []  # of a pair, or of one process
        self._started_s: dict[str, float] = {}
        self._last_s: dict[tuple[str, str, bool], float] = {}
        self._in_order = self.rng.random() < 0.6

    # -- time

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now_s + delay_s, self._count, call))

    def on_host(self, peer: str, delay_s: float, call: Callable[[], None]) -> None:
        """Call in the process that `peer` is now, when it is not paused; never after it has crashed."""
        boot = self.boots[peer]

        def run() -> None:
            if self.boots[peer] != boot or peer not in self.hosts:
                return
            wait_s = self._paused_until_s.get(peer, 0.0) - self.now_s
            if wait_s > 0:
                self.after(wait_s + 1e-6, run)
            else:
                call()

        self.after(delay_s, run)

    def run_until(self, end_s: float, after_each: Callable[[], None]) -> None:
        while self._queue and self._queue[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(self._queue)
            call()
            after_each()
            if self._count > 150_000:
                raise AssertionError("a storm of messages")
        self.now_s = end_s

    # -- messages

    def send(self, sender: str, receiver: str, message: object) -> None:
        if receiver == sender:
            self.on_host(sender, 1e-3, lambda: self.hosts[sender].deliver(sender, message))
            return
        pair = frozenset((sender, receiver))
        if pair not in self._links:
            if receiver not in self.hosts or self._blocked_until_s.get(pair, 0.0) > self.now_s:
                self.on_host(sender, 0.01, lambda: self.hosts[sender].lost(receiver))
                return
            self._links_made += 1
            self._links[pair] = self._links_made
        link = self._links[pair]
        copies = 1 if self._in_order or self.rng.random() > 0.06 else 2
        for copy in range(copies):
            at_s = self.now_s + self.rng.expovariate(25) + copy * self.rng.expovariate(3)
            if self._in_order:
                is_bulk = isinstance(message, tuple)
                last_s = [self._last_s.get((sender, receiver, kind), 0.0) for kind in {False, is_bulk}]
                at_s = max(at_s, max(last_s) + 1e-6)
                self._last_s[sender, receiver, is_bulk] = at_s

            def arrive() -> None:
                if self._links.get(pair) == link:
                    self.trace.append((self.now_s, sender, receiver, message))
                    self.hosts[receiver].deliver(sender, message)

            self.on_host(receiver, at_s - self.now_s, arrive)

    # -- faults

    def start(self, peer: str, host: Host) -> None:
        self.boots[peer] = self.boots.get(peer, 0) + 1
        self.hosts[peer] = host
        self._started_s[peer] = self.now_s

    def cut(self, first: str, second: str, duration_s: float = 0.0) -> None:
        pair = frozenset((first, second))
        self._blocked_until_s[pair] = self.now_s + duration_s
        self._outages.append((pair, self.now_s, self.now_s + duration_s))
        if self._links.pop(pair, None) is None:
            return
        for here, there in ((first, second), (second, first)):
            if here in self.hosts:
                self.on_host(here, self.rng.uniform(0, 0.05), lambda h=here, t=there: self.hosts[h].lost(t))

    def crash(self, peer: str) -> None:
        del self.hosts[peer]
        self.trace.append((self.now_s, peer, "CRASH", None))
        self._cut_all(peer)

    def pause(self, peer: str, duration_s: float) -> None:
        """Freeze a process; whoever waits longer than its heartbeats allow closes the connection."""
        self._paused_until_s[peer] = self.now_s + duration_s
        self._outages.append((frozenset((peer,)), self.now_s, self.now_s + duration_s))
        self.trace.append((self.now_s, peer, "PAUSE", duration_s))
        boot = self.boots[peer]
        if duration_s > 2.0:
            self.after(2.0, lambda: self._cut_all(peer) if self.boots[peer] == boot else None)

    def awake(self, peer: str) -> bool:
        return peer in self.hosts and self._paused_until_s.get(peer, 0.0) <= self.now_s

    def blocked(self, first: str, second: str) -> bool:
        return self._blocked_until_s.get(frozenset((first, second)), 0.0) > self.now_s

    def reachable(self, first: str, second: str, since_s: float, until_s: float) -> bool:
        """Whether two processes could talk to each other for a whole interval."""
        concerned = {frozenset((first,)), frozenset((second,)), frozenset((first, second))}
        is_there = all(self._started_s.get(peer, until_s) <= since_s and peer in self.hosts for peer in (first, second))
        return is_there and not any(
            who in concerned and begun_s < until_s and ended_s > since_s for who, begun_s, ended_s in self._outages
        )

    def _cut_all(self, peer: str) -> None:
        for pair in [pair for pair in self._links if peer in pair]:
            (other,) = pair - {peer}
            self.cut(peer, other)
