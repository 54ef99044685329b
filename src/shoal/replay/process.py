"""One of several processes of a replay: `python -m shoal.replay.process`, a child (`runtime.child`).

It reads the run's files itself, goes through all actions and carries out what is its own. It says what it finds, and
judges nothing.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shoal.errors import ConnectionLost, Contradiction
from shoal.replay.engine import Engine
from shoal.replay.links import Crew, ProcessLink
from shoal.replay.order import Average, Compute
from shoal.replay.own_code import require_named
from shoal.replay.plan import plan_of
from shoal.replay.processes import Found, Reached, ReplayStart, Report, StepDone
from shoal.replay.run_files import read_run
from shoal.replay.samples import Samples
from shoal.runtime.child import Parent
from shoal.runtime.process_control import set_process_title


def main() -> None:
    """Compute until nothing is left."""
    # Who has lost the link to another process is not the one that failed.
    with Parent(ReplayStart) as replay, suppress(ConnectionLost):
        start = next(replay.orders)
        set_process_title("replay", start.process)
        _compute(start, replay.say)


def _compute(start: ReplayStart, say: Callable[[Report], None]) -> None:
    files = read_run(Path(start.directory))
    # The folder may have changed since the replay has read it.
    require_named(files, start.named)
    plan = plan_of(files)
    links = {process: ProcessLink(socket.socket(fileno=fd), process) for process, fd in start.link_fds.items()}
    crew = Crew(start.homes, start.process, links)
    samples = Samples(files.config, marks=files.records[-1][0].marks)
    engine = Engine(files.config, samples, plan.generations, crew, files.beginning)
    # That the logs contradict each other is found by the replay itself, at the same place.
    with suppress(Contradiction):
        for number, action in enumerate(plan.order()):
            for difference in engine.act(action):
                say(Found(number, difference))
            match action:
                case Compute() if crew.is_mine(action.generations[0].number):
                    say(StepDone(action.round))
                case Average(record):
                    say(Reached(record.round))
                case _:
                    pass
    say(Reached(None))


if __name__ == "__main__":
    main()
