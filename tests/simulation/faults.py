"""What goes wrong in a run, when, and with whom: drawn from its seed, and over by `end_s`.

To add a fault: a method of `Network`, and an entry in `_KINDS` with its weight. A world says which processes there are
and what a crash does to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.simulation.network import Network


class Faults:
    """Faults of one run.

    Args:
        network: Where they happen.
        peers: The processes that may be hit.
        crash: Ends a process and has it started again later; the world knows what it forgets.
        end_s: When the last fault has healed.
        froze: Told of a process that is frozen and for how long.
    """

    def __init__(
        self,
        network: Network,
        peers: Callable[[], Sequence[str]],
        crash: Callable[[str], None],
        end_s: float,
        froze: Callable[[str, float], None] | None = None,
    ) -> None:
        self._network, self._peers, self._crash, self._end_s = network, peers, crash, end_s
        self._froze = froze
        self.num_faults = 0
        network.at(end_s, network.heal)

    def plan(self, at_most: int, begin_s: float = 0.2) -> None:
        """Have up to so many faults happen."""
        rng = self._network.rng
        for _ in range(rng.randint(0, at_most)):
            self._network.at(rng.uniform(begin_s, self._end_s - 1.0), self._fault)

    def _fault(self) -> None:
        network, rng = self._network, self._network.rng
        peers = [peer for peer in self._peers() if peer in network.hosts]
        if not peers:
            return
        self.num_faults += 1
        peer = rng.choice(peers)
        longest_s = self._end_s - network.now_s
        duration_s = min(rng.choice((0.0, rng.uniform(0.1, 1.0), rng.uniform(0.5, 6.0))), longest_s)
        kind = rng.random()
        if kind < 0.33:
            self._crash(peer)
        elif kind < 0.52:
            self.pause(peer, duration_s)
        elif kind < 0.74 and len(set(peers)) > 1:
            network.cut(peer, rng.choice([other for other in peers if other != peer]), duration_s)
        elif kind < 0.84:
            side = rng.sample(peers, rng.randint(1, max(1, len(peers) // 2)))
            network.part(side, duration_s, one_way=rng.random() < 0.5)
        elif kind < 0.9 and len(set(peers)) > 1:
            self._flap(peer, rng.choice([other for other in peers if other != peer]))
        elif kind < 0.96:
            network.slow(peer, rng.choice((3.0, 10.0, 40.0)), duration_s)
        else:
            network.step_wall_clock(peer, rng.choice((-3600.0, 3600.0)))

    def pause(self, peer: str, duration_s: float) -> None:
        """Freeze a process, if it is there."""
        if peer in self._network.hosts:
            self._network.pause(peer, duration_s)
            if self._froze is not None:
                self._froze(peer, duration_s)

    def _flap(self, one: str, other: str) -> None:
        """A link that is up and down, up and down: half a second each, or a new connection each time."""
        network, rng = self._network, self._network.rng
        fault = rng.choice((network.mute, network.cut))
        for number in range(rng.randint(2, 5)):
            at_s = network.now_s + number
            if at_s + 0.5 < self._end_s:
                network.at(at_s, fault, one, other, 0.5)
