"""What of a run is computed again, as its files say: the same in every process of a replay."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from shoal.errors import Contradiction
from shoal.replay.claims import whole_chain
from shoal.replay.generations import Generation, Members, members_of
from shoal.replay.order import Compute, ReplayOrder
from shoal.replay.run_files import RunFiles
from shoal.replay.sharing import share_generations
from shoal.replay.sides import later_records, needed_of, side_of
from shoal.replay.verdict import Difference
from shoal.swarm.records import Tip
from shoal.wire.messages.round import Record, SignedRecord


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The rounds that can be computed.

    Attributes:
        base: the record before the first one that is computed.
        chain: records from there on, as long as each names the one before.
        broken: why there are no more.
        generations: all of the run, each up to the last of these rounds.
        strays: replicas that came from another chain of records without having begun anew.
    """

    base: Tip
    chain: list[tuple[Record, SignedRecord]]
    broken: list[Difference]
    members: list[Members]
    generations: tuple[Generation, ...]
    strays: tuple[Difference, ...]

    def order(self) -> ReplayOrder:
        """Return the actions anew, to iterate over once."""
        records = [record for record, _ in self.chain]
        return ReplayOrder(records, self.generations, self.members, self.base.round)

    def homes(self, num_processes: int, steps_per_process: int) -> list[int]:
        """Return the process of each generation; 0 for all where one process is enough.

        Args:
            num_processes: the most to use; fewer are used where generations compute with several threads.
            steps_per_process: another process is only started for this many steps.
        """
        steps: Counter[tuple[int, ...]] = Counter()
        # Up to where the logs contradict each other.
        with suppress(Contradiction):
            for action in self.order():
                if isinstance(action, Compute):
                    steps[tuple(generation.number for generation in action.generations)] += 1
        most = min(
            num_processes // max((generation.place.num_threads for generation in self.generations), default=1),
            len(self.generations),
        )
        most = min(most, steps.total() // steps_per_process)
        # Kernels of one GPU gain nothing from it, and take the memory of several processes.
        if most < 2 or any(generation.place.device != "cpu" for generation in self.generations):
            return [0] * len(self.generations)
        return share_generations(steps, len(self.generations), most)


def plan_of(files: RunFiles) -> ReplayPlan:
    """Return what can be computed of a run."""
    chain, broken = whole_chain(files)
    side = side_of(files.base, chain, files.generations)
    members = [members_of(record, side.generations, files.logs.get(record.round, {})) for record, _ in chain]
    generations = needed_of(side, files.generations, members)
    return ReplayPlan(files.base, chain, broken or list(later_records(side, files)), members, generations, side.strays)
