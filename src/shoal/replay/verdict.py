"""What a replay has found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shoal.ids import PeerId


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not as the files of the run say.

    Attributes:
        round: 0 for what concerns the run as a whole.
        stage: None means all stages.
        replica: the one that differs; None where it cannot be told, or where no replica caused it.
        what: what differs, and from what.
    """

    round: int
    stage: int | None
    replica: PeerId | None
    what: str

    def __str__(self) -> str:
        places = [f"round {self.round}"] if self.round else []
        places += [] if self.stage is None else [f"stage {self.stage}"]
        places += [] if self.replica is None else [f"replica {self.replica}"]
        return f"{', '.join(places)}: {self.what}" if places else self.what

    def as_json(self) -> dict[str, Any]:
        return {"round": self.round, "stage": self.stage, "replica": self.replica, "what": self.what}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one replay.

    Attributes:
        rounds: number of records that the run has left.
        rounds_agreed: rounds, from the first one on, in which everything agrees.
        steps: number of steps that were computed again.
        samples: distinct samples in steps that were not skipped.
        skipped: distinct samples in steps that were skipped because they were not finite.
        repeated: samples that are in a second step.
        missing: samples that are in no step, and should be.
        steps_lost: by stage, the number of steps that the stage has no part in.
        differences: in the order in which they were found.
        notes: what else the user should know: other machines, what could not be compared.
    """

    run_id: str
    rounds: int
    rounds_agreed: int
    steps: int
    samples: int
    skipped: int
    repeated: int
    missing: int
    steps_lost: Mapping[int, int]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    took_s: float

    @property
    def agrees(self) -> bool:
        """Whether the run can have been nothing else than what its files say."""
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "run_id": self.run_id,
            "agrees": self.agrees,
            "rounds": self.rounds,
            "rounds_agreed": self.rounds_agreed,
            "steps": self.steps,
            "samples": self.samples,
            "skipped": self.skipped,
            "repeated": self.repeated,
            "missing": self.missing,
            "steps_lost": {str(stage): number for stage, number in self.steps_lost.items()},
            "differences": [difference.as_json() for difference in self.differences],
            "notes": list(self.notes),
            "took_s": round(self.took_s, 3),
        }
