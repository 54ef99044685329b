"""What of a run is computed again, as its files say: the same in every process of a replay."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from shoal.errors import Contradiction
from shoal.replay.claims import whole_chain
from shoal.replay.lives import Life, Members, members_of
from shoal.replay.order import Compute, ReplayOrder
from shoal.replay.run_files import RunFiles
from shoal.replay.sharing import share_lives
from shoal.replay.sides import later_records, needed_of, side_of
from shoal.replay.verdict import Difference
from shoal.wire.messages.round import Record, SignedRecord


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The rounds that can be computed.

    Attributes:
        chain: records from the first one on, as long as each names the one before.
        broken: why there are no more.
        members: of each record.
        lives: all of the run, each up to the last of these rounds.
        strays: replicas that came from another chain of records without having begun anew.
    """

    chain: list[tuple[Record, SignedRecord]]
    broken: list[Difference]
    members: list[Members]
    lives: tuple[Life, ...]
    strays: tuple[Difference, ...]

    def order(self) -> ReplayOrder:
        """Return the actions anew, to iterate over once."""
        return ReplayOrder([record for record, _ in self.chain], self.lives, self.members)

    def homes(self, num_processes: int, steps_per_process: int) -> list[int]:
        """Return the process of each life; 0 for all where one process is enough.

        Args:
            num_processes: the most to use; fewer are used where lives compute with several threads.
            steps_per_process: another process is only started for this many steps.
        """
        steps: Counter[tuple[int, ...]] = Counter()
        # Up to where the logs contradict each other.
        with suppress(Contradiction):
            for action in self.order():
                if isinstance(action, Compute):
                    steps[tuple(life.number for life in action.lives)] += 1
        most = min(num_processes // max((life.place.num_threads for life in self.lives), default=1), len(self.lives))
        most = min(most, steps.total() // steps_per_process)
        # Kernels of one GPU gain nothing from it, and take the memory of several processes.
        if most < 2 or any(life.place.device != "cpu" for life in self.lives):
            return [0] * len(self.lives)
        return share_lives(steps, len(self.lives), most)


def plan_of(files: RunFiles) -> ReplayPlan:
    """Return what can be computed of a run."""
    chain, broken = whole_chain(files)
    side = side_of(chain, files.lives)
    members = [members_of(record, side.lives, files.logs.get(record.round, {})) for record, _ in chain]
    lives = needed_of(side, files.lives, members)
    return ReplayPlan(chain, broken or list(later_records(side, files)), members, lives, side.strays)
