"""A check, as a line of a table, and what all of them make of the facts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shoal.cli.doctor.diagnosis import CheckResult, Condition, Diagnosis, Judged
from shoal.cli.doctor.facts import Facts

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Check:
    """A line of the table of checks.

    Attributes:
        name: is stable; what stands before the dot is its group.
        title: what is looked at, in words.
        judge: says what the facts come to.
    """

    name: str
    title: str
    judge: Callable[[Facts], Judged]


def about(read: Callable[[Facts], Seen | Judged], judge: Callable[[Seen], Judged]) -> Callable[[Facts], Judged]:
    """Return what judges one of the facts, and where that is not known says why."""

    def judge_if_known(facts: Facts) -> Judged:
        seen = read(facts)
        return seen if isinstance(seen, Judged) else judge(seen)

    return judge_if_known


def diagnosis(experiment_prefix: str, checks: Sequence[Check], facts: Facts) -> Diagnosis:
    """Judge the facts by all checks."""
    judged = [(check, check.judge(facts)) for check in checks]
    results = tuple(
        CheckResult(check.name, check.title, each.condition, each.evidence, each.remedy) for check, each in judged
    )
    said = {each.verdict for each in results}
    worst = next((each for each in (Condition.FAILED, Condition.WARNING) if each in said), Condition.OK)
    return Diagnosis(experiment_prefix=experiment_prefix, verdict=worst, checks=results)
