"""What a check comes to, and all of them together as they are printed. Pure.

The form of the JSON object is docs/doctor.schema.json: keys and checks are added, none is taken away.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

SCHEMA_VERSION: Final = 1


class Condition(enum.StrEnum):
    """What a check says."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Judged:
    """What a check comes to.

    Attributes:
        evidence: the values that were seen; of a check that is skipped, why.
        remedy: what to do, of a warning or a failure.
    """

    condition: Condition
    evidence: str
    remedy: str = ""


def ok(evidence: str) -> Judged:
    """All is well."""
    return Judged(Condition.OK, evidence)


def warning(evidence: str, remedy: str) -> Judged:
    """The host can take part, and not as well as it might."""
    return Judged(Condition.WARNING, evidence, remedy)


def failed(evidence: str, remedy: str) -> Judged:
    """The host cannot take part."""
    return Judged(Condition.FAILED, evidence, remedy)


def skipped(why: str) -> Judged:
    """Nothing is known, or the check does not apply."""
    return Judged(Condition.SKIPPED, why)


class CheckResult(msgspec.Struct, frozen=True):
    """What one check has found. A warning and a failure have a remedy."""

    name: str
    title: str
    verdict: Condition
    evidence: str
    remedy: str


def worst_of(checks: Sequence[CheckResult]) -> Condition:
    """Return what these checks come to together."""
    said = {each.verdict for each in checks}
    return next((each for each in (Condition.FAILED, Condition.WARNING) if each in said), Condition.OK)


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """A host. `verdict` is failed if a check has failed, else warning if one warns, else ok."""

    schema: int = SCHEMA_VERSION
    experiment_prefix: str
    verdict: Condition
    checks: tuple[CheckResult, ...]

    @property
    def findings(self) -> tuple[CheckResult, ...]:
        """What has to be done something about, the worst first."""
        return self.of(Condition.FAILED) + self.of(Condition.WARNING)

    def only(self, names: Collection[str]) -> Diagnosis:
        """Return what these checks come to alone."""
        checks = tuple(check for check in self.checks if check.name in names)
        return Diagnosis(experiment_prefix=self.experiment_prefix, verdict=worst_of(checks), checks=checks)

    def of(self, condition: Condition) -> tuple[CheckResult, ...]:
        """Return the checks that say this."""
        return tuple(check for check in self.checks if check.verdict is condition)
