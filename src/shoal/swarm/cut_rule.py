"""Which steps the average of a round has: those up to its cut, and with fragments those of earlier rounds. Pure.

    round r      |- c commits -> cut -- the others, while what was cut travels --> record r, merge
    its average  |- after the last cut of its fragment ... up to this one -|

A replica is cut after so many commits of the round, or at its join if it has done fewer. What it commits later stays in
its own parameters, and counts in the next average of each fragment. Nothing but the round, the log and the
configuration says where the cut is, so no message does, and the logs prove it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from shoal.config.diloco import DilocoConfig
from shoal.swarm.records import trained
from shoal.wire.messages.step import StepEntry, StepsTrained


@dataclass(frozen=True, slots=True)
class CutRule:
    """The rule of a run.

    Attributes:
        num_fragments: P, of the parameters; each round averages one of them.
        cut_after: commits of a round after which a replica is cut; None: always at its join.
        last_round: of the run. It has all steps: no later one would have the others.
    """

    num_fragments: int = 1
    cut_after: int | None = None
    last_round: int = 0

    @classmethod
    def of(cls, diloco: DilocoConfig) -> Self:
        """As a user has configured it."""
        return cls.said(diloco.model_dump(include={"inner_steps", "outer_steps", "fragments", "overlap_steps"}))

    @classmethod
    def said(cls, diloco: dict[str, int]) -> Self:
        """As the files of a run have the section; those of earlier versions lack keys."""
        overlap_steps = diloco.get("overlap_steps", 0)
        cut_after = diloco["inner_steps"] - overlap_steps if overlap_steps else None
        return cls(diloco.get("fragments", 1), cut_after, diloco["outer_steps"])

    @property
    def keeps_own(self) -> bool:
        """Whether members have parameters of their own when a round begins."""
        return self.num_fragments > 1 or self.cut_after is not None

    def commits(self, round: int) -> int | None:
        """After how many commits of this round a replica is cut; None: at its join."""
        return None if round == self.last_round else self.cut_after

    def brought(self, round: int, log: Sequence[StepEntry], earlier: Iterable[StepsTrained]) -> StepsTrained:
        """What a replica brings to a round: what it has done since it took part in averaging this fragment."""
        parts = (*earlier, self._parts(round, log)[0])
        return StepsTrained(sum(each.num_steps for each in parts), sum(each.num_targets for each in parts))

    def still_earlier(
        self, round: int, earlier: Sequence[StepsTrained], log: Sequence[StepEntry]
    ) -> tuple[StepsTrained, ...]:
        """`Join.earlier` of the round after this one, of a replica that has had its part in this one."""
        parts = (*earlier, *self._parts(round, log))
        num_kept = self.num_fragments * self._per_round - 1
        return parts[max(0, len(parts) - num_kept) :]

    def before(self, earlier: Sequence[StepsTrained], num_rounds: int) -> tuple[StepsTrained, ...]:
        """Of a replica's `Join.earlier`, what is not of the last rounds."""
        return tuple(earlier[: max(0, len(earlier) - self._per_round * num_rounds)])

    @property
    def _per_round(self) -> int:
        return 1 if self.cut_after is None else 2

    def _parts(self, round: int, log: Sequence[StepEntry]) -> tuple[StepsTrained, ...]:
        """What a round's steps come to, up to the cut and after it."""
        if self.cut_after is None:
            return (trained(log),)
        commits = self.commits(round)
        after = len(log) if commits is None else commits
        return trained(log[:after]), trained(log[after:])


EVERY_STEP: Final = CutRule()
"""Each round averages all parameters, as they are when it is closed."""
