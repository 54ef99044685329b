"""A check, as a line of a table, and what all of them make of the facts. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from shoal.cli.doctor.diagnosis import CheckResult, Diagnosis, Judged, worst_of
from shoal.cli.doctor.facts import Facts
from shoal.config.keys import nearest
from shoal.errors import ConfigError

Seen = TypeVar("Seen")


@dataclass(frozen=True)
class Check:
    """A line of the table of checks.

    Attributes:
        name: is stable; what stands before the dot is its group.
        title: what is looked at, in words.
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
    return Diagnosis(experiment_prefix=experiment_prefix, verdict=worst_of(results), checks=results)


def names_of(said: str, checks: Sequence[Check]) -> frozenset[str]:
    """Return the names of the checks that are meant by a name, with or without its group, or by a group; empty: all.

    Raises:
        ConfigError: none is.
    """
    names = frozenset(check.name for check in checks if said in ("", check.name, *check.name.split(".")))
    if not names:
        known = sorted({part for check in checks for part in check.name.split(".")})
        right = nearest(said, known)
        advice = f"did you mean {right}?" if right else f"there are {', '.join(known)}"
        raise ConfigError(f"{said}: no such check; {advice}")
    return names
