"""Seeds of a world that one process runs; a module of its own, since a spawned process cannot import `__main__`."""

from __future__ import annotations

import signal
import time
import traceback
from typing import NamedTuple

from tests.simulation.catalogue import FAILURES, WORLDS
from tests.simulation.safety import Broken

from shoal_lab.parents_death import end_with_parent


class Part(NamedTuple):
    """Seeds of one world that one process runs."""

    world: str
    first: int
    stop: int


class Outcome(NamedTuple):
    """What has become of them, and the seconds that they took of a core."""

    part: Part
    violations: tuple[tuple[int, str], ...]
    cpu_s: float


def violation(world: str, seed: int) -> str | None:
    """Run one seed; returns what was violated. An error of a machine is a violation, too."""
    try:
        WORLDS[world].make(seed).run()
    except Broken as error:
        return str(error)
    except FAILURES as error:
        return "".join(traceback.format_exception_only(error)).strip()
    return None


def end_with_runner() -> None:
    """Have this process end when the one that hands out parts is killed."""
    end_with_parent(signal.SIGKILL)()


def run_part(part: Part) -> Outcome:
    """Run seeds, in a process of its own."""
    begun_s = time.process_time()
    found = [(seed, what) for seed in range(part.first, part.stop) if (what := violation(part.world, seed))]
    return Outcome(part, tuple(found), time.process_time() - begun_s)
