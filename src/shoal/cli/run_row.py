"""The numbers of a run, and of a host of servers, in words: what stands in the live row of its terminal. Pure: the time
is an argument.

Nothing old looks fresh: what was measured in a step carries the age of that step, and the state says what is missing
and since when.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

FRESH_S = 3.0
"""For so long a number is shown without its age."""
_QUIET_S, _QUIET_STEPS = 10.0, 5
"""Without a step for so long, or for as long as so many steps take, the state says so."""
_REPLICAS = "replicas/"

_Write = Callable[[float], str]
_WINDOW_S = 10.0
"""The speed is that of so long a time."""
_GONE_S = 60.0
"""Who has been silent for so long is gone: the registry has forgotten it, and somebody else may have its place."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One column: its title, what stands in it ("-": nothing is known), and how old that is, if it is old."""

    title: str
    text: str
    age_s: float | None = None


def whole(value: float) -> str:
    """Return a number without decimals."""
    return f"{value:,.0f}"


def rate(value: float) -> str:
    """Return a number with one decimal."""
    return f"{value:,.1f}"


def _loss(value: float) -> str:
    return f"{value:.3f}"


def duration(seconds: float) -> str:
    """Return a time in its own unit: `35 s`, `4 min`, `3 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _elapsed(seconds: float) -> str:
    """Return a time as a clock has it: `0:35`, `59:02`, `26:03:07`."""
    minutes, rest_s = divmod(int(seconds), 60)
    return f"{minutes}:{rest_s:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest_s:02d}"


def name_stages(stages: Sequence[int]) -> str:
    """Return `stage 1`, or `stages 0 and 1`."""
    *most, last = map(str, stages)
    return f"stages {', '.join(most)} and {last}" if most else f"stage {last}"


# Title, the name of the number (see monitor.status.Status), how it is written.
_COLUMNS: tuple[tuple[str, str, _Write], ...] = (
    ("step", "step", whole),
    ("loss", "loss/train", _loss),
    ("eval loss", "loss/eval", _loss),
    ("baseline", "loss/baseline", _loss),
    ("load cv", "router/load_cv", _loss),
    ("samples/s", "samples_per_s", rate),
    ("pipelines", "pipelines", whole),
    ("peers", "alive_peers", whole),
)
_OF_SOME_RUNS = frozenset({"loss/baseline", "router/load_cv"})
_OF_A_STEP = frozenset({"step", "loss/train", "router/load_cv", "samples_per_s"})
"""Numbers that come with each step, and so are old when none comes. Others stand until something happens."""


class RunRow:
    """What is known of one run.

    Attributes:
        is_stopping: the run's processes are ending.
        is_outdated: no process gathers numbers for the moment.
        doing: what the first round waits for beside servers, in words.
    """

    def __init__(self, num_rounds: int, started_s: float) -> None:
        self.is_stopping = self.is_outdated = False
        self.doing = ""
        self._num_rounds = num_rounds
        self._started_s = started_s
        self._values: dict[str, float] = {}
        self._at_s: dict[str, float] = {}
        self._missing_since_s: dict[int, float] = {}

    def update(self, values: Mapping[str, float], at_s: Mapping[str, float], now_s: float) -> None:
        """Take over newer numbers, by name as in `monitor.status.Status`, and when each came; others stand."""
        self.is_outdated = False
        self._values |= values
        self._at_s |= at_s
        replicas = {name: number for name, number in self._values.items() if name.startswith(_REPLICAS)}
        missing = sorted(int(name.removeprefix(_REPLICAS)) for name, number in replicas.items() if not number)
        self._missing_since_s = {stage: self._missing_since_s.get(stage, now_s) for stage in missing}

    def cells(self, now_s: float) -> list[Cell]:
        """Return all columns."""
        current = self._values.get("round")
        cells = [
            Cell("time", _elapsed(now_s - self._started_s)),
            Cell("round", "-" if current is None else f"{min(int(current), self._num_rounds)}/{self._num_rounds}"),
        ]
        for title, name, write in _COLUMNS:
            value = self._values.get(name)
            if value is None and name in _OF_SOME_RUNS:
                continue
            cells.append(Cell(title, "-" if value is None else write(value), self._age_s(name, now_s)))
        return cells

    def state(self, now_s: float) -> str:
        """Return what the run does now, in words."""
        if self.is_stopping:
            return "stopping"
        doing = self._doing(now_s)
        if self._values.get("paused"):
            return f"paused; {doing}" if self._missing_since_s else "paused"
        return doing

    def _doing(self, now_s: float) -> str:
        """Return what the run does unless a user wants something else of it."""
        if self.doing:
            return f"starting: {self.doing}"
        if self._missing_since_s:
            stages = sorted(self._missing_since_s)
            since_s = min(self._missing_since_s.values())
            have = "has" if len(stages) == 1 else "have"
            none = f"{name_stages(stages)} {have} no server"
            if "step" not in self._values:
                return f"starting: {none} yet"
            return f"stopped: {none} for {duration(now_s - since_s)}"
        if self.is_outdated:
            return "these numbers are old, the monitor is started again"
        if "step" not in self._values:
            return "starting"
        quiet_s = now_s - self._at_s.get("step", now_s)
        if quiet_s >= max(_QUIET_S, _QUIET_STEPS * self._values.get("step_s", 0.0)):
            return f"no step for {duration(quiet_s)}"
        return "training"

    def _age_s(self, name: str, now_s: float) -> float | None:
        """Return how old a number is, if that has to be said."""
        age_s = now_s - self._at_s.get(name, now_s)
        return age_s if name in _OF_A_STEP and age_s >= FRESH_S else None


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

    def update(self, index: int, numbers: Mapping[str, float], now_s: float) -> float | None:
        """Take over what a server says of its work, by name as in `server.work_report`.

        Returns why its disk fails (`file_thread.remedy_of`; 0: it does not) if whether it does is new; else None.
        """
        server = self._servers.setdefault(index, _ServerActivity({**numbers, "disk_failing": 0.0}))
        has_failed, fails = server.numbers["disk_failing"], numbers["disk_failing"]
        server.numbers = numbers
        if not server.samples or server.samples[-1][1] != numbers["samples"]:
            server.samples.append((now_s, numbers["samples"]))
        while len(server.samples) > 2 and server.samples[0][0] < now_s - _WINDOW_S:
            server.samples.popleft()
        return fails if bool(fails) != bool(has_failed) else None

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
        every = [server.numbers for server in self._servers.values()]
        current = max((numbers["round"] for numbers in every), default=0.0)
        shares = [numbers["share"] for numbers in every if "share" in numbers]
        of_run = [numbers["run_samples_per_s"] for numbers in every if "run_samples_per_s" in numbers]
        grown_s = max((server.samples[-1][0] for server in self._servers.values()), default=now_s)
        age_s = now_s - grown_s if now_s - grown_s >= FRESH_S else None
        steps = sum(numbers["steps"] for numbers in every)
        speed = sum(server.samples_per_s() for server in self._servers.values())
        return [
            Cell("time", _elapsed(now_s - self._started_s)),
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
