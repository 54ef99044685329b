"""The live row of a host of servers: what its servers do, and who of the swarm is silent. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.cli.run_row import FRESH_S, Cell, duration, name_stages, rate, whole

_WINDOW_S = 10.0
"""The speed is that of so long a time."""
_GONE_S = 60.0
"""Who has been silent for so long is gone: the registry has forgotten it, and somebody else may have its place."""


@dataclass
class _ServerActivity:
    """What one server said last, and its samples at the times at which they grew."""

    numbers: Mapping[str, float]
    samples: deque[tuple[float, float]] = field(default_factory=deque[tuple[float, float]])

    def samples_per_s(self) -> float:
        (first_s, first), (last_s, last) = self.samples[0], self.samples[-1]
        return max(0.0, last - first) / (last_s - first_s) if last_s > first_s else 0.0


class ServersRow:
    """What is known of the servers of this host."""

    def __init__(self, num_rounds: int, started_s: float) -> None:
        self._num_rounds = num_rounds
        self._started_s = started_s
        self._servers: dict[int, _ServerActivity] = {}
        self._silent_since_s: dict[str, tuple[str, float]] = {}

    def update(self, index: int, numbers: Mapping[str, float], now_s: float) -> bool | None:
        """Take over what a server says of its work, by name as in `server.work_report`.

        Returns whether its disk fails, if that is new; else None.
        """
        server = self._servers.setdefault(index, _ServerActivity({**numbers, "disk_failing": 0.0}))
        has_failed, fails = server.numbers["disk_failing"], numbers["disk_failing"]
        server.numbers = numbers
        if not server.samples or server.samples[-1][1] != numbers["samples"]:
            server.samples.append((now_s, numbers["samples"]))
        while len(server.samples) > 2 and server.samples[0][0] < now_s - _WINDOW_S:
            server.samples.popleft()
        return bool(fails) if fails != has_failed else None

    def gone(self, index: int) -> None:
        """A server has ended."""
        self._servers.pop(index, None)

    def silent(self, peer: str, name: str, since_s: float) -> bool:
        """A peer of the swarm says nothing any more. Returns whether that is new: each server hears it for itself."""
        is_new = peer not in self._silent_since_s
        self._silent_since_s.setdefault(peer, (name, since_s))
        return is_new

    def heard(self, peer: str) -> float | None:
        """A silent peer is heard again. Returns since when it was silent, or None if that was not known."""
        _, since_s = self._silent_since_s.pop(peer, ("", None))
        return since_s

    def cells(self, now_s: float) -> list[Cell]:
        """Return all columns."""
        elapsed_s = int(now_s - self._started_s)
        every = [server.numbers for server in self._servers.values()]
        current = max((numbers["round"] for numbers in every), default=0.0)
        shares = [numbers["share"] for numbers in every if "share" in numbers]
        of_run = [numbers["run_samples_per_s"] for numbers in every if "run_samples_per_s" in numbers]
        grown_s = max((server.samples[-1][0] for server in self._servers.values()), default=now_s)
        age_s = now_s - grown_s if now_s - grown_s >= FRESH_S else None
        steps = sum(numbers["steps"] for numbers in every)
        speed = sum(server.samples_per_s() for server in self._servers.values())
        return [
            Cell("time", f"{elapsed_s // 60}:{elapsed_s % 60:02d}"),
            Cell("round", f"{min(int(current), self._num_rounds)}/{self._num_rounds}" if current else "-"),
            Cell("steps here", whole(steps) if every else "-", age_s),
            Cell("samples/s here", rate(speed) if every else "-", age_s),
            Cell("share", f"{100 * sum(shares) / len(shares):.0f} %" if shares else "-"),
            Cell("run samples/s", rate(max(of_run)) if of_run else "-"),
            Cell("peers", whole(max(numbers["alive_peers"] for numbers in every)) if every else "-"),
        ]

    def state(self, now_s: float) -> str:
        """Return what goes on, in words."""
        if not self._servers:
            return "starting"
        stages = sorted({int(server.numbers["stage"]) for server in self._servers.values()})
        silent = [
            f"{name} is silent for {duration(now_s - since_s)}"
            for name, since_s in self._silent_since_s.values()
            if now_s - since_s < _GONE_S
        ]
        return "; ".join((f"serving {name_stages(stages)}", *silent))
