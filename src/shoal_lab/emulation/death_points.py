"""A process that kills itself where it was told to: a fault at (process, step, point) instead of at a moment.

Each death happens once in a run, however often its process is started again: a file in the run's folder says that it
has happened. It is a kill -9 to itself, with the event `emulation.death` as the last line of its log.

    server        forward, backward, commit: the device has been given such an operation of the step
                  prepared: all replicas have prepared the step, and its Commit is here and not applied
                  ring: the first part of another member's sum is here; number is the round from here on
                  staged: it has staged the outer step and is asked to prepare the record
                  record: it has prepared the record, and learns that it is committed
                  swapped: the record's state is what it trains on
                  fetch: a newcomer has the first chunk of its state; donate: it is asked for one; number is the
                  round of the last record that it knows
    trainer       forward: the first replica has opened the step; prepared: the first one has prepared it, none has
                  been told to commit; commit: the first one has committed it
    data_server   lease: a trainer wants a batch of the round
    client        prepared: the first member has prepared the record of the round, none was told that it is committed
    mirror        of the checkpoint of a round: file: a part of its first file is written; sync: all of that file, not
                  forced to the disk; manifest: all files but this one are on the disk; rename: this one too; renamed:
                  it is in its place, and so are older ones; removal: an older one has lost its name, not its files
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.config.emulation import Death
from shoal.events.base import emit
from shoal.events.processes import EmulatedDeath

logger = logging.getLogger(__name__)


def kill_myself() -> None:
    """End this process as kill -9 from outside would."""
    os.kill(os.getpid(), signal.SIGKILL)


class DeathPoints:
    """The deaths of one process that have not happened yet."""

    def __init__(self, deaths: Sequence[Death], directory: Path, die: Callable[[], None] = kill_myself) -> None:
        """Look which of the deaths have happened.

        Args:
            directory: of the run; holds the marks of the deaths that have happened.
        """
        self._directory = directory
        self._left = [death for death in deaths if not self._mark(death).exists()]
        self._die = die

    def __bool__(self) -> bool:
        return bool(self._left)

    def reached(self, point: str, number: int) -> None:
        """The process is at a point in this step or round; it dies here if it was to do so in this one or before."""
        for death in [each for each in self._left if each.point == point and each.number <= number]:
            self._left.remove(death)
            try:
                self._mark(death).touch(exist_ok=False)
            except FileExistsError:
                continue  # it was another process's
            emit(logger, EmulatedDeath(point, death.number, number))
            self._die()

    def _mark(self, death: Death) -> Path:
        processes = "-".join(map(str, death.processes))
        return self._directory / f"{death.role}_{processes}.{death.point}.{death.number}.died"
