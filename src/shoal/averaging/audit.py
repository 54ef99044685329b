"""What a run has trained, recomputed from its step logs alone: promise 2 checked from outside.

A step counts if some replica's log holds it; it is on up to S logs, one for each stage of its path, and counts once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.averaging.journal import StepLine, read_records, read_steps, rounds_with_steps
from shoal.ids import StepKey
from shoal.swarm.sample_ranges import count, merge
from shoal.wire.messages.base import SampleRange
from shoal.wire.messages.step import StepEntry


@dataclass(frozen=True, slots=True)
class Audit:
    """Counts over a whole run.

    Attributes:
        rounds: Rounds with a step log.
        steps: Committed steps, skipped ones included.
        samples: Distinct samples in steps that were not skipped.
        skipped: Distinct samples in steps that were skipped.
        duplicates: Samples that are in a step although an earlier step has them, counted each time.
        missing: Samples of a pass that no step contains: all of a pass after which another was begun, and of the last
            pass those below the highest one that was trained.
        steps_lost: By stage, steps that the stage has no part in: those that none of its replicas held when their round
            ended, and all of the rounds that were lost when the stage was restored.
    """

    rounds: int
    steps: int
    samples: int
    skipped: int
    duplicates: int
    missing: int
    steps_lost: Mapping[int, int]


def audit(directory: Path, num_samples_per_pass: int) -> Audit:
    """Recompute a run's counts.

    Args:
        directory: The run's directory, with its `steps/`.
        num_samples_per_pass: N: positions 0..N-1 of each pass.

    Raises:
        RecordRejected: A file is no step log, or no record.
        OSError: A file cannot be read.
    """
    rounds = rounds_with_steps(directory)
    steps: dict[tuple[int, StepKey], StepEntry] = {}
    lost: defaultdict[int, set[tuple[int, StepKey]]] = defaultdict(set)
    for round in rounds:
        lines = read_steps(directory, round)
        for stage, key in _lost(lines):
            lost[stage].add((round, key))
        steps.update({(round, line.entry.key): line.entry for line in lines})
    for record, _ in read_records(directory):
        for outcome in record.stages:
            if outcome.restored is not None:
                first = outcome.restored.round + 1
                lost[outcome.stage].update(step for step in steps if first <= step[0] < record.round)
    num_stages = max((len(entry.path) for entry in steps.values()), default=0)
    everything = [item for entry in steps.values() for item in entry.samples]
    distinct = merge(everything)
    return Audit(
        rounds=len(rounds),
        steps=len(steps),
        samples=count(merge(item for entry in steps.values() if not entry.skipped for item in entry.samples)),
        skipped=count(merge(item for entry in steps.values() if entry.skipped for item in entry.samples)),
        duplicates=count(everything) - count(distinct),
        missing=_missing(distinct, num_samples_per_pass),
        steps_lost={stage: len(lost[stage]) for stage in range(num_stages)},
    )


def _lost(lines: Iterable[StepLine]) -> list[tuple[int, StepKey]]:
    """Of one round: stages, and the steps that are in the log of some stage, but of no replica of this one."""
    stages: defaultdict[StepKey, set[int]] = defaultdict(set)
    lengths: dict[StepKey, int] = {}
    for line in lines:
        stages[line.entry.key].add(line.stage)
        lengths[line.entry.key] = len(line.entry.path)
    return [(stage, key) for key, held in stages.items() for stage in set(range(lengths[key])) - held]


def _missing(distinct: Iterable[SampleRange], num_samples_per_pass: int) -> int:
    trained: Counter[int] = Counter()
    frontier: Counter[int] = Counter()
    for item in distinct:
        trained[item.pass_number] += len(item)
        frontier[item.pass_number] = max(frontier[item.pass_number], item.stop)
    last = max(frontier, default=-1)
    due = sum(frontier[p] if p == last else num_samples_per_pass for p in range(last + 1))
    return due - sum(trained.values())
