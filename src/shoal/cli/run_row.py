"""The numbers of a run in words: what stands in the live row of its terminal. Pure: the time is an argument.

Nothing old looks fresh: what was measured in a step carries the age of that step, and the state says what is missing
and since when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

FRESH_S = 3.0
"""For so long a number is shown without its age."""
_QUIET_S, _QUIET_STEPS = 10.0, 5
"""Without a step for so long, or for as long as so many steps take, the state says so."""
_REPLICAS = "replicas/"

_Write = Callable[[float], str]


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
    """

    def __init__(self, num_rounds: int, started_s: float) -> None:
        self.is_stopping = self.is_outdated = False
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
        elapsed_s = int(now_s - self._started_s)
        current = self._values.get("round")
        cells = [
            Cell("time", f"{elapsed_s // 60}:{elapsed_s % 60:02d}"),
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
